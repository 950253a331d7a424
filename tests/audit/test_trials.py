"""The trials of `mtbench audit`: a planted fault is explained by its own change, by likelihood, or a tie is said."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_answers import AR, faulty_run, honest_run, judge_runner
from planted_faults import Fault, sampled, weights
from planted_reading import from_token, in_answers, other_layer, padded, suppressed, window
from transformers import GPT2Config, GPT2LMHeadModel

import mtbench
from mtbench.experiments.audit.changes import Probe, layers_of
from mtbench.experiments.audit.drawn import Draws
from mtbench.experiments.audit.explanation import Explanation, explain
from mtbench.experiments.audit.format import TrialLine, Tried
from mtbench.experiments.audit.judge import Judge, shortfalls
from mtbench.experiments.audit.request import AuditRequest
from mtbench.measure.lossless_check import Answer

SMALL = {"limit": 4, "batch_size": (4,), "max_new_tokens": 40, "dtype": "float32", "method": ("ar",)}


def trial(name: str, text: str, *answers: tuple[int, int], exact: bool = True) -> TrialLine:
    """Return a trial. answers: tokens that are off before and after; each has a misfit of 2."""
    tried = [
        Tried(item=f"item {n}", tokens=40, before=before, after=after, misfit_before=2 * before, misfit=2 * after)
        for n, (before, after) in enumerate(answers)
    ]
    sums = {"before": sum(b for b, _ in answers), "after": sum(a for _, a in answers), "answers": len(answers)}
    return TrialLine(pair=0, side="b", trial=text, name=name, exact=exact, tried=tried, **sums)


def others(count: int, *answers: tuple[int, int]) -> list[TrialLine]:
    return [trial("weights", f"other {n}", *answers) for n in range(count)]


BEST = trial("cache/position", "a window", (6, 0), (5, 0), (0, 0))
EXPLAINED: dict[str, tuple[list[TrialLine], tuple[str | None, bool] | None]] = {  # class, and whether more would tell
    "one class": ([BEST, *others(80, (6, 6), (5, 5), (0, 2))], ("cache/position", False)),
    "two trials of a class": (
        [BEST, trial("cache/position", "a prompt part", (6, 0), (5, 0), (0, 0)), *others(80, (6, 6), (5, 5), (0, 2))],
        ("cache/position", False),
    ),
    "two classes": ([BEST, *others(1, (6, 0), (5, 0), (0, 0)), *others(80, (6, 6), (5, 5), (0, 2))], (None, False)),
    "one token": ([trial("cache/position", "a window", (1, 0), (0, 0)), *others(80, (1, 1), (0, 1))], (None, True)),
    "half of the tokens": ([trial("cache/position", "a window", (6, 3), (5, 2)), *others(9, (6, 6), (5, 5))], None),
    "half of them by a similar change": (
        [trial("weights", "4 bits", (9, 4), (8, 4), exact=False), *others(9, (9, 9), (8, 8))],
        ("weights", False),
    ),
    "some answers": (
        [trial("sampling", "an id", (6, 0), (6, 0), (0, 9), (0, 8)), *others(80, (6, 6), (6, 6), (0, 1), (0, 1))],
        ("sampling", False),
    ),
    "drawn tokens, and a change that leaves few of them": (
        [
            trial("weights", "layer 3 left out", (9, 0), (8, 1), exact=False),
            trial("sampling", "tokens sampled", (9, 0), (8, 0)).changed(chance=0.5),
            *others(80, (9, 9), (8, 8)),
        ],
        ("weights", False),
    ),
    "drawn tokens, and a change that leaves half of them": (
        [
            trial("sampling", "tokens sampled", (9, 0), (8, 0)).changed(chance=0.5),
            trial("weights", "4 bits", (9, 4), (8, 4), exact=False),
            *others(80, (9, 9), (8, 8)),
        ],
        ("sampling", False),
    ),
    "drawn tokens, or logits with errors": (
        [
            trial("sampling", "tokens sampled", (9, 0), (8, 0)).changed(chance=0.5),
            trial("weights", "logits with errors", (9, 0), (8, 0)).changed(chance=0.5),
            *others(80, (9, 9), (8, 8)),
        ],
        (None, False),
    ),
    "right tokens go wrong": ([trial("weights", "a layer", (3, 9), (0, 9)), *others(9, (3, 3), (0, 0))], None),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_the_best_trial_explains_a_side_if_it_is_clearly_better_than_those_of_other_classes(case: str) -> None:
    lines, expected = EXPLAINED[case]
    found = explain(lines)
    assert (found and (found.name, found.more > 0)) == expected
    assert found is None or found.trials[0] == lines[0].trial


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_noise_is_that_of_the_number_type_however_few_tokens_there_are(dtype: str) -> None:
    """Three answers of 8 tokens give the noise of many within a factor of two; and no choice has to change for it."""
    judge = Judge("embedded:tiny/ar", AuditRequest(device="cpu"))
    texts = [judge.known.tokenizer(f"What is {n} + 47? The answer is {n + 47}.")["input_ids"] for n in range(40)]
    many, few = (
        judge.noise(dtype, [Answer(ids[:-8], ids[-8:]) for ids in texts[:count]]).spread for count in (len(texts), 3)
    )
    assert many is not None
    assert few is not None
    assert many / 2 < few < 2 * many
    step = torch.finfo(getattr(torch, dtype)).eps
    assert step < many < 100 * step


def drawn_tokens(logits: torch.Tensor, temperature: float, top_k: int = 0) -> list[int]:
    p = (logits / temperature).softmax(-1)
    if top_k:
        p = torch.where(p >= p.topk(top_k).values[:, -1:], p, 0)
    return torch.multinomial(p, 1, generator=torch.Generator().manual_seed(3))[:, 0].tolist()


def looks_of(answers: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> Any:
    draws = Draws(1e-4)
    for n, (logits, tokens) in enumerate(answers):
        draws.add(Probe(f"item {n}", Answer([0], tokens)), logits)
    return draws.best()


@pytest.mark.parametrize(("temperature", "top_k"), [(0.15, 0), (0.3, 0), (1.0, 0), (1.0, 40)])
def test_drawn_tokens_have_their_temperature_and_filter(temperature: float, top_k: int) -> None:
    chance = torch.Generator().manual_seed(1)
    every = [4 * torch.randn(64, 2000, generator=chance) for _ in range(6)]
    found = looks_of([(logits, drawn_tokens(logits, temperature, top_k)) for logits in every])
    low, high = (float(word) for word in found.text.split("(")[1].split(")")[0].split(" to "))
    assert low * 0.9 <= temperature <= high * 1.1
    assert found.chance > 0.05
    assert ("top_k" in found.text) == (top_k > 0)


def test_choices_by_other_logits_are_not_drawn() -> None:
    """At some places they are far from the first ones, and at others near: no temperature fits both."""
    chance = torch.Generator().manual_seed(2)
    every = [4 * torch.randn(64, 2000, generator=chance) for _ in range(4)]
    spread = torch.cat((torch.zeros(40), torch.full((24,), 6.0)))[:, None]
    wrong = [(x + spread * torch.randn(x.shape, generator=chance)).argmax(-1).tolist() for x in every]
    assert looks_of([*zip(every, wrong, strict=True)]).chance < 1e-3


def test_choices_that_are_all_near_are_not_clearly_drawn() -> None:
    """Coarse logits choose like a low temperature."""
    chance = torch.Generator().manual_seed(3)
    every = [4 * torch.randn(200, 2000, generator=chance) for _ in range(4)]
    found = looks_of([(x, (2 * x).round().argmax(-1).tolist()) for x in every])
    assert found.chance > 0.05
    assert not found.clear
    assert looks_of([(x, drawn_tokens(x, 1.0)) for x in every]).clear


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest_run(tmp_path_factory.mktemp("trials") / "honest", **SMALL)


PLANTED: dict[str, tuple[Fault, str, str]] = {  # fault, class, and the change that explains it
    "a window from a token on": (from_token(8, window(40)), "cache/position", "a sliding window of 40, from new token"),
    "keys of another layer in two answers": (
        in_answers({1, 2}, other_layer({2: 1}, "keys")),
        "cache/position",
        "layer 2 reads the keys of the layer before",
    ),
    "scaled positions": (
        weights(lambda checkpoint: checkpoint.model.base_model.rotary_emb.inv_freq.mul_(0.5)),
        "cache/position",
        "positions times 0.5",
    ),
    "padding": (padded(0), "cache/position", "padding with id 0 before prompts is read, and has positions"),
    "an id that is never chosen": (suppressed(17), "sampling", "id 17 never chosen"),
    "drawn": (sampled(1.0, seed=2), "sampling", "tokens sampled at temperature"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_explained_by_its_own_change(fault: str, honest: Path, tmp_path: Path) -> None:
    wrong, name, text = PLANTED[fault]
    run = faulty_run(tmp_path / "b", wrong, **SMALL)
    record = mtbench.audit(f"{honest}:{AR}.b4", f"{run}:ar", out=tmp_path / "audit", device="cpu").record
    found = explain([TrialLine.model_validate(line) for line in record["trials"]])
    print(found)
    assert isinstance(found, Explanation)
    assert found.name == name
    assert text in found.trials[0]


def test_a_change_that_gives_no_number_explains_nothing() -> None:
    """Such as a model in float16 whose values are beyond its range."""
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 0.0], [-torch.inf, 0.0]])
    assert shortfalls(logits, torch.tensor([[0], [1], [0]])).tolist() == [1.0, torch.inf, torch.inf]


def test_a_model_that_calls_its_layers_otherwise_has_no_trials_of_layers() -> None:
    small = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32))
    assert not layers_of(small)
    assert len(layers_of(judge_runner().model)) == 4

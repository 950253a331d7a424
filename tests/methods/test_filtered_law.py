"""The law of texts under top-k, top-p and min-p: of each rule that verifies drafts, and of a draft that filters remove.

The law is that of a Markov chain whose rows are filtered by transformers' own processors.
"""

from dataclasses import asdict
from itertools import cycle, product
from typing import Any

import pytest
import torch
from chi_square import Fit, MarkovModel, exact_law, filtered_law, fit, numbers
from decoding_cases import READ_LAG, decode_prompts
from small import small_tokenizer
from torch import Tensor

from mtbench.decoding.loop import Batch
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.models.loading import prepare
from mtbench.models.runner import ModelRunner
from mtbench.sampling import Sampling

TOKENS, LENGTH, MANY = 24, 3, 24_000
SETTINGS = [
    Sampling(0.7, top_p=0.9),
    Sampling(1.0, top_k=5),
    Sampling(0.6, top_k=20, top_p=0.95),
    Sampling(1.0, min_p=0.05),
]
RULES: list[tuple[str, bool]] = list(product(("match", "rejection", "block"), (False, True)))
DRAFTS = ("near", "outside")  # most of the mass of the second lies where the filters of the target leave nothing


def pair(draft: str, dtype: torch.dtype) -> tuple[Tensor, ModelRunners]:
    """Return the target's logits behind each token (V, V), and runners of the target and a draft."""
    noise = torch.Generator().manual_seed(3)
    target, other = (torch.randn(TOKENS, TOKENS, generator=noise, dtype=torch.double) * 1.5 for _ in range(2))
    tables = [target, target + 0.6 * other if draft == "near" else -target]
    models = [MarkovModel(table.softmax(1), size) for table, size in zip(tables, (1000, 1), strict=True)]
    for model in models:
        model.table = model.table.to(dtype)
    lanes = [ModelRunner(prepare(model, small_tokenizer(), source="made")) for model in models]
    return models[0].table[:TOKENS, :TOKENS].double(), ModelRunners("any", {"any": lanes[0], "draft": lanes[1]})


def texts(
    runners: ModelRunners, settings: Sampling, count: int, name: str, seed: int, **options: Any
) -> list[Generation]:
    how: dict[str, Any] = {"rows": 2000, "ignore_eos": True, "seeds": range(seed, seed + count), **asdict(settings)}
    return decode_prompts(METHODS[name](**options), runners, [[2, 0]] * count, LENGTH, **how)[0]


def checked(logits: Tensor, settings: Sampling, got: list[Generation]) -> Fit:
    """Test texts against the law. Fails at a text that it does not have."""
    behind = filtered_law(logits, settings)
    law = exact_law(lambda text: behind[text[-1] if text else 0], TOKENS, LENGTH)
    counts = numbers([g.token_ids for g in got], TOKENS).bincount(minlength=len(law)).double()
    assert counts[law == 0].sum() == 0, "a token that the filters remove"
    assert float((law > 0).double().mean()) < 0.75, "the filters must remove something"
    return fit(counts, len(got) * law)


@pytest.mark.parametrize(
    ("rule", "settings", "draft"), list(zip(RULES, cycle(SETTINGS), cycle(DRAFTS), strict=False)), ids=str
)
def test_filtered_texts_have_the_law_of_the_target_at_once(
    rule: tuple[str, bool], settings: Sampling, draft: str
) -> None:
    """A quick one of each rule."""
    (verify, filter_draft), (logits, runners) = rule, pair(draft, torch.double)
    got = texts(runners, settings, 4000, "speculative", 0, ahead=3, verify=verify, filter_draft=filter_draft)
    assert checked(logits, settings, got).p > 1e-4
    if draft == "near":
        assert {1, 2, 3} <= {n for g in got for n in g.commits or []}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "dtype"), [*zip(DRAFTS, [torch.double] * 2, strict=True), ("near", torch.float)], ids=str
)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_filtered_texts_have_the_law_of_the_target(settings: Sampling, dtype: torch.dtype, draft: str) -> None:
    """By every rule, with the draft's distribution filtered or not; and without drafts."""
    logits, runners = pair(draft, dtype)
    seed = MANY * 10 * (SETTINGS.index(settings) + 4 * (dtype == torch.float) + 8 * DRAFTS.index(draft))
    arms: list[tuple[str, dict[str, Any]]] = [("ar", {})]
    arms += [("speculative", {"ahead": 3, "verify": verify, "filter_draft": own}) for verify, own in RULES]
    for n, (name, options) in enumerate(arms):
        got = texts(runners, settings, MANY, name, seed + n * MANY, **options)
        found = checked(logits, settings, got)
        accepted = sum((g.commits or [1])[0] - 1 for g in got) / MANY
        print(f"LAW {settings} {dtype} {draft} {name} {options} N={MANY} {found}, accepted {accepted:.3f}")
        assert found.p > 1e-4


@pytest.mark.parametrize(("verify", "filter_draft"), RULES[2:])
def test_rejection_sees_the_distribution_that_drafts_were_drawn_from(verify: str, filter_draft: bool) -> None:
    """It sums to 1, and no draft lies outside; unfiltered it is the distribution at the temperature."""
    _, runners = pair("near", torch.double)
    table, kept = runners["draft"].model.table[:TOKENS, :TOKENS], list[Batch]()
    for settings in SETTINGS:

        def make(*arguments: Any) -> Batch:
            kept.append(READ_LAG(*arguments))
            return kept[-1]

        method = METHODS["speculative"](ahead=1, verify=verify, filter_draft=filter_draft)
        prompts = [[2, token] for token in range(TOKENS)]
        decode_prompts(method, runners, prompts, 1, make=make, **asdict(settings))
        own = settings if filter_draft else Sampling(settings.temperature)
        torch.testing.assert_close(
            kept[-1].state["offered"][:, 0, :TOKENS], filtered_law(table, own), rtol=1e-12, atol=1e-12
        )

"""Who judges an arm's tokens, and in which words: an engine that computes something else does not excuse itself."""

import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from decoding_cases import decode_prompts
from made_records import generation_line
from small import save_small, small_checkpoint
from stages import assemble, generate
from stored import stored_json
from whole import Quiet, cells_of, start

from mtbench import statistics
from mtbench.decoding.engines import ENGINES, Graph
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.errors import NotNumbersError
from mtbench.kernels import Norm
from mtbench.measure import grades, judging_time, lossless_check, peak_memory, reading
from mtbench.measure.judging_time import answers_due
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.reading import Answer, Reading, judged
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import ModelRunner
from mtbench.models.whole_texts import FED_AT_ONCE
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import GenerationLine, ReadingLine, RescoringRecord
from mtbench.plan.plan import Cell, Plan, RunRequest
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.sampling import GREEDY, Sampling

PROMPTS = [[3], [5, 9, 1], [30, 31, 2, 7]]
BUDGET = 12


class Bent(Graph):
    """Runs a decoder whose last norm is off, by `bend` (C,): what it does is wrong, and always the same."""

    bend = torch.linspace(0.5, 1.5, 32)

    def runner(self, checkpoint: Checkpoint) -> ModelRunner:
        runner = super().runner(checkpoint)
        assert runner.decoder is not None
        weight, eps = runner.decoder.norm
        runner.decoder.norm = Norm(weight.detach() * self.bend.to(weight), eps)
        return runner


class Louder(Bent):
    """Its logits are one percent larger, so its tokens are right."""

    bend = torch.full((32,), 1.01)


def run_with(engine: type[Graph], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, int]]:
    """By arm, the grade and how many of the items have the very tokens it promises, where `engine` is called graph."""
    monkeypatch.setitem(ENGINES, "graph", engine)
    monkeypatch.setattr(peak_memory, "measure", lambda *_: None)
    request = RunRequest(
        checkpoint={"ar": str(save_small(folder / "model", 1)), "mars": str(folder / "model")},
        method=["ar:engine=eager|graph", "ar:engine=graph,on=mars", "mars:engine=graph,tau=1"],
        limit=3,
        rounds=1,
        batch_size=(3,),
        max_new_tokens=6,
        device="cpu",
    )
    run = start(folder / "run", request)
    generate(run, Quiet())
    cells = cells_of(dump(assemble(run)))
    return {arm: (g["grade"], g["identical"]) for arm, c in cells.items() if (g := c["lossless"])}


def test_a_right_engine_is_exact_and_a_wrong_one_does_not_judge_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own lights each token is the argmax, and a method on it says what `ar` on it says."""
    right = run_with(Graph, tmp_path / "right", monkeypatch)
    assert right == {"ar@ar/graph": ("exact", 3), "mars@mars/graph": ("exact", 3)}
    wrong = run_with(Bent, tmp_path / "wrong", monkeypatch)
    assert wrong["ar@ar/graph"][0] == "divergent"
    assert wrong["mars@mars/graph"] == ("divergent", 3)


@pytest.fixture
def checkpoint() -> Checkpoint:
    return small_checkpoint()


@pytest.fixture
def answers(checkpoint: Checkpoint) -> list[tuple[list[int], list[int]]]:
    said, _ = decode_prompts(
        METHODS["ar"](), ModelRunners("ar", {"ar": ModelRunner(checkpoint)}), PROMPTS, BUDGET, ignore_eos=True
    )
    return [(prompt, g.token_ids) for prompt, g in zip(PROMPTS, said, strict=True)]


@pytest.mark.parametrize(("engine", "percent"), [("graph", 1), ("eager", 0), (None, 0)])
def test_epsilon_is_what_engine_and_width_do_to_a_logit(
    engine: str | None,
    percent: int,
    checkpoint: Checkpoint,
    answers: list[tuple[list[int], list[int]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In half precision: between the judge over whole texts and the arm's engine at its width, on the answers of the
    arm that it is held to. The judge's engine is the eager one; an outside engine is measured by it. Each answer is
    read once, those of all arms together.
    """
    for module in (judging_time, statistics):
        monkeypatch.setattr(module, "EPSILON_POSITIONS_NEEDED", len(PROMPTS) * BUDGET)
    monkeypatch.setattr(statistics, "EPSILON_CAP", torch.inf)
    monkeypatch.setitem(ENGINES, "graph", Louder)
    pool = ModelPool(RunRequest(device="cpu", dtype="float64", offline=True))
    pool.checkpoints["model"], pool.dtype = checkpoint, "bfloat16"
    fed: list[tuple[object, int, int]] = []
    forced = Reading.forced_logits

    def listen(reading: Reading, answers: Sequence[Answer]) -> Any:
        fed.append((reading.model, reading.width, len(answers)))
        return forced(reading, answers)

    monkeypatch.setattr(Reading, "forced_logits", listen)
    cells = [
        SimpleNamespace(
            cell=name,
            suite="s",
            arm=arm,
            claims="lossless",
            lossless_reference="ar" if arm != "ar" else None,
            on="ar",
            engine=engine,
            checkpoints={"ar": "model"},
        )
        for name, arm in (("r.b1", "ar"), ("r.b8", "ar"), ("c", "drafting"), ("d", "other"))
    ]
    run = RunDirectory.create(tmp_path / "run")
    counts = (
        {"positions_fed": 9 * BUDGET, "forwards": BUDGET} if engine else dict.fromkeys(("positions_fed", "forwards"))
    )
    lines = [
        generation_line(item=str(i), prompt_ids=p, prompt_tokens=len(p), token_ids=t, **counts)
        for i, (p, t) in enumerate(answers)
    ]
    other = [*lines[:2], lines[2].changed(token_ids=[*lines[2].token_ids[:-1], lines[2].token_ids[-1] ^ 1])]
    stored = {"r.b1": lines[:1], "r.b8": lines, "c": lines, "d": other}
    items = [SimpleNamespace(item=line.item) for line in lines]
    suite = SimpleNamespace(items=items, constrained=lambda _: set())
    plan = cast("Plan", SimpleNamespace(cells=cells, suite=lambda _: suite, item_seed=lambda _: 0))
    opened = cast("Any", SimpleNamespace(directory=run, answers=stored))
    rescoring = lossless_check.Rescoring(opened, plan, pool, pytest.fail)
    rescoring.check(cast("Cell", cells[2]))

    found = stored_json(run, "lossless/c.json")
    judge, own, width = (
        ModelRunner(checkpoint),
        pool.runner("ar", "model", engine),
        9 if engine else lossless_check.NARROW,
    )
    read = forced(Reading("judge", judge, 1), [Answer(*answer) for answer in answers])
    logits = np.concatenate([emitted for emitted, _ in read])
    assert found["epsilon"] == pytest.approx(np.quantile(percent / 100 * np.abs(logits), 0.999), rel=1e-4, abs=1e-5)
    assert found["items"] == {"0": {}, "1": {}, "2": {}}
    plain = pool.runner("ar", "model", "eager")
    assert plain.decoder is None
    assert fed == [(plain, FED_AT_ONCE, 4), (own, width, 3)]

    fed.clear()
    rescoring.check(cast("Cell", cells[3]))
    last = stored_json(run, "lossless/d.json")
    assert last["epsilon"] == found["epsilon"]
    assert [len(last["items"][item]) for item in "012"] == [0, 0, 1]
    assert fed == []


def test_an_interruption_loses_one_batch_and_grades_nothing(
    small_run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An interrupt, and the end of the time budget, are named; a resumed run reads what was not read, and no more."""
    shutil.copytree(small_run.path, tmp_path / "run")
    files = RunDirectory(tmp_path / "run")
    name = next(
        cell.cell for cell in Run.open(files).plan.cells if cell.claims == "lossless" and cell.lossless_reference
    )
    whole = stored_json(files, f"lossless/{name}.json")
    shutil.rmtree(files.path / "lossless")
    monkeypatch.setattr(reading, "FED_AT_ONCE", 1)  # each answer alone
    fed, forced = list[int](), Reading.forced_logits

    def passes(until: int, deadline: float = math.inf) -> str | None:
        def counted(of: Reading, answers: Sequence[Answer]) -> Any:
            fed.append(len(answers))
            if len(fed) == until:
                raise KeyboardInterrupt
            return forced(of, answers)

        fed.clear()
        monkeypatch.setattr(Reading, "forced_logits", counted)
        run = Run.open(files)
        pool, cell = ModelPool(run.plan.request), run.plan.cell(name)
        rescoring = lossless_check.Rescoring(run, run.plan, pool, pytest.fail, deadline=deadline)
        rescoring.begin([cell])
        with suppress(KeyboardInterrupt):
            rescoring.check(cell)
        [graded] = [cell.lossless for cell in assemble(files).cells if cell.cell == name]
        assert graded is not None
        assert (graded.worst_margin is None) == (graded.why is not None)
        return graded.why

    assert passes(until=3) == "re-scoring interrupted; `--resume` goes on"
    assert len(files.read_lines(lossless_check.READINGS, ReadingLine)) == 2
    assert passes(until=0, deadline=0.0) == "re-scoring interrupted: time budget; `--resume` goes on"
    assert passes(until=0) is None
    assert fed == [1] * (len(files.read_lines(lossless_check.READINGS, ReadingLine)) - 2)
    assert stored_json(files, f"lossless/{name}.json") == whole


def test_what_a_schema_forces_is_judged_between_the_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding has such tokens, too, so it is not judged. The judge's largest logit, 9, may not be allowed."""
    cells = [
        SimpleNamespace(
            cell=name, suite="s", arm=arm, claims="lossless", engine="vllm", batch_size=size, simulated=None,
            is_reference=arm == "ar", checkpoints={"ar": "model"}, lossless_reference="ar" if arm != "ar" else None,
        )
        for name, arm, size in (("plain", "ar", 2), ("c", "drafting", 2), ("plain.b1", "ar", 1))
    ]  # fmt: skip
    plain = [generation_line(item=item, token_ids=[4, 5, 6]) for item in ("forced", "free", "same", "shorter")]
    other = [line.changed(token_ids=[4, 7, 8]) for line in plain[:2]] + [plain[2], plain[3].changed(token_ids=[4, 5])]
    noisy = [plain[0].changed(token_ids=[4, 6, 6])]
    suite = SimpleNamespace(constrained=lambda engine: {"forced", "shorter"} if engine == "vllm" else set())
    plan = cast("Plan", SimpleNamespace(cells=cells, suite=lambda _: suite))
    unread = SimpleNamespace(has=lambda _: False)
    opened = cast("Any", SimpleNamespace(directory=unread, answers={"plain": plain, "c": other, "plain.b1": noisy}))
    rescoring = lossless_check.Rescoring(opened, plan, cast("Any", None), pytest.fail)

    def forced(_: object, cell: Cell, lines: list[GenerationLine], *args: Any) -> list[ReadingLine]:
        short = [{str(i): 9 - token / 2 for i, token in enumerate(line.token_ids)} for line in lines]
        return [ReadingLine(key="", item="", short=of, logits=[]) for of in short]

    monkeypatch.setattr(lossless_check.Rescoring, "_forced", forced)
    judged = answers_due(opened, plan, cast("Cell", cells[1]))
    assert [line.item for line in judged] == ["forced", "free", "shorter"]
    assert [line.item for line in answers_due(opened, plan, cast("Cell", cells[0]))] == ["free", "same"]
    reading = Reading("", cast("Any", None))
    found = rescoring._shortfalls(cast("Cell", cells[1]), judged, reading)
    assert found == {"forced": {"1": 1.0}, "free": {"0": 7.0, "1": 5.5, "2": 5.0}, "shorter": {}}
    assert rescoring._noise(cast("Cell", cells[1]), reading) == 0.5


@pytest.mark.parametrize(
    ("same", "worst", "epsilon", "dtype", "word"),
    [
        (True, 0.0, 0.2, "bfloat16", "exact"),
        (True, 0.3, 0.2, "bfloat16", "exact"),  # beyond ε by chance, yet the very tokens
        (True, 0.6, 0.2, "bfloat16", "divergent"),
        (True, 2e-4, 0.2, "float32", "divergent"),
        (True, None, 0.2, "bfloat16", "exact"),
        (False, 0.1, 0.2, "bfloat16", "near-tie"),
        (False, 0.3, 0.2, "bfloat16", "divergent"),
        (False, 0.4, None, "bfloat16", "inconclusive"),
        (False, 0.6, None, "bfloat16", "divergent"),  # whatever ε would have been, it would not have been more
        (False, None, 0.2, "bfloat16", "inconclusive"),
        (False, None, 0.2, "float32", "divergent"),
    ],
)
def test_the_words(same: bool, worst: float | None, epsilon: float | None, dtype: str, word: str) -> None:
    """Given the farthest that a token lies under the judge's argmax; None: nobody judged. ε None: too few positions."""
    rescored = None if worst is None else RescoringRecord(epsilon=epsilon, items={"a": {"1": worst}})
    other = {"a": generation_line(token_ids=[4, 5 if same else 6])}
    graded = grades.grade({"a": generation_line(token_ids=[4, 5])}, other, rescored, dtype)
    assert graded is not None
    assert (graded.grade, graded.worst_margin) == (word, worst)
    assert graded.near_ties == (None if worst is None else 0.5)


def test_epsilon_is_for_answers_with_other_tokens() -> None:
    """The tokens of the reference arm need no excuse; they may have been rescored at another width."""
    lines = {item: generation_line(token_ids=[4, 5]) for item in "ab"}
    other = {"a": lines["a"], "b": generation_line(token_ids=[4, 6])}
    rescored = RescoringRecord(epsilon=0.2, items={"a": {"1": 0.3}, "b": {"1": 0.1}})
    graded = grades.grade(lines, other, rescored, "bfloat16")
    assert graded is not None
    assert (graded.grade, graded.worst_margin) == ("near-tie", 0.3)


def test_items_with_the_same_tokens_are_counted() -> None:
    """Of the items that both answered; the first difference is that of the item that differs soonest."""
    lines = {item: generation_line(token_ids=[4, 5, 6]) for item in "abcd"}
    other = {"a": lines["a"], "b": generation_line(token_ids=[4, 9, 6]), "c": generation_line(token_ids=[4, 5])}
    graded = grades.grade(lines, other, None, "float32")
    assert graded is not None
    assert (graded.items, graded.identical, graded.first_divergence) == (3, 1, 1)


@torch.inference_mode()
def test_sampled_tokens_are_judged_by_their_own_dice(checkpoint: Checkpoint) -> None:
    """At any temperature: none falls short by the dice that were thrown, and by others some do, in logits."""
    runner, seeds = ModelRunner(checkpoint), [5, 6, 7]
    for sampling in (Sampling(0.05), Sampling(1.5), Sampling(0.7, top_p=0.9), Sampling(1.0, top_k=5, min_p=0.05)):
        said = decode_prompts(
            METHODS["ar"](), ModelRunners("ar", {"ar": runner}), PROMPTS, BUDGET, **asdict(sampling), seeds=seeds
        )[0]
        for prompt, generation, seed in zip(PROMPTS, said, seeds, strict=True):
            own = Answer(prompt, generation.token_ids, seed, sampling)
            for width in (FED_AT_ONCE, 4):
                assert lossless_check.shortfalls(Reading("", runner, width).forced_logits([own])[0][1]) == {}
        others = own._replace(seed=99), own._replace(sampling=GREEDY)
        (emitted, short), (greedy, _) = Reading("", runner).forced_logits(others)
        assert (emitted - greedy).abs().max() < 20 * sampling.temperature  # noise of the size of the temperature
        assert sampling.temperature < 0.5 or (short > 0).any()


def test_products_in_bfloat16_sum_in_float32() -> None:
    """A library that splits a sum and adds the parts in bfloat16 would round by shape, and grades would follow."""
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    ModelPool(RunRequest(device="cpu"))
    assert not matmul.allow_bf16_reduced_precision_reduction


def test_a_judge_without_numbers_says_so(checkpoint: Checkpoint) -> None:
    """It does not find every token right."""
    head, token = checkpoint.model.get_output_embeddings(), torch.tensor(3)
    head.register_forward_hook(lambda *of: of[2].index_fill(-1, token, math.nan))
    answer = Answer([1, 2], [5, 6, 7], 0)
    with pytest.raises(NotNumbersError, match=r"the judge's logits are not numbers \(NaN or \+inf\) in float64"):
        Reading("", ModelRunner(checkpoint)).forced_logits([answer])


@torch.inference_mode()
def test_tokens_at_a_temperature_near_zero_are_judged_by_numbers() -> None:
    """Logits over the temperature exceed a float32; the shortfalls are those of greedy tokens."""
    logits, answer = torch.randn(3, 40), Answer([1, 2], [5, 6, 7], 3, Sampling(1e-200))
    greedy = judged(logits, answer._replace(sampling=GREEDY), 0)
    torch.testing.assert_close(judged(logits, answer, 0), greedy)

"""Speed without trained weights: commits follow the scripts exactly, and results are marked as simulated."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding_cases import decode_prompts
from schemas import validator
from small import scripted_lane
from stored import stored_json

from mtbench.cli import main
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt
from mtbench.lineup.planner import make_plan
from mtbench.lineup.simulation import Scripted, draw, least_variance, scripted
from mtbench.models.runner import ModelRunner
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan, RunRequest, Script

CPU = torch.device("cpu")
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [1] * 9, [2] * 4, [3] * 6]


def answers(method: Method, runner: ModelRunner, budgets: Sequence[int], **options: Any) -> list[Generation]:
    runners = ModelRunners("mars", {"mars": runner})
    return decode_prompts(method, runners, PROMPTS, budgets, ignore_eos=True, **options)[0]


def commits(generations: Sequence[Generation]) -> list[list[int]]:
    return [list(g.commits or []) for g in generations]


@pytest.fixture(scope="module")
def source() -> ModelRunner:
    """Return a model that is certain of 60 % of its tokens."""
    torch.manual_seed(0)
    return scripted_lane(torch.randint(0, 36, (len(PROMPTS), 80)), torch.rand(len(PROMPTS), 80) < 0.6)


@pytest.mark.parametrize(
    "options",
    [
        {"tau": 0.9},
        {"tau": 0.9, "extra": True},
        {"tau": 0.9, "cache": "none"},
        {"tau": 0.9, "cache": "block", "cache_block": 5},
        {"tau": 1.0},
    ],
    ids=str,
)
def test_a_replay_has_the_commits_of_the_run(
    options: dict[str, Any], source: ModelRunner, make_runner: Callable[..., ModelRunner]
) -> None:
    """Also with other weights, for each forward pass; passes without commits, which scripts omit, reappear."""
    method = METHODS["mars"](**options)
    original = answers(method, source, [30, 12, 25, 30, 7])
    replayed = answers(
        Scripted(method, commits(original), CPU), make_runner(seed=3), [len(g.token_ids) for g in original]
    )
    assert commits(replayed) == commits(original)
    assert max(map(max, commits(original))) > 1 or options["tau"] == 1
    assert [g.positions_fed for g in replayed] == [g.positions_fed for g in original]


def test_a_script_follows_its_item_into_any_row(source: ModelRunner, make_runner: Callable[..., ModelRunner]) -> None:
    """With two refilled rows and another order of items, each request uses its own script from the start."""
    method = METHODS["mars"](tau=0.9)
    original = answers(method, source, [30, 12, 25, 30, 7])
    replay, order = Scripted(method, commits(original), CPU), [3, 0, 4, 2, 1]
    for _ in range(2):  # the same object serves batch after batch
        replay.serve(order)
        replayed = answers(replay, make_runner(seed=3), [len(original[i].token_ids) for i in order], rows=2)
        assert commits(replayed) == [commits(original)[i] for i in order]


def test_after_its_script_a_row_commits_one_token_at_a_time(make_runner: Callable[..., ModelRunner]) -> None:
    """A script cannot exceed the method's window: a 9 commits the window's tokens."""
    replay = Scripted(METHODS["mars"](tau=0.5), [[2, 9], [3], [], [0, 2, 0, 2], [1]], CPU)
    expected = [[2, 4, 1, 1], [3, 1, 1, 1, 1, 1], [1] * 8, [2, 2, 1, 1, 1, 1], [1] * 8]
    assert commits(answers(replay, make_runner(), [8] * 5)) == expected


def test_the_confidence_is_computed_and_discarded(
    make_runner: Callable[..., ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a simulated forward pass would be faster than a real one."""
    from mtbench.decoding.method import TargetOutput

    calls: list[float] = []
    real = TargetOutput.sure
    monkeypatch.setattr(TargetOutput, "sure", lambda self, *a: calls.append(1) or real(self, *a))  # type: ignore[func-returns-value]
    generations = answers(Scripted(METHODS["mars"](tau=0.5), [[4, 4]] * 5, CPU), make_runner(), [8] * 5)
    assert commits(generations) == [[4, 4]] * 5
    assert len(calls) == 2


def test_drawn_acceptance_has_the_expected_mean() -> None:
    """A forward pass commits 1 + p₁ + p₁p₂ + … tokens; the last probability repeats. Within 4 standard errors."""
    probabilities, most, forwards = [0.8, 0.6], 5, 20_000
    counts = draw(probabilities, most, forwards, "0/0")
    reach = [0.8, 0.8 * 0.6, 0.8 * 0.6**2, 0.8 * 0.6**3]  # P(count > d)
    mean = 1 + sum(reach)
    variance = sum((2 * d + 1) * p for d, p in enumerate(reach)) - sum(reach) ** 2
    assert abs(sum(counts) / forwards - mean) < 4 * math.sqrt(variance / forwards)
    assert set(counts) == {1, 2, 3, 4, 5}


@pytest.mark.parametrize(("length", "counts"), [(2.4, {2, 3}), (1, {1}), (5, {5})])
def test_a_length_is_the_mean_of_tokens_per_forward(length: float, counts: set[int]) -> None:
    """With the model's own token, as vLLM and SGLang count; with the least variance. Within 4 standard errors."""
    drawn = draw(least_variance(length), 5, 20_000, "0/0")
    mean = sum(drawn) / len(drawn)
    error = math.sqrt(sum((n - mean) ** 2 for n in drawn)) / len(drawn)
    assert abs(mean - length) <= 4 * error
    assert set(drawn) == counts


def test_a_draw_depends_only_on_the_item() -> None:
    """It does not depend on other items or earlier draws; items have different draws."""
    script = Script(source="0.5", lengths=[50, 50], scripts=None, probabilities=[0.5], seed=0)
    both = scripted(METHODS["mars"](tau=0.9), script, CPU)
    alone = scripted(METHODS["mars"](tau=0.9), script.changed(lengths=[50]), CPU)
    assert isinstance(both, Scripted)
    assert isinstance(alone, Scripted)
    assert both.script[0].equal(alone.script[0])
    assert not both.script[0].equal(both.script[1])


def plan(**changes: Any) -> Plan:
    options: dict[str, Any] = {
        "suite": ["synthetic:8x20"],
        "weights": "random:embedded:tiny/ar",
        "simulate_acceptance": "0.7,0.5",
        "method": ["ar", "mars:tau=0.9"],
        "batch_size": (2,),
        "limit": 5,
    }
    return make_plan(RunRequest(**(options | changes)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"simulate_acceptance": None},
            r"'mars:tau=0.9@mars/graph' can commit 4 .*add `--simulate-acceptance 0.8,0.6,0.4` or",
        ),
        (
            {"suite": ["arithmetic"]},
            r"'arithmetic' scores accuracy, and --simulate-acceptance 0.7,0.5 .*prompts, .*synthetic",
        ),
        (
            {"suite": ["arithmetic"], "simulate_acceptance": None, "method": ["ar"]},
            "weights 'random:embedded:tiny/ar' has none",
        ),
        ({"simulate_acceptance": "0.7,1.2"}, "neither probabilities from 0 to 1 nor a length of at least 1"),
        ({"simulate_acceptance": "length=0.9"}, "nor a length of at least 1; give one of them, such as .*length=2.4"),
        (
            {"simulate_acceptance": "length=4.5"},
            "'mars:tau=0.9@mars/graph' commits at most 4 tokens .* a length from 1 to 4, or widen",
        ),
        ({"weights": None}, "no model is named.*or `--weights random:qwen2.5-0.5b`"),
        ({"weights": "random:qwen2.5-8b"}, "are not known; .*See `mtbench ls families`"),
        ({"checkpoint": {"ar": "random:qwen2.5-7b"}}, "--checkpoint and --weights each name the models"),
        ({"suite": ["synthetic:99999"], "limit": 1}, "do not fit .*; shorten the prompts of `--suite synthetic:99999`"),
        ({"suite": ["synthetic:1x99999999"]}, "is not a length; write .*each below 10,000,000"),
    ],
    ids=str,
)
def test_a_meaningless_simulation_is_refused(changes: dict[str, Any], message: str) -> None:
    """Accuracy of random text, unknown acceptance, and invalid scripts or lengths raise an error."""
    with pytest.raises(UserError, match=message):
        plan(**changes)


def test_a_warning_names_what_refill_omits() -> None:
    """Batch size 1 has nothing to refill, and external engines support static batches only."""
    both = plan(method=["ar", "hf-generate"], batch_size=(1, 2), batching=("refill",)).warnings()[-2:]
    assert "batch size 1 has nothing to refill" in both[0]
    assert "hf-generate: static batches only" in both[1]


@pytest.mark.parametrize(
    ("variant", "lengths", "budget"), [("9", {9}, 256), ("9x5", {9}, 5), ("3-9x5", set(range(3, 10)), 5)]
)
def test_synthetic_prompts_have_the_given_number_of_tokens(variant: str, lengths: set[int], budget: int) -> None:
    """Exactly; a range gives every length in it."""
    [suite] = plan(suite=[f"synthetic:{variant}"], limit=60).suites
    assert {len(i.prompt_ids) for i in suite.items} == lengths
    assert suite.max_new_tokens == budget
    assert len({tuple(i.prompt_ids) for i in suite.items}) > 50


def test_a_prompt_that_is_too_short_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer tokens, the measurement would be at another length."""
    short = [Prompt(item="synthetic/0/0", text="1 2", tokens=9)]
    monkeypatch.setattr(SUITES["synthetic"], "prompts", lambda *_: short)
    with pytest.raises(UserError, match=r"synthetic/0/0 needs 9 tokens, but the tokenizer of .* makes only 3"):
        plan()


@pytest.mark.whole
def test_a_simulated_run_is_marked_from_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with drawn acceptance on random weights."""
    arms = ("ar", "mars:tau=0.9", "mars:tau=0.9,cache=block,cache_block=8")
    shape, drawn = ("--suite", "synthetic:32x16", "--weights", "random:embedded:tiny/ar"), RunDirectory(tmp_path / "1")
    rest = "--limit=12 --rounds=1 --batch-size=2 --simulate-acceptance=0.7,0.5"
    methods = [f"--method={arm}" for arm in arms]
    monkeypatch.setattr(sys, "argv", ["mtbench", "run", *shape, *methods, *rest.split(), "-o", str(drawn.path)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert not stopped.value.code

    results = stored_json(drawn, "results.json")
    assert [c["status"] for c in results["cells"]] == ["ok"] * 3
    assert [c["tokens"] for c in results["cells"]] == [12 * 16] * 3
    assert [c["tokens_per_forward"] > 1.4 for c in results["cells"]] == [False, True, True]
    assert [c["simulated"]["weights"] for c in results["cells"]] == ["random:embedded:tiny/ar"] * 3
    assert [c["simulated"]["accept"] for c in results["cells"]] == ["0.7,0.5"] * 3
    assert [c["lossless"] for c in results["cells"]] == [None] * 3
    page = (drawn.path / "report.md").read_text()
    assert page.startswith("# Simulated acceptance and weights")
    assert "independent draws: optimistic for static batches" in page
    for kind in ("plan", "results"):
        validator(kind).validate(stored_json(drawn, f"{kind}.json"))

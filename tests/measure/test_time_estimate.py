"""The time estimate of a dry run, measured on a worker of known times."""

import io
from types import SimpleNamespace
from typing import Any

import pytest

from mtbench.document.console import Terminal
from mtbench.experiments import run
from mtbench.lineup.planner import make_plan
from mtbench.measure.time_estimate import TimeEstimate
from mtbench.measure.workers import Done, Failed, Task
from mtbench.plan.plan import Plan, RunRequest


class Slow:
    """A worker that takes 1 s for each prompt's prefill and 0.5 s for each step; answers have 20 or 40 tokens."""

    def __init__(self, failing: str = "", interrupted_at: int = 0) -> None:
        self.failing, self.interrupted_at, self.asked = failing, interrupted_at, list[tuple[str, int]]()

    def decode(self, task: Task) -> Done | Failed:
        budget = task.requests[0].max_new_tokens
        if len(self.asked) + 1 == self.interrupted_at:
            raise KeyboardInterrupt
        self.asked.append((task.cell, budget))
        if self.failing and self.failing in task.cell:
            return Failed("it broke")
        lengths = [min(budget, 20 * (1 + place % 2)) for place in range(len(task.requests))]
        prefill_s, cold_s = 1.0 * len(lengths), 3.0 if len(self.asked) == 1 else 0.0
        return Done(
            [SimpleNamespace(token_ids=[0] * length) for length in lengths],  # type: ignore[misc]
            SimpleNamespace(  # type: ignore[arg-type]
                wall_s=prefill_s + 0.5 * max(lengths) + cold_s,
                prefill_s=prefill_s,
                prompt_tokens=10 * len(lengths),
                preparation_s=0.0,
            ),
            {},
        )


def measured_plan(**asked: Any) -> Plan:
    return make_plan(RunRequest(limit=10, max_new_tokens=64, device="cpu", method=("ar",), **asked))


def measured(plan: Plan, worker: Slow, **known: float) -> TimeEstimate:
    found = TimeEstimate(plan, worker, **known)  # type: ignore[arg-type]
    for _ in found.measure():
        pass
    return found


def blocks_s(found: TimeEstimate) -> list[float]:
    return [found.block_s(group, cell) for group, cell in found.cells]


def test_a_measured_estimate_counts_every_pass() -> None:
    """Answers are as long as in one whole block, a batch as long as its longest answer; warm-ups and loading count."""
    found = measured(measured_plan(batch_size=(1, 4), rounds=2), Slow(), loading_s=7.0)

    assert blocks_s(found) == pytest.approx([1 + 0.5 * (20 + 40 + 20 + 40) / 4, 4 + 0.5 * 40])
    assert found.passes() == pytest.approx(
        {
            "timed rounds": 20 * 16.0 + 6 * 24.0,
            "warm-up": 2 * (1 + 8) + 2 * 2 * (4 + 8),  # blocks of 4 and of 2 items are two shapes
            "loading": 7.0,
        }
    )
    assert found.described() == (
        "about 9 min, if answers are as long as those of ar@ar/graph in one block: timed rounds 8 min, warm-up 66 s, "
        "loading 7 s"
    )


def test_an_estimate_is_given_after_the_first_call_and_refined() -> None:
    """The cells that were decoded stand for the others; each answer counts with its budget until lengths are known."""
    plan, worker = measured_plan(batch_size=(1, 4), rounds=1), Slow()
    found = TimeEstimate(plan, worker)  # type: ignore[arg-type]
    seen = [(found.total(), blocks_s(found)) for _ in found.measure()]

    assert [(task[-2:], budget) for task, budget in worker.asked] == [("b1", 16), ("b1", 16), ("b4", 16), ("b4", 64)]
    of_one, of_four = 1 + 0.5 * 64, 4 + 4 * 0.5 * 64  # s: four rows take at most four times as long a step as one
    assert [s for _, s in seen[2:]] == [pytest.approx([of_one, of_four]), pytest.approx([of_one, 4 + 0.5 * 64])]
    assert [text.rpartition(" (")[2] for text, _ in seen] == [f"{n} of 2 cells measured)" for n in (0, 1, 1, 2)]
    assert [text.split()[1] for text, _ in seen] == ["least", "most", "most", "most"]


def test_an_interrupted_estimate_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command still ends as an interrupted one."""
    plan, printed = measured_plan(batch_size=(1, 4), rounds=1), io.StringIO()
    monkeypatch.setattr(run, "estimate", lambda plan: TimeEstimate(plan, Slow(interrupted_at=3)))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        run.show_estimate(plan, Terminal(file=printed), Terminal(file=io.StringIO()), "all arms: ")
    assert printed.getvalue().startswith(
        "all arms: at most 15 min (1 of 2 cells measured), if every answer takes its whole token budget: timed rounds"
    )


def test_lossless_arms_are_rescored_in_the_estimate() -> None:
    """Each answer takes a pass over prompt and answer, by the time of a prefill."""
    plan = measured_plan(batch_size=(4,), rounds=1).changed()
    twin = plan.cells[0].changed(cell="twin", arm="twin", lossless_reference=plan.cells[0].arm, claims="lossless")
    group = plan.groups[0].changed(cells=[plan.cells[0].cell, "twin"])
    plan = plan.changed(cells=[plan.cells[0], twin], groups=[group])

    assert measured(plan, Slow()).passes()["re-scoring"] == pytest.approx(10 * 1.0 * (10 + 30) / 10)


def test_a_cell_that_fails_is_told_and_the_others_are_measured() -> None:
    """Its own error is in the estimate, and its time counts as nothing."""
    plan = measured_plan(batch_size=(1, 4), rounds=1)
    found = measured(plan, Slow(failing=".b1"))

    assert found.failed == {plan.cells[0].cell: "it broke"}
    assert blocks_s(found) == [0.0, 24.0]


def test_fixed_lengths_take_the_whole_budget() -> None:
    """No block is decoded to learn how long answers are."""
    worker = Slow()
    found = measured(measured_plan(batch_size=(1,), ignore_eos=True), worker)

    assert blocks_s(found) == pytest.approx([1 + 0.5 * 64])
    assert [budget for _, budget in worker.asked] == [16, 16]
    assert "about 17 min, if every answer takes its whole token budget: " in found.described()

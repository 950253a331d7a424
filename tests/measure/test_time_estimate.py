"""The time estimate of a dry run, measured on a worker of known times."""

from types import SimpleNamespace
from typing import Any

import pytest

from mtbench.lineup.planner import make_plan
from mtbench.measure.time_estimate import TimeEstimate
from mtbench.measure.workers import Done, Failed, Task
from mtbench.plan.plan import Plan, RunRequest


class Slow:
    """A worker that takes 1 s for each prompt's prefill and 0.5 s for each step; answers have 20 or 40 tokens."""

    def __init__(self, failing: str = "") -> None:
        self.failing, self.asked = failing, list[tuple[str, int]]()

    def decode(self, task: Task) -> Done | Failed:
        budget = task.requests[0].max_new_tokens
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
            ),
            {},
        )


def measured_plan(**asked: Any) -> Plan:
    return make_plan(RunRequest(limit=10, max_new_tokens=64, device="cpu", method=("ar",), **asked))


def test_a_measured_estimate_counts_every_pass() -> None:
    """Answers are as long as in one whole block, a batch as long as its longest answer; warm-ups and loading count."""
    plan = measured_plan(batch_size=(1, 4), rounds=2)
    found = TimeEstimate(plan, Slow(), loading_s=7.0)  # type: ignore[arg-type]

    assert found.blocks_s == pytest.approx([1 + 0.5 * (20 + 40 + 20 + 40) / 4, 4 + 0.5 * 40])
    assert found.timed_s == pytest.approx(20 * 16.0 + 6 * 24.0)
    assert found.warm_up_s == pytest.approx(2 * (1 + 8) + 2 * 2 * (4 + 8))  # blocks of 4 and of 2 items are two shapes
    assert found.described() == (
        "about 9 min (timed rounds 8 min, warm-up 66 s, loading 7 s), if answers are as long as those of ar@ar/graph "
        "in one block"
    )


def test_lossless_arms_are_rescored_in_the_estimate() -> None:
    """Each answer takes a pass over prompt and answer, by the time of a prefill."""
    plan = measured_plan(batch_size=(4,), rounds=1).changed()
    twin = plan.cells[0].changed(cell="twin", arm="twin", lossless_reference=plan.cells[0].arm, claims="lossless")
    group = plan.groups[0].changed(cells=[plan.cells[0].cell, "twin"])
    plan = plan.changed(cells=[plan.cells[0], twin], groups=[group])

    assert TimeEstimate(plan, Slow()).rescoring_s == pytest.approx(10 * 1.0 * (10 + 30) / 10)  # type: ignore[arg-type]


def test_a_cell_that_fails_is_told_and_the_others_are_measured() -> None:
    """Its own error is in the estimate, and its time counts as nothing."""
    plan = measured_plan(batch_size=(1, 4), rounds=1)
    found = TimeEstimate(plan, Slow(failing=".b1"))  # type: ignore[arg-type]

    assert found.failed == {plan.cells[0].cell: "it broke"}
    assert found.blocks_s == [0.0, 24.0]


def test_fixed_lengths_take_the_whole_budget() -> None:
    """No block is decoded to learn how long answers are."""
    plan, worker = measured_plan(batch_size=(1,), ignore_eos=True), Slow()
    found = TimeEstimate(plan, worker)  # type: ignore[arg-type]

    assert found.blocks_s == pytest.approx([1 + 0.5 * 64])
    assert [budget for _, budget in worker.asked] == [16, 16]
    assert found.assumes == "if every answer takes its whole token budget"

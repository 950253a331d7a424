"""The time estimate of a dry run: computed for a GPU whose figures are known, else measured."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtbench.runs import time_estimate
from mtbench.runs.plan import Plan, RunRequest
from mtbench.runs.planner import make_plan
from mtbench.runs.time_estimate import all_blocks, estimate, measured, modelled_gpu
from mtbench.runs.workers import Done, Failed, Task


def planned(method: str = "ar", size: int = 1, device: str = "cuda") -> Plan:
    """Two blocks of 128 tokens after prompts of 768, on the shapes of Qwen2.5-7B."""
    return make_plan(
        RunRequest(
            suite=("synthetic:768x128",),
            weights="random:qwen2.5-7b",
            method=(method,),
            engine="graph",
            batch_size=(size,),
            limit=2 * size,
            simulate_acceptance="0.424",
            device=device,
            rounds=1,
        )
    )


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the machine have an H200; nothing may be decoded on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(time_estimate, "ModelPool", None)


def test_on_a_known_gpu_the_time_is_computed(h200: None) -> None:
    """128 steps of 3.8 ms and a prefill; 16 rows take little longer than one; every block of every round counts."""
    [one], [sixteen] = estimate(planned()).blocks_s, estimate(planned(size=16)).blocks_s
    assert one == pytest.approx(128 * 3.8e-3, rel=0.1)
    assert one < sixteen < 2 * one
    plan = planned()
    assert sum(estimate(plan).passes_s(all_blocks(plan)).values()) == pytest.approx(sum(plan.groups[0].rounds) * one)


def test_embedded_checkpoints_are_counted(h200: None) -> None:
    """Their names are no folders and no hub ids."""
    plan = make_plan(RunRequest(method=("ar", "mars"), batch_size=(8,), limit=8, device="cuda"))
    assert all(0 < block_s < 1 for block_s in estimate(plan).blocks_s)


def test_a_window_costs_its_positions_and_a_draft_model_its_forwards(h200: None) -> None:
    """Every forward pass is taken to give one token."""
    [ar], [mars], [speculative] = (estimate(planned(name)).blocks_s for name in ("ar", "mars:tau=0.8", "speculative"))
    assert ar < mars < 1.3 * ar
    assert speculative > 1.1 * ar
    [adaptive] = estimate(planned("speculative:ahead=auto")).blocks_s
    assert adaptive > speculative  # as if it always took the widest window


def test_elsewhere_the_time_is_measured(h200: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """External engines, other GPUs, and a CPU."""
    assert modelled_gpu(planned("hf-generate")) is None
    assert modelled_gpu(planned(device="cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    assert modelled_gpu(planned()) is None


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
    found = measured(plan, Slow(), loading_s=7.0)  # type: ignore[arg-type]

    assert found.blocks_s == pytest.approx([1 + 0.5 * (20 + 40 + 20 + 40) / 4, 4 + 0.5 * 40])
    assert found.timed_s(all_blocks(plan)) == pytest.approx(20 * 16.0 + 6 * 24.0)
    assert found.warm_up_s == pytest.approx(2 * (1 + 8) + 2 * 2 * (4 + 8))  # blocks of 4 and of 2 items are two shapes
    assert found.first_calls_s[plan.cells[0].cell] == 3.0
    assert found.described(all_blocks(plan)) == (
        "about 9 min (timed rounds 8 min, warm-up 66 s, loading 7 s), if answers are as long as those of ar@ar/graph "
        "in one block"
    )


def test_lossless_arms_are_rescored_in_the_estimate() -> None:
    """Each answer takes a pass over prompt and answer, by the time of a prefill."""
    plan = measured_plan(batch_size=(4,), rounds=1).changed()
    twin = plan.cells[0].changed(cell="twin", arm="twin", lossless_reference=plan.cells[0].arm, claims="lossless")
    group = plan.groups[0].changed(cells=[plan.cells[0].cell, "twin"])
    plan = plan.changed(cells=[plan.cells[0], twin], groups=[group])

    assert measured(plan, Slow()).rescoring_s == pytest.approx(10 * 1.0 * (10 + 30) / 10)  # type: ignore[arg-type]


def test_a_cell_that_fails_is_told_and_the_others_are_measured() -> None:
    """Its own error is in the estimate, and its time counts as nothing."""
    plan = measured_plan(batch_size=(1, 4), rounds=1)
    found = measured(plan, Slow(failing=".b1"))  # type: ignore[arg-type]

    assert found.failed == {plan.cells[0].cell: "it broke"}
    assert found.blocks_s == [0.0, 24.0]


def test_fixed_lengths_take_the_whole_budget() -> None:
    """No block is decoded to learn how long answers are."""
    plan, worker = measured_plan(batch_size=(1,), ignore_eos=True), Slow()
    found = measured(plan, worker)  # type: ignore[arg-type]

    assert found.blocks_s == pytest.approx([1 + 0.5 * 64])
    assert [budget for _, budget in worker.asked] == [16, 16]
    assert found.assumes == "if every answer takes its whole token budget"

"""The time estimate of a dry run: computed for a GPU whose figures are known, else measured."""

import pytest
import torch

from mtbench.runs import time_estimate
from mtbench.runs.plan import Plan, RunRequest
from mtbench.runs.planner import make_plan
from mtbench.runs.time_estimate import all_blocks, estimate, modelled_gpu


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
            accept="0.424",
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
    assert estimate(plan).timed_s(all_blocks(plan)) == pytest.approx(sum(plan.groups[0].rounds) * one)


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

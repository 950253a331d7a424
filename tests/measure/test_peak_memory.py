"""Peak memory: whose bytes are whose, and when the pass stops. (A pass is part of the runs of tests/test_run.py.)"""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small import small_checkpoint, small_config
from stored import stored_json

from mtbench.lineup.planner import make_plan
from mtbench.measure import peak_memory
from mtbench.measure.model_pool import ModelPool
from mtbench.models.fused_decoder import build
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan, RunRequest

MIB = 1 << 20
CELLS = ("one", "two", "three")


def weights(checkpoint: Any) -> int:
    tensors = (*checkpoint.model.parameters(), *checkpoint.model.buffers())
    return sum(t.nbytes for t in tensors)


def test_a_cells_share_is_its_weights_and_what_came_on_top() -> None:
    """Another checkpoint's weights, and whatever else stood there before, are not the cell's."""
    mine, other = small_checkpoint(seed=1), small_checkpoint(seed=2)
    at_rest = weights(mine) + weights(other) + 3 * MIB
    assert peak_memory.share(at_rest + 5 * MIB, at_rest, [mine]) == weights(mine) + 5 * MIB
    assert peak_memory.share(at_rest + 5 * MIB, at_rest, [mine, other]) == weights(mine) + weights(other) + 5 * MIB


def test_shared_weights_count_once() -> None:
    """A draft of the same checkpoint, tied embeddings, and projections that a decoder of ours has laid out as one."""
    checkpoint = small_checkpoint(small_config(tie_word_embeddings=True))
    want = weights(checkpoint)
    assert peak_memory.share(0, 0, [checkpoint, checkpoint]) == want
    assert (
        peak_memory.share(0, 0, [checkpoint, dataclasses.replace(checkpoint, source="the same by another name")])
        == want
    )
    build(checkpoint.model)
    assert peak_memory.share(0, 0, [checkpoint]) == want


def test_drafts_of_earlier_cells_are_freed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft on hidden states holds its target's runner, and that a KV cache; the next cell has runners of its own."""
    for name in ("empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    plan = make_plan(RunRequest(method=["eagle"], limit=1, max_new_tokens=4, device="cpu", batch_size=[1]))
    pool, [cell] = ModelPool(plan.request), plan.cells
    before = pool.runners_of(cell)["eagle"]
    assert peak_memory._allocated(plan, cell, pool) is not None
    [after] = pool.drafts.values()
    assert after is not before
    assert after.target in pool.runners.values()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Seconds pass only in the pass of a cell, ten each; a cell's peak is the length of its name."""
    made = SimpleNamespace(now=0.0)
    made.monotonic = lambda: made.now

    def resident(plan: Plan, cell: Any, pool: ModelPool) -> int | None:
        made.now += 10
        return None if cell.cell == "two" else len(cell.cell)

    monkeypatch.setattr(peak_memory, "time", made)
    monkeypatch.setattr(peak_memory, "_resident", resident)
    return made


def measure(run: RunDirectory, deadline: float, *failed: str) -> tuple[Any, list[str]]:
    plan = cast(
        "Plan", SimpleNamespace(cells=[SimpleNamespace(cell=name, method="ar", computes_here=True) for name in CELLS])
    )
    notes: list[str] = []
    peak_memory.measure(
        run, plan, cast("ModelPool", SimpleNamespace(device="cpu")), set(failed), notes.append, deadline
    )
    return stored_json(run, "memory.json") if run.has("memory.json") else {}, notes


def test_the_time_budget_ends_it_between_two_cells(clock: SimpleNamespace, tmp_path: Path) -> None:
    """It says what is left and how to get it; a pass that failed stays null and is not tried again."""
    run = RunDirectory.create(tmp_path / "run")
    found, notes = measure(run, -1)
    assert (found, notes) == ({}, ["time budget spent; the peak memory of 3 cells is measured with --resume"])
    found, notes = measure(run, 15)
    assert found == {"one": 3, "two": None}
    assert notes[1:] == ["time budget spent; the peak memory of 1 cells is measured with --resume"]
    found, notes = measure(run, torch.inf)
    assert found == {"one": 3, "two": None, "three": 5}
    assert (notes, clock.now) == (["peak memory: an untimed pass for 1 cells"], 30)
    assert measure(run, torch.inf) == (found, [])
    assert measure(RunDirectory(tmp_path / "other"), torch.inf, "one", "two")[0] == {"three": 5}  # those failed

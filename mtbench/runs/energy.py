"""Energy per token, from an untimed pass: every cell's blocks again, for ten seconds of the GPU's own energy counter.

The counter (nvmlDeviceGetTotalEnergyConsumption) moves every 20 to 100 ms, and the sensor behind it looks only part of
the time (Yang, Adamek, Armour: "Part-time Power Measurements", arXiv 2312.02741), so a window is long, and holds whole
blocks, prompts included. It counts the whole GPU. What the GPU draws when idle is measured and stated, never
subtracted.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mtbench.decoding.output import said
from mtbench.decoding.registry import METHODS
from mtbench.errors import first_line
from mtbench.hardware import machine
from mtbench.hardware.machine import Gpu
from mtbench.runs.directory import Record, RunDirectory
from mtbench.runs.model_pool import ModelPool
from mtbench.runs.plan import Cell, Plan
from mtbench.runs.requests import requests_of

WINDOW_S = 10.0
IDLE_S = 3.0
NO_GPU = "no GPU: energy is read from a GPU's own counter"
NO_NVML = "the GPU's driver library (NVML) does not answer"
NO_COUNTER = "this GPU has no energy counter"
ELSEWHERE = "the engine is a process of its own, on whatever GPU it may be"
UNMEASURED = "not measured yet; `--resume` does it"


def measure(
    run: RunDirectory, plan: Plan, pool: ModelPool, failed: set[str], note: Callable[[str], None], deadline: float
) -> None:
    """Fill energy.json: `idle_power_w` and, by cell, what `of` gives. What is there already stays.

    Where there is no counter it holds the reason. Stops at `deadline` (time.monotonic).
    """
    known = run.read_json("energy.json") if run.has("energy.json") else {}
    cells: Record = known.get("cells", {})
    gpu = machine.gpu() if pool.device == "cuda" else None
    if gpu is None or gpu.energy_j() is None:
        reason = NO_GPU if pool.device != "cuda" else NO_NVML if gpu is None else NO_COUNTER
        if not cells and known.get("reason") != reason:
            run.write_json("energy.json", {"reason": reason})
        return
    weightless = [cell.cell for cell in plan.cells if METHODS[cell.method].weightless]
    if not cells.keys() >= set(weightless):
        cells |= dict.fromkeys(weightless, _unknown(ELSEWHERE))
        run.write_json("energy.json", {"idle_power_w": known.get("idle_power_w"), "cells": cells})
    todo = [cell for cell in plan.cells if cell.cell not in cells and cell.cell not in failed]
    if not todo or time.monotonic() > deadline:
        return
    note(f"energy: {WINDOW_S:g} s of decoding for each of {len(todo)} cells")
    idle_power_w = known.get("idle_power_w") or _idle_power_w(gpu)
    for i, cell in enumerate(todo):
        if time.monotonic() > deadline:
            note(f"time budget spent; the energy of {len(todo) - i} cells is measured with --resume")
            return
        try:
            lines = run.lines(f"generations/{cell.cell}.jsonl")
            answered = {g["item"]: ids for g in lines if (ids := said(g)) is not None}
            cells[cell.cell] = window(gpu, plan, pool, cell, answered)
        except Exception as error:  # a method's own fault; what it measured before stands
            cells[cell.cell] = _unknown(f"{type(error).__name__}: {first_line(error)}")
        run.write_json("energy.json", {"idle_power_w": idle_power_w, "cells": cells})


def of(known: Record, cell: str, error: str | None = None) -> Record:
    """What results say of a cell, given energy.json: joules of the window, joules per token, and why they are None."""
    found = known.get("cells", {}).get(cell) or _unknown(error or known.get("reason", UNMEASURED))
    return {name: found[name] for name in ("energy_j", "j_per_token", "energy_reason")}


def window(
    gpu: Gpu,
    plan: Plan,
    pool: ModelPool,
    cell: Cell,
    answered: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Record:
    """Decode the cell's full blocks in turn, from an idle device to an idle device, for at least WINDOW_S.

    The first block runs once before, so that nothing is captured or compiled inside. `answered`: by item, what later
    turns follow.
    """
    suite = plan.suite(cell.suite)
    group = next(g for g in plan.groups if cell.cell in g.cells)
    fullest = max(map(len, group.blocks))
    blocks = [block for block in group.blocks if len(block) == fullest]
    room = suite.room  # as timed: shapes are warm

    def decode(block: list[int]) -> int:
        _, timing = pool.decode(cell, requests_of(plan, suite, block, answered), room=room)
        return timing.tokens

    decode(blocks[0])
    before, tokens = gpu.sample(), 0
    for block in itertools.cycle(blocks):
        tokens += decode(block)
        if time.perf_counter() - before.at_s >= WINDOW_S:
            break
    after = gpu.sample()
    if before.energy_j is None or after.energy_j is None:
        return _unknown(NO_COUNTER)
    if dropped := machine.window(before, after)["dropped"]:
        return _unknown(dropped)
    energy_j, window_s = after.energy_j - before.energy_j, after.at_s - before.at_s
    return {
        "energy_j": energy_j,
        "window_s": window_s,
        "tokens": tokens,
        "j_per_token": energy_j / tokens,
        "mean_power_w": energy_j / window_s,
        "energy_reason": None,
    }


def _unknown(reason: str) -> Record:
    return {
        "energy_j": None,
        "window_s": None,
        "tokens": None,
        "j_per_token": None,
        "mean_power_w": None,
        "energy_reason": reason,
    }


def _idle_power_w(gpu: Gpu) -> float | None:
    """The GPU's mean power with the models loaded and nothing to do, once it has settled."""
    time.sleep(IDLE_S / 3)
    before = gpu.sample()
    time.sleep(IDLE_S)
    after = gpu.sample()
    if before.energy_j is None or after.energy_j is None:
        return None
    return (after.energy_j - before.energy_j) / (after.at_s - before.at_s)

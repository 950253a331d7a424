"""Energy per token, in an untimed pass: decode every cell's blocks again for ten seconds of the GPU's energy counter.

The counter (nvmlDeviceGetTotalEnergyConsumption) is updated every 20 to 100 ms, and its sensor samples only part of the
time (Yang, Adamek, Armour: "Part-time Power Measurements", arXiv 2312.02741); so a window is long, and contains whole
blocks, prompts included. The counter covers the whole GPU. Idle power is measured and reported, never subtracted.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from mtbench.decoding.output import answer_tokens
from mtbench.decoding.registry import METHODS
from mtbench.errors import first_line
from mtbench.hardware import machine
from mtbench.hardware.machine import Gpu
from mtbench.runs.directory import JsonObject, RunDirectory
from mtbench.runs.formats import EnergyRecord
from mtbench.runs.model_pool import ModelPool
from mtbench.runs.plan import Cell, Plan

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
    """Fill energy.json: `idle_power_w` and, by cell, what `window` returns. Cells already measured are kept.

    Without a counter it holds the reason. Stops at `deadline` (time.monotonic).
    """
    known = run.read_json("energy.json") if run.has("energy.json") else {}
    cells: JsonObject = known.get("cells", {})
    gpu = machine.gpu() if pool.device == "cuda" else None
    if gpu is None or gpu.energy_j() is None:
        reason = NO_COUNTER
        if pool.device != "cuda":
            reason = NO_GPU
        elif gpu is None:
            reason = NO_NVML
        if not cells and known.get("reason") != reason:
            run.write_json("energy.json", {"reason": reason})
        return
    elsewhere = [cell.cell for cell in plan.cells if not METHODS[cell.method].needs_weights]
    if not cells.keys() >= set(elsewhere):
        cells |= dict.fromkeys(elsewhere, _unknown(ELSEWHERE))
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
            cells[cell.cell] = window(gpu, plan, pool, cell, _answered(run, cell))
        except Exception as error:  # the method's fault; earlier cells keep their figures
            cells[cell.cell] = _unknown(f"{type(error).__name__}: {first_line(error)}")
        run.write_json("energy.json", {"idle_power_w": idle_power_w, "cells": cells})


def _answered(run: RunDirectory, cell: Cell) -> dict[str, list[int]]:
    """Return the cell's stored answers by item, as later turns see them, without those that are hidden."""
    answers = {line["item"]: answer_tokens(line) for line in run.lines(f"generations/{cell.cell}.jsonl")}
    return {item: ids for item, ids in answers.items() if ids is not None}


class CellFigures(NamedTuple):
    """Energy of a cell, as results.json has it."""

    energy_j: float | None
    j_per_token: float | None
    energy_reason: str | None


def of(known: EnergyRecord, cell: str, error: str | None = None) -> CellFigures:
    """Return a cell's part of energy.json for results: joules of the window, joules per token, or why they are None."""
    found = known.cells.get(cell)
    if found is None:
        return CellFigures(None, None, error or known.reason or UNMEASURED)
    return CellFigures(found.energy_j, found.j_per_token, found.energy_reason)


def window(
    gpu: Gpu,
    plan: Plan,
    pool: ModelPool,
    cell: Cell,
    answered: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> JsonObject:
    """Decode the cell's full blocks in turn, from an idle device to an idle device, for at least WINDOW_S.

    The first block runs once before, so that nothing is captured or compiled in the window. `answered`: by item, the
    answers that later turns follow.
    """
    suite = plan.suite(cell.suite)
    group = plan.group(cell.cell)
    fullest = max(map(len, group.blocks))
    blocks = [block for block in group.blocks if len(block) == fullest]

    def decode(block: list[int]) -> int:
        requests = plan.requests(suite, block, answered)
        _, timing = pool.decode(cell, requests, room=suite.room)  # as in the timed pass: shapes are warm
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
    figures = {"energy_j": energy_j, "window_s": window_s, "tokens": tokens}
    return {**figures, "j_per_token": energy_j / tokens, "mean_power_w": energy_j / window_s, "energy_reason": None}


def _unknown(reason: str) -> JsonObject:
    names = ("energy_j", "window_s", "tokens", "j_per_token", "mean_power_w")
    return {**dict.fromkeys(names), "energy_reason": reason}


def _idle_power_w(gpu: Gpu) -> float | None:
    """Return the GPU's mean power while it is idle with the models loaded, after it has settled."""
    time.sleep(IDLE_S / 3)
    before = gpu.sample()
    time.sleep(IDLE_S)
    after = gpu.sample()
    if before.energy_j is None or after.energy_j is None:
        return None
    return (after.energy_j - before.energy_j) / (after.at_s - before.at_s)

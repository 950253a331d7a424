"""Energy per token, in an untimed pass: decode every cell's blocks again for ten seconds of the GPU's energy counter.

The counter (nvmlDeviceGetTotalEnergyConsumption) is updated every 20 to 100 ms, and its sensor samples only part of the
time (Yang, Adamek, Armour: "Part-time Power Measurements", arXiv 2312.02741); so a window is long, and contains whole
blocks, prompts included. The counter covers the whole GPU. Idle power is measured and reported, never subtracted.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from mtbench.errors import first_line
from mtbench.hardware import machine
from mtbench.hardware.machine import Gpu
from mtbench.measure.model_pool import ModelPool
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import CellEnergy, EnergyRecord
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.run import Run
from mtbench.records import dump

WINDOW_S = 10.0
IDLE_S = 3.0
NO_GPU = "no GPU: energy is read from a GPU's own counter"
NO_NVML = "the GPU's driver library (NVML) does not answer"
NO_COUNTER = "this GPU has no energy counter"
ELSEWHERE = "the engine is a process of its own, on whatever GPU it may be"
UNMEASURED = "not measured yet; `--resume` does it"


def measure(
    run: Run, plan: Plan, pool: ModelPool, failed: set[str], note: Callable[[str], None], deadline: float
) -> None:
    """Fill energy.json: `idle_power_w` and, by cell, what `window` returns. Cells already measured are kept.

    Without a counter it holds the reason. Stops at `deadline` (time.monotonic).
    """
    directory = run.directory
    known = directory.read("energy.json", EnergyRecord) if directory.has("energy.json") else EnergyRecord()
    cells = dict(known.cells)
    gpu = machine.gpu() if pool.device == "cuda" else None
    if gpu is None or gpu.energy_j() is None:
        reason = NO_GPU if pool.device != "cuda" else NO_NVML if gpu is None else NO_COUNTER
        if not cells and known.reason != reason:
            directory.write_json("energy.json", {"reason": reason})
        return
    elsewhere = {cell.cell for cell in plan.cells if not cell.computes_here}
    if not cells.keys() >= elsewhere:
        cells |= dict.fromkeys(elsewhere, CellEnergy(energy_reason=ELSEWHERE))
        _write(directory, known.idle_power_w, cells)
    todo = [cell for cell in plan.cells if cell.cell not in cells and cell.cell not in failed]
    if not todo or time.monotonic() > deadline:
        return
    note(f"energy: {WINDOW_S:g} s of decoding for each of {len(todo)} cells")
    idle_power_w = known.idle_power_w or _idle_power_w(gpu)
    for i, cell in enumerate(todo):
        if time.monotonic() > deadline:
            note(f"time budget spent; the energy of {len(todo) - i} cells is measured with --resume")
            return
        answered = {line.item: line.context for line in run.answers[cell.cell]}
        try:
            cells[cell.cell] = window(gpu, plan, pool, cell, answered)
        except Exception as error:  # the method's fault; earlier cells keep their figures
            cells[cell.cell] = CellEnergy(energy_reason=f"{type(error).__name__}: {first_line(error)}")
        _write(directory, idle_power_w, cells)


def _write(run: RunDirectory, idle_power_w: float | None, cells: dict[str, CellEnergy]) -> None:
    run.write_json("energy.json", dump(EnergyRecord(idle_power_w=idle_power_w, cells=cells)))


def of(known: EnergyRecord, cell: str, error: str | None = None) -> CellEnergy:
    """Return a cell's part of energy.json, or why it has none. `error`: of the cell."""
    return known.cells.get(cell) or CellEnergy(energy_reason=error or known.reason or UNMEASURED)


def window(
    gpu: Gpu,
    plan: Plan,
    pool: ModelPool,
    cell: Cell,
    answered: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> CellEnergy:
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
        return CellEnergy(energy_reason=NO_COUNTER)
    if dropped := machine.window(before, after)["dropped"]:
        return CellEnergy(energy_reason=dropped)
    energy_j, window_s = after.energy_j - before.energy_j, after.at_s - before.at_s
    return CellEnergy(
        energy_j=energy_j,
        window_s=window_s,
        tokens=tokens,
        j_per_token=energy_j / tokens,
        mean_power_w=energy_j / window_s,
    )


def _idle_power_w(gpu: Gpu) -> float | None:
    time.sleep(IDLE_S / 3)
    before = gpu.sample()
    time.sleep(IDLE_S)
    after = gpu.sample()
    if before.energy_j is None or after.energy_j is None:
        return None
    return (after.energy_j - before.energy_j) / (after.at_s - before.at_s)

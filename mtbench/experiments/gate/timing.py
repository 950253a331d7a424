"""The times of one process by cell, and how the times of a pair of processes differ.

The time of a cell in a process is the sum over blocks of the median over rounds. Only blocks count that both processes
of a pair have timed.
"""

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from scipy.special import chdtri

from mtbench.experiments.gate.format import Attribution, CellFloor
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import TimingLine
from mtbench.statistics import SAMPLES_NEEDED_SHARE

OUTLIER = 1.5  # times the median of the block
BOUND_LEVEL = 0.8  # of the upper bound of a standard deviation


class Block(NamedTuple):
    """Medians over the rounds of a block, in seconds. None: not measured apart."""

    wall_s: float
    prefill_s: float | None
    forward_s: float | None


class Process(NamedTuple):
    """What one process timed of a cell."""

    blocks: dict[int, Block]
    samples: list[list[float]]  # wall seconds of the rounds of each block
    void: str | None  # why its times do not count
    cpu_s: float | None = None  # processor seconds of the samples that count; None: not measured
    wall_s: float = 0.0  # wall seconds of the same samples


def read(run: RunDirectory, cell: str) -> Process:
    """Return what a process timed of a cell. Dropped samples do not count; under 80 % left, the cell is void."""
    lines = run.read_lines(f"timings/{cell}.jsonl", TimingLine)
    kept = [line for line in lines if line.dropped is None]
    rounds: dict[int, list[TimingLine]] = {}
    for line in kept:
        rounds.setdefault(line.block, []).append(line)
    void = None
    if len(kept) < SAMPLES_NEEDED_SHARE * len(lines) or not kept:
        reasons = sorted({line.dropped for line in lines if line.dropped}) or ["nothing was timed"]
        void = f"{len(kept)} of {len(lines)} samples left: {reasons[0]}"
    blocks = {block: _medians(of_block) for block, of_block in rounds.items()}
    measured = [(line.cpu_s, line.wall_s) for line in kept if line.cpu_s is not None]
    cpu_s, wall_s = (sum(column) for column in zip(*measured, strict=True)) if measured else (None, 0.0)
    return Process(blocks, [[line.wall_s for line in of_block] for of_block in rounds.values()], void, cpu_s, wall_s)


class Pair(NamedTuple):
    """A cell in both processes of a pair, in seconds."""

    base_s: float
    head_s: float
    attribution: Attribution

    @property
    def difference(self) -> float:
        """log(head's time / base's time)."""
        return math.log(self.head_s / self.base_s)


def pair(base: Process, head: Process) -> Pair | None:
    """Return the times over the blocks that both processes have; None if they share too few."""
    shared = base.blocks.keys() & head.blocks.keys()
    if not shared or len(shared) < SAMPLES_NEEDED_SHARE * max(len(base.blocks), len(head.blocks)):
        return None
    a, b = ([process.blocks[block] for block in sorted(shared)] for process in (base, head))
    base_s, head_s = (sum(block.wall_s for block in blocks) for blocks in (a, b))
    total = (head_s - base_s) / base_s
    prefill = _change([x.prefill_s for x in a], [x.prefill_s for x in b], base_s) or 0.0
    forward = _change([x.forward_s for x in a], [x.forward_s for x in b], base_s)
    host = None if forward is None else total - prefill - forward
    return Pair(base_s, head_s, Attribution(prefill=prefill, forward=forward, host=host, total=total))


def mean_attribution(pairs: Sequence[Pair]) -> Attribution | None:
    """Return the mean attribution of some pairs; None without pairs."""
    if not pairs:
        return None
    parts = [p.attribution for p in pairs]
    forward = [part.forward for part in parts if part.forward is not None]
    host = [part.host for part in parts if part.host is not None]
    apart = len(forward) == len(host) == len(parts)
    return Attribution(
        prefill=fmean(part.prefill for part in parts),
        forward=fmean(forward) if apart else None,
        host=fmean(host) if apart else None,
        total=fmean(part.total for part in parts),
    )


def floor_of(cell: str, differences: Sequence[float], processes: Sequence[Process]) -> CellFloor:
    """Return the noise of a cell from pairs of processes of one build. `processes`: in the order in which they ran."""
    n = len(differences)
    sd = float(np.std(differences, ddof=1))
    rounds = [[x / median(block) for x in block] for process in processes for block in process.samples if block]
    ratios = np.concatenate([np.asarray(block) for block in rounds])
    within = [np.log(block) for block in rounds if len(block) > 1]
    totals = [math.log(sum(block.wall_s for block in process.blocks.values())) for process in processes]
    return CellFloor(
        cell=cell,
        pair_sd=sd,
        pair_sd_high=sd * math.sqrt((n - 1) / chdtri(n - 1, BOUND_LEVEL)),
        block_sd=math.sqrt(fmean(float(np.var(block, ddof=1)) for block in within)) if within else None,
        outliers=float(np.mean(ratios > OUTLIER)),
        drift_per_pair=2 * float(np.polyfit(range(len(totals)), totals, 1)[0]) if len(totals) > 2 else None,
    )


def _medians(lines: Sequence[TimingLine]) -> Block:
    forward = [line.device_s for line in lines if line.device_s is not None]
    prefill = [line.prefill_s for line in lines if line.prefill_s is not None]
    return Block(
        median(line.wall_s for line in lines),
        median(prefill) if prefill else None,
        median(forward) if forward else None,
    )


def _change(base: Sequence[float | None], head: Sequence[float | None], base_s: float) -> float | None:
    """Return how much a part grew, as a share of base's wall time; None if it was not measured."""
    known = [(a, b) for a, b in zip(base, head, strict=True) if a is not None and b is not None]
    return sum(b - a for a, b in known) / base_s if len(known) == len(base) else None

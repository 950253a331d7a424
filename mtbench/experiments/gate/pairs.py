"""Pairs of processes: run one of each build over the same plan, and read what they timed.

A pair is a folder with the run directories `base` and `head`. It gets its name, its number, when both processes have
ended: an unfinished pair is run again. The time of a cell in a process is the sum over blocks of the median over
rounds; only blocks that both processes of a pair timed count. Where head emits more or fewer tokens, its time is
that of as many tokens as base's, by proportion.
"""

import itertools
import math
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from mtbench import files
from mtbench.errors import UserError
from mtbench.experiments.gate import plans
from mtbench.experiments.gate.builds import Build
from mtbench.experiments.gate.format import GateRequest
from mtbench.experiments.gate.plans import Planned
from mtbench.experiments.gate.processes import BuildFailed, generate, generate_in_turns
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import FailureLine, TimingLine
from mtbench.statistics import SAMPLES_NEEDED_SHARE

SIDES = ("base", "head")


@dataclass(frozen=True, slots=True)
class PairRunner:
    """Runs pairs of processes of two builds."""

    request: GateRequest
    builds: Sequence[Build]  # base, head
    planned: Sequence[Planned]  # base's, head's
    note: Callable[[str], None]

    def run(self, folder: Path, number: int, cells: Sequence[str]) -> None:
        """Run a pair, once more if a process ends wrongly. Raises BuildFailed for head, UserError for base.

        The second time base begins: if it fails as well, the machine may be at fault, and head is not blamed.
        """
        partial = folder / f"{number:04}.partial"
        try:
            self._run(partial, cells, self.first(folder.name, number))
        except BuildFailed as failure:
            self.note(f"{failure}; the pair is run again")
            try:
                self._run(partial, cells, first=0)
            except BuildFailed as again:
                if again.build is self.builds[0]:
                    raise UserError(f"base cannot decode: {again}.") from None
                raise
        with files.write_errors(folder):
            partial.rename(folder / f"{number:04}")

    def first(self, folder: str, number: int) -> int:
        """Return which build begins a pair, 0 for base. The order is ABBA with a random start, against drift."""
        start = random.Random(f"{self.request.seed}/{folder}").randrange(2)
        return (number // 2 + start) % 2

    def _run(self, directory: Path, cells: Sequence[str], first: int) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        runs = []
        for side, planned in zip(SIDES, self.planned, strict=True):
            rounds = planned.plan.request.rounds
            stored = plans.only(planned.stored, cells, blocks=self.request.blocks, rounds=rounds)
            runs.append(plans.write(directory / side, planned, stored))
        if self.request.interleave:
            generate_in_turns(self.builds, runs, first, self.request.process_limit_s)
            return
        for place in (first, 1 - first):
            generate(self.builds[place], runs[place], timed_only=True, limit_s=self.request.process_limit_s)


class Times(NamedTuple):
    """Seconds and emitted tokens of a block, or of all blocks of a process."""

    wall_s: float
    tokens: float


class CellTimes(NamedTuple):
    """A cell in both processes of a pair."""

    base: Times
    head: Times

    @property
    def difference(self) -> float:
        """log(head's time / base's time)."""
        return math.log(self.head.wall_s / self.base.wall_s)


class PairTimes(NamedTuple):
    """The times of a pair, by cell."""

    cells: Mapping[str, CellTimes]
    void: Mapping[str, tuple[str | None, str | None]]  # why base's or head's times do not count


def read_pairs(folder: Path) -> list[PairTimes]:
    """Return the complete pairs of a folder in order. Those behind a missing one are run again."""
    numbered = (folder / f"{number:04}" for number in itertools.count(1))
    return [_read_pair(path) for path in itertools.takewhile(Path.is_dir, numbered)]


def differences(pairs: Sequence[PairTimes], cells: Sequence[str]) -> dict[str, list[float]]:
    """Return log(head's time / base's time) by cell, in the order of the pairs in which the cell has valid times."""
    return {cell: [pair.cells[cell].difference for pair in pairs if cell in pair.cells] for cell in cells}


def mean_differences(pairs: Sequence[PairTimes], cells: Sequence[str]) -> list[float]:
    """Return the mean over cells of log(head's time / base's time), by pair, where all cells have valid times."""
    whole = [pair for pair in pairs if all(cell in pair.cells for cell in cells)]
    return [fmean(pair.cells[cell].difference for cell in cells) for pair in whole] if cells else []


def _read_pair(path: Path) -> PairTimes:
    runs = [RunDirectory(path / side) for side in SIDES]
    failed = [{line.cell: line.error for line in run.read_lines("failures.jsonl", FailureLine)} for run in runs]
    timed = {file.stem for run in runs for file in (run.path / "timings").glob("*.jsonl")}
    cells, void = {}, {}
    for name in sorted(timed.union(*failed)):
        (base, base_void), (head, head_void) = (read_blocks(run, name) for run in runs)
        faults = (failed[0].get(name) or base_void, failed[1].get(name) or head_void)
        pair = None if any(faults) else pair_of(base, head)
        if pair is None:
            void[name] = faults if any(faults) else ("the processes share too few blocks",) * 2
        else:
            cells[name] = pair
    return PairTimes(cells, void)


def read_blocks(run: RunDirectory, cell: str) -> tuple[dict[int, Times], str | None]:
    """Return a process's times of a cell by block, and why they are void: under 80 % of the samples are left."""
    lines = run.read_lines(f"timings/{cell}.jsonl", TimingLine)
    kept = [line for line in lines if line.dropped is None]
    rounds: dict[int, list[TimingLine]] = {}
    for line in kept:
        rounds.setdefault(line.block, []).append(line)
    blocks = {
        block: Times(median(line.wall_s for line in of_block), median(line.tokens for line in of_block))
        for block, of_block in rounds.items()
    }
    if kept and len(kept) >= SAMPLES_NEEDED_SHARE * len(lines):
        return blocks, None
    reasons = sorted({line.dropped for line in lines if line.dropped}) or ["nothing was timed"]
    return blocks, f"{len(kept)} of {len(lines)} samples left: {reasons[0]}"


def pair_of(base: Mapping[int, Times], head: Mapping[int, Times]) -> CellTimes | None:
    """Return the times over the blocks that both processes have, head's for base's number of tokens.

    None if they share too few blocks.
    """
    shared = sorted(base.keys() & head.keys())
    if not shared or len(shared) < SAMPLES_NEEDED_SHARE * max(len(base), len(head)):
        return None
    of_base, of_head = (_total([process[block] for block in shared]) for process in (base, head))
    share = of_base.tokens / of_head.tokens if of_base.tokens and of_head.tokens else 1.0
    return CellTimes(of_base, Times(of_head.wall_s * share, of_base.tokens))


def _total(blocks: Sequence[Times]) -> Times:
    return Times(*map(math.fsum, zip(*blocks, strict=True)))

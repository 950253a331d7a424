"""Pairs of processes: run one of each build over the same plan, and read what they timed.

A pair is a folder with the run directories `base` and `head`. It gets its name, its number, when both processes have
ended: what a kill leaves behind is run again.
"""

import itertools
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from mtbench import files
from mtbench.errors import UserError
from mtbench.experiments.gate import plans, timing
from mtbench.experiments.gate.builds import Build
from mtbench.experiments.gate.format import GateRequest
from mtbench.experiments.gate.plans import Planned
from mtbench.experiments.gate.processes import BuildFailed, generate, generate_in_turns
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import FailureLine

ATTEMPTS = 2  # of a pair whose process ends wrongly
SIDES = ("base", "head")


@dataclass(frozen=True, slots=True)
class PairTimes:
    """What a pair timed, by cell."""

    cells: Mapping[str, timing.Pair]
    void: Mapping[str, tuple[str | None, str | None]]  # why base's or head's times do not count
    processes: Mapping[str, tuple[timing.Process, timing.Process]]


def read_pairs(folder: Path) -> list[PairTimes]:
    """Return the complete pairs of a folder in order."""
    return [_read_pair(folder / f"{number:04}") for number in range(1, missing_pair(folder))]


def missing_pair(folder: Path) -> int:
    """Return the number of the first pair that is missing. Pairs behind it, as after a deletion, are run again."""
    return next(number for number in itertools.count(1) if not (folder / f"{number:04}").is_dir())


def differences(pairs: Sequence[PairTimes], cells: Sequence[str]) -> dict[str, list[float]]:
    """Return log(head's time / base's time) by cell, in the order of the pairs in which the cell has valid times."""
    return {cell: [pair.cells[cell].difference for pair in pairs if cell in pair.cells] for cell in cells}


def mean_differences(pairs: Sequence[PairTimes], cells: Sequence[str]) -> list[float]:
    """Return the mean over cells of log(head's time / base's time), by pair, where all cells have valid times."""
    whole = [pair for pair in pairs if all(cell in pair.cells for cell in cells)]
    return [fmean(pair.cells[cell].difference for cell in cells) for pair in whole] if cells else []


@dataclass(frozen=True, slots=True)
class PairRunner:
    """Runs pairs of processes of two builds."""

    request: GateRequest
    builds: Sequence[Build]  # base, head
    planned: Sequence[Planned]  # base's, head's
    replayed: Mapping[str, RunDirectory]  # cells that repeat the commits of a run
    note: Callable[[str], None]

    def run(self, folder: Path, number: int, cells: Sequence[str]) -> None:
        """Run a pair, once more if a process ends wrongly. Raises BuildFailed for head, UserError for base.

        The second time base begins: if it fails as well, the machine may be at fault, and head is not blamed.
        """
        partial = folder / f"{number:04}.partial"
        for attempt in range(1, ATTEMPTS + 1):
            shutil.rmtree(partial, ignore_errors=True)
            try:
                self._run(partial, cells, self._first(folder.name, number) if attempt == 1 else 0)
            except BuildFailed as failure:
                if attempt < ATTEMPTS:
                    self.note(f"{failure}; the pair is run again")
                    continue
                if failure.build is self.builds[0]:
                    raise UserError(f"base cannot decode: {failure}.") from None
                raise
            break
        whole = folder / f"{number:04}"
        shutil.rmtree(whole, ignore_errors=True)  # one behind a pair that was deleted
        with files.write_errors(whole):
            partial.rename(whole)

    def _first(self, folder: str, number: int) -> int:
        """Return which build begins a pair, 0 for base. The order is ABBA with a random start, against drift."""
        start = random.Random(f"{self.request.seed}/{folder}").randrange(2)
        return (number // 2 + start) % 2

    def _run(self, directory: Path, cells: Sequence[str], first: int) -> None:
        runs = []
        for side, planned in zip(SIDES, self.planned, strict=True):
            rounds = planned.plan.request.rounds
            stored = plans.only(planned.stored, cells, blocks=self.request.blocks, rounds=rounds)
            stored = plans.scripted(stored, self.replayed, planned.plan)
            runs.append(plans.write(directory / side, planned, stored))
        if self.request.interleave:
            generate_in_turns(self.builds, runs, first, self.request.process_limit_s)
            return
        for place in (first, 1 - first):
            generate(self.builds[place], runs[place], timed_only=True, limit_s=self.request.process_limit_s)


def _read_pair(path: Path) -> PairTimes:
    runs = [RunDirectory(path / side) for side in SIDES]
    failed = [{line.cell: line.error for line in run.read_lines("failures.jsonl", FailureLine)} for run in runs]
    names = {file.stem for run in runs for file in (run.path / "timings").glob("*.jsonl")} | failed[0].keys()
    cells, void, processes = {}, {}, {}
    for name in sorted(names | failed[1].keys()):
        base, head = (timing.read(run, name) for run in runs)
        faults = (failed[0].get(name) or base.void, failed[1].get(name) or head.void)
        pair = None if any(faults) else timing.pair(base, head)
        if pair is None:
            void[name] = faults if any(faults) else ("the processes share too few blocks",) * 2
        else:
            cells[name], processes[name] = pair, (base, head)
    return PairTimes(cells, void, processes)

"""Stage `timed`: pairs of processes until the times are decided.

The verdict depends on the complete pairs alone (decision.py), so a killed stage resumes where it stopped and gives
the same one.
"""

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtbench.document.formatting import counted
from mtbench.experiments.gate import decision
from mtbench.experiments.gate.decision import Decision, Differences
from mtbench.experiments.gate.format import Finding, Gate, Kind, Level, TimedCell, TimeTest
from mtbench.experiments.gate.pairs import PairRunner, PairTimes, differences, mean_differences, read_pairs
from mtbench.experiments.gate.processes import BuildFailed
from mtbench.experiments.gate.tables import changed_by, detectable
from mtbench.plan.plan import Cell

SPARE_PAIRS = 1.25  # times the last look, for pairs in which a cell has no valid time
VOID_SHARE = 0.2  # of the pairs


@dataclass(frozen=True, slots=True)
class TimedStage:
    """The pairs of one gate, in the folders `pairs` and `fresh` of its directory."""

    directory: Path
    runner: PairRunner
    at: Sequence[int]  # looks
    deadline: float  # time.monotonic; no pair begins later

    def run(self, gate: Gate, cells: Sequence[Cell]) -> Gate:
        """Run pairs until a look decides; return the gate with the times and their findings."""
        changed = {found.cell for found in gate.findings if found.kind == "changed"}
        names = [cell.cell for cell in cells]
        findings = [
            _finding("changed", "note", "its times per token are compared", name) for name in names if name in changed
        ]
        decided, fresh = decision.decide(differences([], names), self.at, gate.request.margin), list[PairTimes]()
        try:
            decided = self._until_decided(names, gate.request.margin)
            if decided.word == "FAIL":
                failed = [cell for cell, word in decided.cells.items() if word == "FAIL"]
                fresh = self._fresh_pairs(failed or names, decision.confirmation_pairs(decided, self.at))
        except BuildFailed as failure:
            findings.append(_finding("failed", "fail", f"{failure}", None))
        pairs = read_pairs(self.directory / "pairs")
        values = differences(pairs, names)
        results = [self._result(cell, pairs, decided, gate.request.margin, len(cells)) for cell in cells]
        mean = None
        if len(names) > 1:
            d, word = mean_differences(pairs, names), decided.all_cells
            mean = decision.time_test(d, self.at, gate.request.margin, word, len(names))
        findings += _void(pairs, names)
        if decided.word == "FAIL":
            findings += self._of_failure(results, decided, fresh)
        elif decided.next_look is not None and time.monotonic() > self.deadline:
            text = f"the time budget is over; `mtbench gate -o {self.directory} --resume` makes more pairs"
            findings.append(_finding("undecided", "inconclusive", text, None))
        elif decided.noisy:
            findings.append(_finding("undecided", "inconclusive", self._hidden(values), None))
        findings += undecided(results) if decided.word != "FAIL" else []
        sd = decision.noise(values)
        return gate.changed(
            pairs=len(pairs),
            confirmation_pairs=len(fresh),
            smallest_detectable=None if math.isnan(sd) else decision.smallest_detectable(sd),
            findings=[*gate.findings, *findings],
            timed=[
                cell.changed(test=_settled(cell.test, [f for f in findings if f.cell == cell.cell])) for cell in results
            ],
            all_cells=_settled(mean, findings) if mean is not None and mean.word == "FAIL" else mean,
        )

    def _until_decided(self, cells: Sequence[str], margin: float) -> Decision:
        """Run pairs until a look decides, the last look is made, or the time is over."""
        folder, most = self.directory / "pairs", round(SPARE_PAIRS * self.at[-1])
        took = ""
        while True:
            pairs = read_pairs(folder)
            values = differences(pairs, cells)
            decided = decision.decide(values, self.at, margin, mean_differences(pairs, cells))
            if decided.next_look is None or len(pairs) >= most or time.monotonic() > self.deadline:
                return decided
            if decided.noisy and decided.tested == len(pairs):
                self.runner.note(f"stage timed: {self._hidden(values)}; a cell may still be shown slower")
            valid = min(len(values[cell]) for cell in decided.open)
            here = f"pair {valid + 1} of at most {self.at[-1]}, tested after {decided.next_look}"
            self.runner.note(f"stage timed: {here}; {counted(len(decided.open), 'cell')}{took}")
            begun = time.monotonic()
            self.runner.run(folder, len(pairs) + 1, decided.open)
            pair_s = time.monotonic() - begun
            left_s = pair_s * (self.at[-1] - valid - 1)
            took = f"; the last took {pair_s:.0f} s, so all {self.at[-1]} would take {math.ceil(left_s / 60)} min more"

    def _hidden(self, values: Differences) -> str:
        """Return that the noise hides the accepted slowdown, and which options would show one."""
        request, sd = self.runner.request, decision.noise(values)
        least = decision.smallest_detectable(sd)
        ways = [] if request.interleave else ["add --interleave"]
        ways += ["end other processes", *[f"give --max-slowdown {100 * least:g}"] * (request.margin < least < 1)]
        return f"pairs differ by {sd:.1%} (standard deviation), so {detectable(least)}: {', or '.join(ways)}"

    def _fresh_pairs(self, cells: Sequence[str], wanted: int) -> list[PairTimes]:
        """Run the pairs that confirm a FAIL, until `wanted` have valid times of every cell."""
        folder, most = self.directory / "fresh", round(SPARE_PAIRS * wanted)
        while True:
            pairs = read_pairs(folder)
            valid = len(mean_differences(pairs, cells))
            if valid >= wanted or len(pairs) >= most or time.monotonic() > self.deadline:
                return pairs
            self.runner.note(f"stage timed: fresh pair {valid + 1} of {wanted}, to test the FAIL once more")
            self.runner.run(folder, len(pairs) + 1, cells)

    def _result(
        self, cell: Cell, pairs: Sequence[PairTimes], decided: Decision, margin: float, cells: int
    ) -> TimedCell:
        own = [pair.cells[cell.cell] for pair in pairs if cell.cell in pair.cells]
        d = [pair.difference for pair in own]
        return TimedCell(
            cell=cell.cell,
            suite=cell.suite,
            arm=cell.arm,
            batch_size=cell.batch_size,
            base_s=[pair.base.wall_s for pair in own],
            head_s=[pair.head.wall_s for pair in own],
            test=decision.time_test(d, self.at, margin, decided.cells[cell.cell], cells),
        )

    def _of_failure(
        self, results: Sequence[TimedCell], decided: Decision, fresh: Sequence[PairTimes]
    ) -> Iterator[Finding]:
        """Yield the findings of a FAIL: fresh pairs confirm it, do not, or are missing."""
        slowest = sorted(results, key=lambda cell: -(cell.test.ratio or 0.0))
        failed = [cell for cell in slowest if cell.test.word == "FAIL"]
        wanted = decision.confirmation_pairs(decided, self.at)
        values, means = differences(fresh, [cell.cell for cell in failed]), mean_differences(fresh, list(decided.cells))
        timed = min(map(len, values.values()), default=len(means))
        confirmed = []
        if timed >= wanted:
            fresh_d = {cell: d[:wanted] for cell, d in values.items()}
            confirmed = decision.confirmed(decided, fresh_d, means[:wanted])
        for cell in failed:
            level, reason = _confirmation(cell.cell in confirmed, timed, wanted)
            yield _finding("slower", level, f"slower by {changed_by(cell.test)}; {reason}", cell.cell)
        if not failed:
            level, reason = _confirmation(None in confirmed, timed, wanted)
            most = f"most of all {slowest[0].cell} by {changed_by(slowest[0].test)}"
            yield _finding("slower", level, f"the mean over all cells is slower, {most}; {reason}", None)


def _confirmation(confirmed: bool, timed: int, wanted: int) -> tuple[Level, str]:
    if confirmed:
        return "fail", f"{counted(wanted, 'fresh pair')} confirm it"
    if timed >= wanted:
        return "inconclusive", f"{counted(wanted, 'fresh pair')} do not confirm it"
    return "inconclusive", f"only {timed} of {counted(wanted, 'fresh pair')} tested it once more"


def _settled(test: TimeTest, found: Sequence[Finding]) -> TimeTest:
    """Return a test with the verdict of the gravest finding on it: its times may be void, its FAIL not confirmed."""
    levels = {finding.level for finding in found}
    if "fail" in levels:
        return test.changed(word="FAIL")
    return test.changed(word="INCONCLUSIVE") if "inconclusive" in levels else test


def _void(pairs: Sequence[PairTimes], cells: Sequence[str]) -> Iterator[Finding]:
    """Yield the cells that have no valid time in some of the pairs in which they ran; up to a fifth is a note."""
    for cell in cells:
        faults = [pair.void[cell] for pair in pairs if cell in pair.void]
        most = VOID_SHARE * (len(faults) + sum(cell in pair.cells for pair in pairs))
        of_head = [head for base, head in faults if head and not base]
        if len(of_head) > most:
            yield _finding("void", "fail", f"void in head only, in {len(of_head)} pairs: {of_head[0]}", cell)
        elif faults:
            why = next(fault for fault in faults[0] if fault)
            level: Level = "inconclusive" if len(faults) > most else "note"
            yield _finding("void", level, f"void in {len(faults)} pairs: {why}", cell)


def undecided(results: Sequence[TimedCell]) -> Iterator[Finding]:
    """Yield the cells that are neither slower nor shown to be as fast; first the one that may be slowest."""
    for cell in sorted(results, key=lambda cell: -(cell.test.ci_high or math.inf)):
        if cell.test.word == "INCONCLUSIVE":
            needed = f"; about {cell.test.pairs_needed} pairs would decide it" if cell.test.pairs_needed else ""
            shown = f"{changed_by(cell.test)} after {counted(len(cell.base_s), 'pair')}{needed}"
            yield _finding("undecided", "inconclusive", shown if cell.base_s else "no pair was timed", cell.cell)


def _finding(kind: Kind, level: Level, text: str, cell: str | None) -> Finding:
    return Finding(stage="timed", kind=kind, level=level, cell=cell, text=text)

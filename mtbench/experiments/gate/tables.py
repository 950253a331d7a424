"""The findings of a gate as text: the rows and sentences that the page and the terminal share.

Nothing is decided here. A ratio of times is written as people read it: 1.031 is +3.1%.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mtbench.document import model
from mtbench.document.formatting import NONE, bounds, counted, listed
from mtbench.document.model import Entry, Row, Table, Tone
from mtbench.experiments.gate.format import (
    EXIT_CODES,
    Finding,
    Gate,
    Level,
    StageName,
    TimeTest,
    Verdict,
)

NOT_COMPARED = "not compared"
ALL_CELLS = "mean of all cells"  # has spaces, so no cell has this name
SIGNS: dict[Verdict, str] = {"PASS": "✓", "FAIL": "✗", "INCONCLUSIVE": "?"}
TONES: dict[Verdict, Tone] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "plain"}
LEVEL_WORDS: dict[Level, Verdict | None] = {"fail": "FAIL", "inconclusive": "INCONCLUSIVE", "note": None}
LEVELS: tuple[Level, ...] = ("fail", "inconclusive", "note")  # the gravest first

COLUMNS = [
    ("tokens and counts", "do both builds emit the same tokens from the same work?"),
    ("time", "head’s time over base’s, less 1; 95% interval in brackets; the word on it"),
    ("pairs", "pairs of processes that timed the cell"),
]


class Status(NamedTuple):
    """A stage's verdict on a cell. An empty word does not count."""

    word: Verdict | None
    text: str

    @property
    def verdict(self) -> model.Verdict:
        if self.word is None:
            return model.Verdict(self.text)
        return model.Verdict(self.text, tone=TONES[self.word], sign=SIGNS[self.word], short=self.word)


def changed_by(test: TimeTest) -> str:
    """Return a difference of times in percent with its 95 % interval.

    >>> _signed(3.14), _signed(-0.44), _signed(-0.01)
    ('+3.1', '−0.4', '0.0')
    """
    if (limits := bounds(test)) is None or test.ratio is None:
        return "no interval"
    return f"{_change(test)} {_interval(limits)}"


def _change(test: TimeTest) -> str:
    return NONE if test.ratio is None else f"{_signed(100 * (test.ratio - 1))}%"


def _interval(limits: Sequence[float]) -> str:
    return f"[{listed(_signed(100 * (limit - 1)).removeprefix('+') for limit in limits)}]"


def _signed(value: float) -> str:
    rounded = round(value, 1) + 0.0  # −0.0 + 0.0 is 0.0
    return (f"{rounded:+.1f}" if rounded else "0.0").replace("-", "−")


def cells(gate: Gate) -> Table:
    """Return a row per cell with its verdicts; first the mean of all cells."""
    shown, timed = [], {cell.cell: cell for cell in gate.timed}
    if gate.all_cells is not None:
        shown.append(Row(ALL_CELLS, [Entry(""), _time(gate.all_cells), Entry()], strong=True))
    for number, name in enumerate(names(gate), start=1):
        exact, cell = Entry("", verdict=exact_status(gate, name).verdict), timed.get(name)
        time = Entry(verdict=Status(None, "not timed").verdict) if cell is None else _time(cell.test)
        about = "" if cell is None else f"{cell.arm}, {cell.suite}, batch size\u00a0{cell.batch_size}"
        shown.append(Row(name, [exact, time, Entry(str(len(cell.head_s))) if cell else Entry()], number, about))
    return Table(COLUMNS, shown, "cell", "Head against base; 95% intervals in brackets").filled()


def _time(test: TimeTest) -> Entry:
    limits = bounds(test)
    return Entry(_change(test), None if limits is None else _interval(limits), time_status(test).verdict)


def names(gate: Gate) -> list[str]:
    """Return the cells in the order of the times, then of the comparison, then of the findings."""
    named = (finding.cell for finding in gate.findings if finding.cell is not None)
    return list(dict.fromkeys((*(cell.cell for cell in gate.timed), *gate.compared, *named)))


def findings_of(gate: Gate, stage: StageName) -> list[Finding]:
    """Return the findings of a stage, the gravest first."""
    found = [finding for finding in gate.findings if finding.stage == stage]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def exact_status(gate: Gate, cell: str) -> Status:
    """Return how the tokens and counts of a cell compare, or why they cannot be compared."""
    found = [finding for finding in gate.findings if finding.cell == cell and finding.stage != "timed"]
    if found:
        word = LEVEL_WORDS[min((finding.level for finding in found), key=LEVELS.index)]
        kinds = listed(dict.fromkeys(finding.kind for finding in found))
        return Status(word, kinds if word else f"noted: {kinds}")
    return Status("PASS", "same") if cell in gate.compared else Status(None, NOT_COMPARED)


def time_status(test: TimeTest) -> Status:
    """Return the verdict on a time, and how many pairs it needs."""
    needed = "" if test.pairs_needed is None else f", {counted(test.pairs_needed, 'pair')} needed"
    return Status(test.word, f"{test.word}{needed}")


def summary(gate: Gate) -> str:
    """Return sentences on what was compared and timed."""
    compared = f"{counted(len(gate.compared), 'cell')} compared in tokens and counts"
    timed = f"{counted(len(gate.timed), 'cell')} timed in {counted(gate.pairs, 'pair')} of processes"
    one_build = " Base and head are one build, so a FAIL is a false alarm." if gate.same_build else ""
    return f"{compared}; {timed}.{one_build} The command ends with exit code {EXIT_CODES[gate.word]}."


def subject(gate: Gate) -> str:
    """Return which builds were compared, and how."""
    accepted = f"accepted slowdown {gate.request.max_slowdown:g}%"
    return listed((f"{gate.head.label} against {gate.base.label}", accepted, gate.started))

"""The findings of a gate as text: the rows and sentences that the page, the terminal and other tools' files share.

Nothing is decided here. A ratio of times is written as people read it: 1.031 is +3.1%.
"""

from collections.abc import Sequence
from statistics import geometric_mean
from typing import NamedTuple

from mtbench.document import model
from mtbench.document.formatting import NONE, bounds, counted, listed, seconds
from mtbench.document.model import Entry, Row, Table, Tone
from mtbench.experiments.gate.decision import MOST_PAIRS
from mtbench.experiments.gate.format import EXIT_CODES, BuildRecord, Gate, Level, TimeTest, Verdict

NOT_COMPARED = "not compared"
ALL_CELLS = "mean of all cells"  # has spaces, so no cell has this name
SIGNS: dict[Verdict, str] = {"PASS": "✓", "FAIL": "✗", "INCONCLUSIVE": "?"}
TONES: dict[Verdict, Tone] = {"PASS": "good", "FAIL": "bad", "INCONCLUSIVE": "plain"}
LEVEL_WORDS: dict[Level, Verdict | None] = {"fail": "FAIL", "inconclusive": "INCONCLUSIVE", "note": None}
LEVELS: tuple[Level, ...] = ("fail", "inconclusive", "note")  # the gravest first
NARROW = 0.004  # intervals below this width are written with two decimals

COLUMNS = [
    ("tokens and counts", "do both builds emit the same tokens from the same work?"),
    ("time", "head’s time over base’s, less 1; 95% interval in brackets; the word on it"),
    ("pairs", "pairs of processes that timed the cell"),
    ("base", "geometric mean over pairs of base’s time"),
    ("head", "geometric mean over pairs of head’s time"),
]
BRIEF = ("time", "tokens and counts", "pairs")


class Status(NamedTuple):
    """A stage's verdict on a cell. An empty word does not count."""

    word: Verdict | None
    text: str

    @property
    def verdict(self) -> model.Verdict:
        if self.word is None:
            return model.Verdict(self.text)
        return model.Verdict(self.text, tone=TONES[self.word], sign=SIGNS[self.word], short=self.word)


def change(test: TimeTest) -> str:
    """Return a ratio of times as a difference in percent."""
    return NONE if test.ratio is None else f"{_signed(100 * (test.ratio - 1), _digits(test))}%"


def change_interval(test: TimeTest) -> str | None:
    """Return the 95 % interval of a difference in percent; None if there is none."""
    if (limits := bounds(test)) is None:
        return None
    return f"[{listed(_signed(100 * (limit - 1), _digits(test)).removeprefix('+') for limit in limits)}]"


def changed_by(test: TimeTest) -> str:
    """Return a difference in percent with its interval, for a sentence."""
    ends = change_interval(test)
    return "no interval" if ends is None else f"{change(test)} {ends}"


def _digits(test: TimeTest) -> int:
    """Return the decimals of a difference; one would hide a narrow interval."""
    limits = bounds(test)
    return 2 if limits and limits[1] - limits[0] < NARROW else 1


def _signed(value: float, digits: int) -> str:
    rounded = round(value, digits) + 0.0  # −0.0 + 0.0 is 0.0
    return (f"{rounded:+.{digits}f}" if rounded else f"{rounded:.{digits}f}").replace("-", "−")


def cells(gate: Gate) -> Table:
    """Return a row per cell with its verdicts and times; first the mean of all cells."""
    shown = []
    if gate.all_cells is not None:
        shown.append(Row(ALL_CELLS, _filled(Entry(""), _time(gate.all_cells)), strong=True))
    timed = {cell.cell: cell for cell in gate.timed}
    for number, name in enumerate(names(gate), start=1):
        exact, cell = Entry("", verdict=exact_status(gate, name).verdict), timed.get(name)
        if cell is None:
            shown.append(Row(name, _filled(exact, Entry(verdict=Status(None, "not timed").verdict)), number))
            continue
        values = [str(len(cell.head_s)), _mean_seconds(cell.base_s), _mean_seconds(cell.head_s)]
        about = f"{cell.arm}, {cell.suite}, batch size\u00a0{cell.batch_size}"
        shown.append(Row(name, [exact, _time(cell.test), *map(Entry, values)], number, about))
    return Table(COLUMNS, shown, "cell", "Head against base; 95% intervals in brackets", brief=BRIEF).filled()


def _filled(*entries: Entry) -> list[Entry]:
    return [*entries, *[Entry()] * (len(COLUMNS) - len(entries))]


def _time(test: TimeTest) -> Entry:
    return Entry(change(test), change_interval(test), time_status(test).verdict)


def _mean_seconds(values: Sequence[float]) -> str:
    return seconds(geometric_mean(values) if values and min(values) > 0 else None)


def names(gate: Gate) -> list[str]:
    """Return the cells in the order of the times, then of the comparison, then of the findings."""
    named = (finding.cell for finding in gate.findings if finding.cell is not None)
    return list(dict.fromkeys((*(cell.cell for cell in gate.timed), *gate.compared, *named)))


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
    least = "" if gate.smallest_detectable is None else f"; {detectable(gate.smallest_detectable)}"
    one_build = f"Base and head are one build, so a FAIL is a false alarm{least}." if gate.same_build else ""
    ends = f"The command ends with exit code {EXIT_CODES[gate.word]}."
    return " ".join(filter(None, (_compared(gate), _timed(gate), one_build, ends)))


def detectable(share: float) -> str:
    """Return the smallest detectable slowdown as a clause."""
    return f"the smallest detectable slowdown is {100 * share:g}% in {MOST_PAIRS} pairs"


def _compared(gate: Gate) -> str:
    statuses = [status for name in names(gate) if (status := exact_status(gate, name)).text != NOT_COMPARED]
    if not statuses:
        return "No tokens were compared."
    return f"Tokens and counts of {counted(len(statuses), 'cell')}: {_tally(statuses, 'the same')}."


def _timed(gate: Gate) -> str:
    if not gate.timed:
        return "Nothing was timed: only counts were asked for." if gate.request.counts_only else "Nothing was timed."
    statuses = [time_status(cell.test) for cell in gate.timed]
    count, pairs = counted(len(statuses), "cell"), counted(gate.pairs, "pair")
    return f"Times of {count} in {pairs} of processes: {_tally(statuses, 'PASS')}."


def _tally(statuses: Sequence[Status], good: str) -> str:
    """Return how many cells have each verdict; the gravest first.

    >>> _tally([Status("PASS", ""), Status("FAIL", "")], "the same"), _tally([Status("PASS", "")], "the same")
    ('1 FAIL, 1 the same', 'the same')
    """
    words = {"FAIL": "FAIL", "INCONCLUSIVE": "INCONCLUSIVE", None: "noted", "PASS": good}
    counts = {name: sum(status.word == word for status in statuses) for word, name in words.items()}
    found = {name: n for name, n in counts.items() if n}
    if len(found) == 1:
        return next(iter(found)) if len(statuses) == 1 else f"all {next(iter(found))}"
    return listed(f"{n} {name}" for name, n in found.items())


def subject(gate: Gate) -> str:
    """Return which builds were compared, and how."""
    accepted = f"accepted slowdown {gate.request.max_slowdown:g}%"
    return listed((f"{build_name(gate.head)} against {build_name(gate.base)}", accepted, gate.started))


def build_name(build: BuildRecord) -> str:
    """Return the label of a build, with its commit if the label does not have it."""
    if build.git is None or build.git[:7] in build.label:
        return build.label
    commit, dash, dirty = build.git.partition("-")
    return f"{build.label} ({commit[:12]}{dash}{dirty[:5]})"

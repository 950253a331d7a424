"""A table of a report: entries with interval, verdict and baseline, as text for every format; rows and columns."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mtbench.document.formatting import NONE
from mtbench.report.arm_names import in_words
from mtbench.results.format import ResultCell
from mtbench.statistics import DISTURBED

TONES = {  # first words of a verdict; any other verdict is neither good nor bad
    "good": ("faster", "not worse", "exact"),
    "bad": ("slower", "worse", "divergent"),
}
COMPARATIVES = ("faster", "slower", "not worse", "worse")  # verdicts that `than` may follow
SIGNS = {"good": "▲", "bad": "▼", "plain": "•"}


class Bar(NamedTuple):
    """An interval, its value and the factor 1 on a common axis, each from 0 to 1."""

    low: float
    value: float
    high: float
    one: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One place of a table: a value, its interval, a verdict, and the baseline."""

    value: str = NONE
    interval: str | None = None
    verdict: str | None = None
    against: str | None = None  # baseline
    detail: str | None = None  # a second value that belongs to the first
    bar: Bar | None = None  # the interval, drawn

    @property
    def tone(self) -> str:
        """Whether the verdict is good, bad or neither, as `worse by less than the margin` is."""
        verdict = self.verdict or self.value
        if "less than the margin" in verdict:
            return "plain"
        for tone, words in TONES.items():
            if verdict.startswith(words):
                return tone
        return "plain"

    @property
    def words(self) -> bool:
        """Whether the value is words, which may wrap, and not a number."""
        return self.value[:1].isalpha()

    @property
    def light(self) -> bool:
        """Whether the value is not to be emphasised: words, or a figure that cannot be trusted."""
        return self.words or self.verdict == DISTURBED

    @property
    def sign(self) -> str:
        return SIGNS[self.tone]

    def line(self) -> str:
        """Return the whole entry on one line."""
        value = self.value
        if self.interval:
            value += f" {self.interval}" if self.interval.startswith("[") else f", {self.interval}"
        if self.detail:
            value += f", {self.detail}"
        if not self.verdict:
            return f"{value} (against {self.against})" if self.against else value
        if not self.against:
            return f"{value}, {self.verdict}"
        if self.verdict in COMPARATIVES:
            return f"{value}, {self.verdict} than {self.against}"
        return f"{value}, {self.verdict} (against {self.against})"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm, or one task, which has no number. A failed arm has no entries."""

    number: int | None
    arm: str
    entries: list[Entry]
    notes: list[tuple[str, str]]  # (kind, text), kind one of failed, void, flag, spread
    void: bool
    failed: bool
    simulated: bool
    words: str = ""  # the arm in words; empty: as `arm`

    @property
    def title(self) -> str:
        """The arm in words, or the name of the task."""
        return self.words or self.arm

    @property
    def tags(self) -> list[str]:
        """Words that stand next to the arm's name everywhere."""
        tags = []
        if self.void:
            tags.append("void")
        if self.simulated:
            tags.append("simulated")
        return tags


@dataclass(frozen=True, slots=True)
class Table:
    """Headings with their meanings, and the rows under them. `of` says what a row is: an arm or a task."""

    columns: list[tuple[str, str]]  # heading, meaning
    rows: list[Row]
    of: str = "arm"

    def named(self, names: Mapping[str, str]) -> "Table":
        """Return the table with its arms in words. A row keeps the id of its arm."""
        columns = [(in_words(heading, names), in_words(meaning, names)) for heading, meaning in self.columns]
        rows = [
            replace(row, words=names.get(row.arm, ""), entries=[_named(entry, names) for entry in row.entries])
            for row in self.rows
        ]
        return Table(columns, rows, self.of)

    def first(self, n: int) -> "Table":
        """Return the table with its first n columns only."""
        return Table(self.columns[:n], [replace(row, entries=row.entries[:n]) for row in self.rows])


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of arms."""

    heading: str
    meaning: str
    entry: Callable[[ResultCell], Entry]
    shown: bool = True


def table_of(
    columns: Sequence[Column],
    cells: Sequence[ResultCell],
    numbers: Mapping[str, int],
    notes: Callable[[ResultCell], list[tuple[str, str]]],
) -> Table:
    """Return a table with a row for each cell."""
    shown = [column for column in columns if column.shown]
    rows = []
    for cell in cells:
        failed = cell.status == "failed"
        rows.append(
            Row(
                numbers[cell.arm],
                cell.arm,
                [] if failed else [column.entry(cell) for column in shown],
                notes(cell),
                void=bool(cell.void),
                failed=failed,
                simulated=cell.simulated is not None,
            )
        )
    return Table([(column.heading, column.meaning) for column in shown], rows)


def comparison_row(cell: ResultCell, numbers: Mapping[str, int], entries: list[Entry]) -> Row:
    """Return a row for one of several comparisons of an arm."""
    return Row(
        numbers[cell.arm],
        cell.arm,
        entries,
        [],
        void=bool(cell.void),
        failed=False,
        simulated=cell.simulated is not None,
    )


def failure(cell: ResultCell) -> list[tuple[str, str]]:
    """Return the note of a cell in a table that only repeats why it failed."""
    return [("failed", f"Failed: {cell.error}")] if cell.status == "failed" else []


def _named(entry: Entry, names: Mapping[str, str]) -> Entry:
    """Return an entry with its arms in words."""

    def words(text: str | None) -> str | None:
        return text and in_words(text, names)

    return replace(entry, verdict=words(entry.verdict), against=words(entry.against), detail=words(entry.detail))

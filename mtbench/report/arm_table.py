"""Tables with a row for each arm, or for each comparison of an arm."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mtbench.document.formatting import few
from mtbench.document.model import Entry, Row, Table
from mtbench.report.arm_names import in_words
from mtbench.results.format import ResultCell

Notes = list[tuple[str, str]]  # kind and text


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of arms."""

    heading: str
    meaning: str
    entry: Callable[[ResultCell], Entry]


def failure(cell: ResultCell) -> Notes:
    """Return the note of a cell in a table that only repeats why it failed."""
    return [("failed", f"Failed: {cell.error}")] if cell.status == "failed" else []


def table_of(
    columns: Sequence[Column],
    cells: Sequence[ResultCell],
    numbers: Mapping[str, int],
    caption: str,
    notes: Callable[[ResultCell], Notes] = failure,
) -> Table:
    """Return a table with a row for each cell, without empty columns. A failed cell has no entries."""
    rows = []
    for cell in cells:
        entries = [] if cell.status == "failed" else [column.entry(cell) for column in columns]
        rows.append(replace(arm_row(cell, numbers, entries), notes=notes(cell)))
    return Table([(column.heading, column.meaning) for column in columns], rows, caption=caption).filled()


def arm_row(cell: ResultCell, numbers: Mapping[str, int], entries: Sequence[Entry]) -> Row:
    """Return a row of an arm, or of one of its comparisons."""
    tags = [tag for tag, holds in (("void", cell.void), ("simulated", cell.simulated is not None)) if holds]
    return Row(cell.arm, entries, numbers[cell.arm], tags=tags)


def named(table: Table, names: Mapping[str, str]) -> Table:
    """Return the table with readable names of arms, each above its id."""

    def words(text: str | None) -> str | None:
        return text and in_words(text, names)

    def named_entry(entry: Entry) -> Entry:
        verdict = entry.verdict and entry.verdict._replace(reason=in_words(entry.verdict.reason, names))
        return replace(entry, verdict=verdict, against=words(entry.against), detail=words(entry.detail))

    rows = [
        replace(
            row,
            name=names.get(row.name, row.name),
            about=row.name if row.number else "",
            group=in_words(row.group, names),
            entries=[*map(named_entry, row.entries)],
            notes=[(kind, in_words(text, names)) for kind, text in row.notes],
        )
        for row in table.rows
    ]
    columns = [(in_words(heading, names), in_words(meaning, names)) for heading, meaning in table.columns]
    brief = [in_words(heading, names) for heading in table.brief]
    return replace(table, columns=columns, rows=rows, brief=brief)


def said_once(table: Table) -> tuple[Table, list[str]]:
    """Return the table without the notes that several rows share, and these with the names of their rows."""
    rows_of: dict[tuple[str, str], list[str]] = {}
    for row in table.rows:
        for note in row.notes:
            rows_of.setdefault(note, []).append(row.name)
    once = [replace(row, notes=[note for note in row.notes if len(rows_of[note]) == 1]) for row in table.rows]
    shared = [(names, text) for (_, text), names in rows_of.items() if len(names) > 1]
    return replace(table, rows=once), [f"{few(names)}: {text}" for names, text in shared]

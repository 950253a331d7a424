"""A document in the terminal: tables that fit its width, notes, verdicts, and the first sentence last."""

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text as RichText

from mtbench.document.formatting import NONE, listed
from mtbench.document.model import Block, Document, Entry, Part, Points, Row, Table, Text, Tone, Verdict

STYLES: dict[Tone, str] = {"good": "green", "bad": "red", "plain": "yellow"}
LEAST_NAME, ONE_LINE = 16, 28  # letters of a row's name that stay on one line: at the cost of any column, of a fourth
RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
HEADING = 9  # letters of a line in a heading
LONGEST = 32  # letters of a verdict; of a longer one only its word is shown


def show(document: Document, console: Console) -> None:
    """Print the document: disclaimers, subject, the sections that are not folded, findings."""
    for renderable in rendered(document, console.width):
        console.print(renderable)


def rendered(document: Document, width: int) -> Iterator[RenderableType]:
    """Yield what the terminal shows, from top to bottom."""
    yield from (RichText(text, "bold") for text in document.marks)
    yield RichText(f"{document.title}. {document.subject}" if document.verdict is None else document.subject)
    for section in document.sections:
        if not section.folded:
            yield from _blocks(section.blocks, width, section.heading)
    yield from (RichText(warning, "bold yellow") for warning in document.warnings)
    yield RichText(document.lead)
    if document.verdict is not None:
        yield _verdict(document.verdict._replace(reason=document.title), bold=True)


def _blocks(blocks: Iterable[Block], width: int, heading: str) -> Iterator[RenderableType]:
    for block in blocks:
        match block:
            case Table():
                yield RichText()
                yield RichText(": ".join(filter(None, [heading, block.caption.partition(";")[0]])), "bold")
                yield from table_lines(block, width)
            case Points():
                for number, point in enumerate(block.points, start=1):
                    mark = f"({number})" if block.numbered else " "
                    yield _verdict(point) if isinstance(point, Verdict) else RichText(f"{mark} {point}")
            case Text(role="own" | "mark"):
                yield RichText(block.text)
            case Part(folded=False):
                yield from _blocks(block.blocks, width, f"{heading}, {block.heading[:1].lower()}{block.heading[1:]}")


def _verdict(verdict: Verdict, *, bold: bool = False) -> RichText:
    style = f"bold {STYLES[verdict.tone]}" if bold else STYLES[verdict.tone]
    return RichText.assemble((f"{verdict.sign} {verdict.word}", style), f": {verdict.reason}")


class Fit(NamedTuple):
    """The content of a table's places. detail: of the most important column."""

    detail: bool
    words: bool  # of verdicts, else their signs
    intervals: str  # all, judged: where a verdict rests on them, first: of the most important column


FITS = (Fit(True, True, "all"), *(Fit(False, words, "all") for words in (True, False)))
FITS += (Fit(False, False, "judged"), Fit(False, False, "first"))


def table_lines(table: Table, width: int) -> Iterator[RenderableType]:
    """Yield a table that fits into `width` columns, and its notes.

    If it is too wide, it shows less in each place (`FITS`); then columns are dropped from the end of `brief`.
    """
    brief = [heading for heading in table.brief or dict(table.columns) if heading in dict(table.columns)]
    table = table.only([n for n, (heading, _) in enumerate(table.columns) if heading in brief]).filled()
    notes = shared_notes(table.rows)
    names = [_name(row, table, notes) for row in table.rows]
    order = sorted(range(len(table.columns)), key=lambda place: brief.index(table.columns[place][0]))
    longest = max(map(len, names), default=0)
    for fit in FITS:
        columns = [_column(table, place, fit, first=place == order[0]) for place in range(len(table.columns))]
        if _room(columns, width) >= longest:
            break
    while len(order) > 1:
        least = min(longest, ONE_LINE if len(order) > 3 else LEAST_NAME)
        if _room([columns[place] for place in order], width) >= least:
            break
        order.pop()
    yield _framed(table, names, [columns[place] for place in sorted(order)])
    if not fit.words:
        yield from _key(table)
    for mark, note in zip(_marks(table, notes), notes, strict=True):
        yield RichText(f"{mark or f'all {table.of}s:'} {note}")


def _framed(table: Table, names: Sequence[str], columns: Sequence[Sequence[RichText]]) -> RichTable:
    framed = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    framed.add_column(table.of, overflow="fold")
    for heading, *_ in columns:
        side = "left" if table.text else "right"
        framed.add_column(heading, justify=side, no_wrap=not table.text, overflow="fold")  # type: ignore[arg-type]
    group = ""
    for number, (row, name) in enumerate(zip(table.rows, names, strict=True), start=1):
        if row.group != group:
            framed.add_row(RichText(row.group, "bold"))
        group = row.group
        framed.add_row(RichText(f"  {name}" if group else name), *(column[number] for column in columns))
    return framed


def _column(table: Table, place: int, fit: Fit, *, first: bool) -> list[RichText]:
    """Return the heading and the texts of a column. first: it is the most important one."""
    entries = [row.entries[place] if row.entries else Entry("failed" if not place else NONE) for row in table.rows]
    judged = any(entry.verdict and entry.value for entry in entries)
    intervals = first or fit.intervals == "all" or (fit.intervals == "judged" and judged)
    texts = [_entry(entry, fit.words or table.text, intervals, fit.detail and first) for entry in entries]
    widest = max((line for text in texts for line in map(len, text.plain.split("\n"))), default=0)
    heading = "\n".join(textwrap.wrap(table.columns[place][0], max(HEADING, widest))) or " "
    return [RichText(heading), *texts]


def _entry(entry: Entry, words: bool, interval: bool, detail: bool) -> RichText:
    verdict = _verdict_of(entry)
    value = " ".join(filter(None, (entry.value, entry.interval if interval else None)))
    more = f", {entry.detail}" if detail and entry.detail else ""
    if verdict is None:
        return RichText(f"{value}{more}")
    shown = verdict.sign if value and not words else f"{verdict.sign} {_short(verdict) if value else verdict.word}"
    return RichText.assemble(f"{value} " if value else "", (shown, STYLES[verdict.tone]), more)


def _verdict_of(entry: Entry) -> Verdict | None:
    """Return the verdict; none beside words, which leave no room for the baseline."""
    return None if entry.words and entry.against else entry.judged


def _key(table: Table) -> Iterator[RichText]:
    """Yield the meaning of a table's signs, if it has any."""
    key: dict[str, dict[str, None]] = {}
    for entry in (entry for row in table.rows for entry in row.entries if entry.value):
        if verdict := _verdict_of(entry):
            key.setdefault(verdict.sign, {})[_short(verdict)] = None
    if key:
        yield RichText("; ".join(f"{sign} {' or '.join(words)}" for sign, words in key.items()))


def _short(verdict: Verdict) -> str:
    """Return a verdict, without its reason if it is long."""
    return verdict.word if len(verdict.word) <= LONGEST else verdict.short or verdict.word


def _room(columns: Sequence[Sequence[RichText]], width: int) -> int:
    """Return the characters left for the names; each column has a rule and a space next to it."""
    widths = [max(len(line) for text in column for line in text.plain.split("\n")) for column in columns]
    return width - sum(widths) - 2 * len(widths) - 1


def _name(row: Row, table: Table, notes: Mapping[str, list[Row]]) -> str:
    marks = [mark for mark, rows in zip(_marks(table, notes), notes.values(), strict=True) if mark and row in rows]
    tags = [f"({listed(row.tags)})"] if row.tags else []
    return " ".join([row.name, *tags, *marks])


def _marks(table: Table, notes: Mapping[str, list[Row]]) -> list[str]:
    """Return the mark of each note; empty for a note that all of several rows have."""
    of_all = [len(rows) == len(table.rows) > 1 for rows in notes.values()]
    numbers = itertools.count(1)
    return ["" if every else str(next(numbers)).translate(RAISED) for every in of_all]


def shared_notes(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the notes with their rows. Notes that differ in numbers only are shown once."""
    alike: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        for _, note in row.notes:
            alike.setdefault(re.sub(r"[\d.,]+", "0", note), {}).setdefault(note, []).append(row)
    found = {}
    for notes in alike.values():
        first = next(iter(notes))
        found[first if len(notes) == 1 else f"for example {first}"] = [r for of_note in notes.values() for r in of_note]
    return found

"""A document in the terminal: tables that fit its width, notes, verdicts, and the first sentence last."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table as RichTable
from rich.text import Text as RichText

from mtbench.document.formatting import NONE, few, listed
from mtbench.document.model import KINDS, Block, Document, Entry, Part, Points, Row, Table, Text, Tone, Verdict

STYLES: dict[Tone, str] = {"good": "green", "bad": "red", "plain": "yellow"}
ONE_LINE = 28  # letters of a row's name that stay on one line
HEADING, WORDS = 9, 16  # letters of a line in a heading, and of words in a column


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
    yield from map(RichText, (document.lead, *filter(None, chain.from_iterable(document.steps))))
    if document.verdict is not None:
        yield _verdict(document.verdict._replace(reason=document.title), bold=True)


def _blocks(blocks: Iterable[Block], width: int, heading: str) -> Iterator[RenderableType]:
    for block in blocks:
        match block:
            case Table():
                yield RichText()
                yield RichText(": ".join(filter(None, [heading, block.caption.partition(";")[0]])), "bold")
                yield from table_lines(block, width)
                yield from map(RichText, notes_of(block.rows, block.of))
            case Points():
                for number, point in enumerate(block.points, start=1):
                    mark = f"({number})" if block.numbered else " "
                    yield _verdict(point) if isinstance(point, Verdict) else RichText(f"{mark} {point}")
            case Text(role="mark"):
                yield RichText(block.text)
            case Part(folded=False):
                yield from _blocks(block.blocks, width, f"{heading}, {block.heading[:1].lower()}{block.heading[1:]}")


def _verdict(verdict: Verdict, *, bold: bool = False) -> RichText:
    style = f"bold {STYLES[verdict.tone]}" if bold else STYLES[verdict.tone]
    return RichText.assemble((f"{verdict.sign} {verdict.word}", style), f": {verdict.reason}")


def table_lines(table: Table, width: int) -> Iterator[RenderableType]:
    """Yield a table that fits into `width` columns, and the meaning of its signs.

    If it is too wide, words wrap; then only the first column of `brief` has intervals; then columns are dropped from
    the end of `brief`.
    """
    brief = table.brief or [heading for heading, _ in table.columns]
    table = table.only([n for n, (heading, _) in enumerate(table.columns) if heading in brief]).filled()
    order = sorted(range(len(table.columns)), key=lambda place: brief.index(table.columns[place][0]))
    longest = max((len(_name(row)) for row in table.rows), default=0)
    for intervals, words in ((True, width), (True, WORDS), (False, WORDS)):
        columns = [_column(table, p, words, intervals=intervals or p == order[0]) for p in range(len(table.columns))]
        if _room(columns, width) >= longest:
            break
    while len(order) > 1 and _room([columns[place] for place in order], width) < min(longest, ONE_LINE):
        order.pop()
    yield _framed(table, [columns[place] for place in sorted(order)])
    yield from _signs(table)


def _framed(table: Table, columns: Sequence[Sequence[RichText]]) -> RichTable:
    framed = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    framed.add_column(table.of, overflow="fold")
    for heading, *_ in columns:
        side = "left" if table.text else "right"
        framed.add_column(heading, justify=side, no_wrap=not table.text, overflow="fold")  # type: ignore[arg-type]
    group = ""
    for number, row in enumerate(table.rows, start=1):
        if row.group != group:
            framed.add_row(RichText(row.group, "bold"))
        group = row.group
        framed.add_row(RichText(_name(row)), *(column[number] for column in columns))
    return framed


def _name(row: Row) -> str:
    tags = f" ({listed(row.tags)})" if row.tags else ""
    return f"{'  ' if row.group else ''}{row.name}{tags}"


def _column(table: Table, place: int, words: int, *, intervals: bool) -> list[RichText]:
    entries = [row.entries[place] if row.entries else Entry("failed" if not place else NONE) for row in table.rows]
    if not table.text:
        entries = [replace(e, value="\n".join(textwrap.wrap(e.value, words))) if e.words else e for e in entries]
    texts = [_entry(entry, interval=intervals) for entry in entries]
    widest = max((_width(text) for text in texts), default=0)
    heading = "\n".join(textwrap.wrap(table.columns[place][0], max(HEADING, widest))) or " "
    return [RichText(heading), *texts]


def _entry(entry: Entry, *, interval: bool) -> RichText:
    verdict, value = _shown_verdict(entry), entry.value
    if interval and entry.interval:
        value += f" {entry.interval}"
    if verdict is None:
        return RichText(value)
    if not value:
        return RichText(f"{verdict.sign} {verdict.word}", STYLES[verdict.tone])
    return RichText.assemble(f"{value} ", (verdict.sign, STYLES[verdict.tone]))


def _shown_verdict(entry: Entry) -> Verdict | None:
    """Return the verdict; none beside words, which leave no room for the baseline."""
    return None if entry.words and entry.against else entry.verdict


def _room(columns: Sequence[Sequence[RichText]], width: int) -> int:
    """Return the characters left for the names; each column has a rule and a space next to it."""
    widths = [max(map(_width, column)) for column in columns]
    return width - sum(widths) - 2 * len(widths) - 1


def _width(text: RichText) -> int:
    return max(map(len, text.plain.split("\n")))


def _signs(table: Table) -> Iterator[RichText]:
    """Yield the words that the signs of a table stand for, if it has any."""
    words: dict[str, dict[str, None]] = {}  # reasons by sign and word
    for entry in (entry for row in table.rows for entry in row.entries if entry.value):
        if verdict := _shown_verdict(entry):
            words.setdefault(f"{verdict.sign} {verdict.short or verdict.word}", {})[verdict.reason] = None
    if words:
        texts = (": ".join(filter(None, (word, " or ".join(filter(None, why))))) for word, why in words.items())
        yield RichText("; ".join(texts))


def notes_of(rows: Sequence[Row], of: str) -> list[str]:
    """Return each note with the names of its rows, the gravest first, without those that a warning has, too.

    Of notes that differ in numbers only, the first is an example. of: what a row is.
    """
    alike: dict[str, list[tuple[str, str]]] = {}
    found = [(KINDS.index(kind), row.name, note) for row in rows for kind, note in row.notes if kind != KINDS[0]]
    for _, name, note in sorted(found, key=lambda one: one[0]):
        alike.setdefault(re.sub(r"[\d.,]+", "0", note), []).append((name, note))
    texts = []
    for of_rows in alike.values():
        names, notes = (list(dict.fromkeys(words)) for words in zip(*of_rows, strict=True))
        whose = f"all {of}s" if len(names) == len({row.name for row in rows}) > 1 else few(names)
        texts.append(f"{whose}: {'for example ' if len(notes) > 1 else ''}{notes[0]}")
    return texts

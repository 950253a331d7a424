"""A document as Markdown: the page's content, in the same order."""

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from mtbench.document.formatting import NONE, listed
from mtbench.document.model import (
    Beside,
    Block,
    Document,
    Figure,
    Notes,
    Pairs,
    Part,
    Points,
    Row,
    Table,
    Text,
    Verdict,
)


def markdown(document: Document) -> str:
    """Return the document as a Markdown file."""
    lines = [f"# {plain(document.name)}", ""]
    first = " ".join(filter(None, [document.heading if document.marks else "", document.subject]))
    lines += [plain(first if first.endswith((".", "?", "!")) else f"{first}."), ""] if first else []
    lines += [f"**{plain(document.lead)}**", ""]
    for words, command in document.steps:
        lines += [plain(words), "", *([f"    {' '.join(command.splitlines())}", ""] if command else [])]
    lines += [line for warning in document.warnings for line in (plain(warning), "")]
    lines += [] if document.picture is None else _figure(document.picture)
    for section in document.sections:
        written = _blocks(section.blocks)
        lines += [f"## {plain(section.heading)}", "", *written] if written else []
    return "\n".join(lines)


def _blocks(blocks: Iterable[Block]) -> list[str]:
    return [line for block in blocks for line in _block(block)]


def _block(block: Block) -> list[str]:
    """Return the lines of a block, the last one empty; none for a block that only the page can show."""
    match block:
        case Table():
            return markdown_table(block) + _notes_of(block.rows)
        case Figure():
            return _figure(block)
        case Pairs():
            return [*(f"- {plain(name)}: {plain(text)}" for name, text in block.rows), ""]
        case Notes():
            return [*(f"- **{plain(name)}.** {plain(text)}" for name, text in block.rows), ""]
        case Text():
            strong = "**" if block.role == "mark" else ""
            return [f"{strong}{plain(block.text)}{strong}", ""]
        case Points():
            mark = "1." if block.numbered else "-"
            return [*(f"{mark} {_point(point)}" for point in block.points), ""]
        case Beside():
            return _blocks(block.blocks)
        case Part():
            return [f"### {plain(block.heading)}", "", *_blocks(block.blocks)]
    return []


def _point(point: str | Verdict) -> str:
    return plain(point) if isinstance(point, str) else f"{point.sign} **{point.word}**, {plain(point.reason)}"


def _figure(figure: Figure) -> list[str]:
    return [f"![{plain(figure.alt)}](figures/{figure.name}.svg)", "", f"*{plain(figure.caption)}*", ""]


def markdown_table(table: Table) -> list[str]:
    """Return the lines of a table, and an empty one."""
    numbered = any(row.number for row in table.rows)
    first = "| " if numbered else ""
    headings = " | ".join(plain(heading) for heading, _ in table.columns)
    sides = (":--|" if table.text else "--:|") * len(table.columns)
    lines = [f"{first}| {plain(table.of)} | {headings} |", f"|{'--:|' if numbered else ''}:--|{sides}"]
    for group, rows in groupby(table.rows, key=lambda row: row.group):
        if group:
            lines.append(f"{first}| **{plain(group)}** | {' | ' * (len(table.columns) - 1)} |")
        lines += [_row(row, table, numbered) for row in rows]
    return [*lines, ""]


def _row(row: Row, table: Table, numbered: bool) -> str:
    places = [plain(entry.line()) for entry in row.entries]
    if row.failed:
        places = ["failed"] + [NONE] * (len(table.columns) - 1)
    if row.tags:
        places[0] = f"**{plain(listed(row.tags))}** {places[0]}"
    if row.strong:
        places = [f"**{place}**" for place in places]
    name = f"{plain(row.name)}<br>{plain(row.about)}" if row.about not in ("", row.name) else plain(row.name)
    return f"| {f'{row.number or str()} | ' if numbered else ''}{name} | {' | '.join(places)} |"


def _notes_of(rows: Sequence[Row]) -> list[str]:
    notes = [(row, text) for row in rows for _, text in row.notes]
    lines = [f"- {f'{row.number} ' if row.number else ''}{plain(f'{row.name}: {text}')}" for row, text in notes]
    return [*lines, ""] if notes else []


def plain(text: str) -> str:
    """Return text with its Markdown signs escaped."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", text)

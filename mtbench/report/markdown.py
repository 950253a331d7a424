"""report.md: what the page says, in the same order, as Markdown."""

import re
from collections.abc import Sequence

from mtbench.document.formatting import NONE, listed
from mtbench.report.batch_sweep import Sweep
from mtbench.report.figures import Drawing
from mtbench.report.sections import Section, Words, pictured
from mtbench.report.table import Table


def markdown(sections: Sequence[Section], sweeps: Sequence[Sweep], words: Words) -> str:
    """Return report.md."""
    lines = [f"# {plain(words.title)}", "", f"{plain(words.question)} {plain(words.subject)}.", ""]
    lines += [f"**{plain(words.decision)}**", ""]
    for warning in words.warnings:
        lines += [plain(warning), ""]
    first = pictured(sections)
    if first is not None:
        lines += _figure(f"{first.slug}.{first.drawings[0].name}", first.drawings[0])
    for section in sections:
        drawings = section.drawings[1:] if section is first else section.drawings
        lines += _section(section, words.own[section.slug], drawings)
    for one in sweeps:
        lines += [f"## {plain(one.heading)}", "", *(f"- {plain(line)}" for line in one.sentences), ""]
        lines += _figure(one.slug, one.drawing)
    lines += _race(words)
    lines += ["## Environment", "", *(f"- {name}: {plain(value)}" for name, value in words.environment), ""]
    lines += ["## How to read it", "", *(f"- **{name}.** {plain(note)}" for name, note in words.method), ""]
    return "\n".join(lines)


def _race(words: Words) -> list[str]:
    lines = ["## How the race went", ""] if words.race else []
    for part in words.race:
        lines += [f"### {plain(part.heading)}", ""]
        lines += [plain(part.text), ""] if part.text else []
        lines += [*(f"- {plain(name)}: {plain(text)}" for name, text in part.rows), ""] if part.rows else []
    return lines


def _section(section: Section, own: str, drawings: Sequence[Drawing]) -> list[str]:
    lines = [f"## {plain(section.suite)}, {section.batches}", "", plain(f"{listed(section.facts)}."), ""]
    if own:
        lines += [f"**{plain(own)}**", ""]
    lines += [plain(" ".join(section.summary)), ""]
    if section.simulated:
        lines += [f"**{plain(' '.join(section.simulated))}**", ""]
    lines += _table(section.table)
    notes = [plain(f"{row.number} {row.title}: {note}") for row in section.table.rows for _, note in row.notes]
    if notes:
        lines += [*(f"- {note}" for note in notes), ""]
    for remark in section.remarks:
        lines += [plain(remark), ""]
    for detail in section.details:
        lines += [f"### {detail.heading}", "", *_table(detail.table)]
    if section.gaps:
        lines += [plain(" ".join(section.gaps)), ""]
    for drawing in drawings:
        lines += _figure(f"{section.slug}.{drawing.name}", drawing)
    return lines


def _figure(name: str, drawing: Drawing) -> list[str]:
    return [f"![{plain(drawing.alt)}](figures/{name}.svg)", "", f"*{plain(drawing.caption)}*", ""]


def _table(table: Table) -> list[str]:
    headings = " | ".join(plain(heading) for heading, _ in table.columns)
    lines = [f"| | {table.of} | {headings} |", "|--:|:--|" + "--:|" * len(table.columns)]
    for row in table.rows:
        places = [plain(entry.line()) for entry in row.entries]
        if row.failed:
            places = ["failed"] + [NONE] * (len(table.columns) - 1)
        if row.tags:
            places[0] = f"**{plain(listed(row.tags))}** {places[0]}"
        name = plain(row.arm) if row.title == row.arm else f"{plain(row.title)}<br>{plain(row.arm)}"
        lines.append(f"| {row.number or ''} | {name} | {' | '.join(places)} |")
    return [*lines, ""]


def plain(text: str) -> str:
    """Return text with its Markdown signs escaped."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", text)

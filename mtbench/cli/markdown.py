"""Markdown for the generated pages: prose that survives a Markdown parser, code, tables."""

import html
import inspect
import re
from collections.abc import Iterable, Sequence


def prose(text: str) -> str:
    """Return text, such as a docstring, in which characters of HTML and Markdown outside code are plain.

    Lines indented by four spaces are code; they get an empty line before and behind.
    """
    lines: list[str] = []
    for line in inspect.cleandoc(text).splitlines():
        is_code = line.startswith("    ")
        if lines and lines[-1] and line and is_code != lines[-1].startswith("    "):
            lines.append("")
        lines.append(line if is_code else plain(line))
    return "\n".join(lines)


def plain(line: str) -> str:
    """Return a line in which `<`, `*` and `|` outside code have no meaning.

    >>> plain("a *b* <c>, `<d>`")
    'a &#42;b&#42; &lt;c>, `<d>`'
    """
    pieces = line.split("`")
    pieces[::2] = [p.replace("<", "&lt;").replace("*", "&#42;").replace("|", "&#124;") for p in pieces[::2]]
    return "`".join(pieces)


def code(text: str) -> str:
    """Return text as code. A bar, which would end a cell of a table, is written as an entity."""
    if "|" not in text:
        return f"`{text}`"
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table. Line breaks in cells become spaces."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(' '.join(cell.split()) for cell in line)} |" for line in lines)


def anchor(heading: str) -> str:
    """Return the fragment of a heading's address."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def joined(parts: Iterable[str]) -> str:
    """Return the parts of a page with empty lines between them; an empty part is left out."""
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"

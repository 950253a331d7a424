"""What people read: one model of a document, and its renderers.

An experiment has one function, results -> `Document`. A document has a title, a first sentence (`lead`) and sections; a
section has blocks: `Table`, `Figure`, `Pairs` (facts), `Notes` (how to read it), `Text`, `Points` (a list), `Beside`
(blocks in a row) and `Part` (blocks under a heading of their own). A `Verdict` is a word with its reason and tone.

    def document(results: Results) -> Document:
        rows = [Row(arm.name, [Entry(seconds(arm.time_s), interval(bounds(arm)), arm.verdict)]) for arm in results.arms]
        table = Table([("time", "wall time of the prompt")], rows, caption="95% intervals in brackets")
        lead = f"{results.fastest} is fastest."
        return Document("How long does a prompt take?", lead, sections=[Section("Times", [table])])

    write(directory, "times", document)   # times.html (returned), times.md, figures/*.svg and *.png
    show(document, console)               # tables and verdicts in the terminal, the first sentence last

`html` and `markdown` return a document as text, `latex` a table for a paper. Every text of a document is untrusted
input: each renderer escapes it. `plots` is the common style of the figures.
"""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtbench import files

if TYPE_CHECKING:  # a renderer is imported when it is used: matplotlib and jinja2 take time, and generation lacks them
    from mtbench.document.html_page import html
    from mtbench.document.latex_table import latex
    from mtbench.document.markdown_text import markdown
    from mtbench.document.model import (
        SIGNS,
        Beside,
        Block,
        Document,
        Entry,
        Figure,
        Notes,
        Pairs,
        Part,
        Points,
        Row,
        Section,
        Table,
        Text,
        Tone,
        Verdict,
        Widget,
    )
    from mtbench.document.terminal import show

_RENDERERS = {
    "html": "html_page",
    "latex": "latex_table",
    "markdown": "markdown_text",
    "show": "terminal",
}  # name -> module

__all__ = [
    "SIGNS",
    "Beside",
    "Block",
    "Document",
    "Entry",
    "Figure",
    "Notes",
    "Pairs",
    "Part",
    "Points",
    "Row",
    "Section",
    "Table",
    "Text",
    "Tone",
    "Verdict",
    "Widget",
    "html",
    "latex",
    "markdown",
    "show",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'mtbench.document' has no attribute {name!r}")
    return getattr(importlib.import_module(f"mtbench.document.{_RENDERERS.get(name, 'model')}"), name)


def write(directory: Path, name: str, document: "Document") -> Path:
    """Write `<name>.md`, `<name>.html` and the figures' files. Return the path of the page."""
    from mtbench.document.html_page import html
    from mtbench.document.markdown_text import markdown

    for figure in document.figures():
        files.write_text(directory / f"figures/{figure.name}.svg", figure.svg)
        files.write_bytes(directory / f"figures/{figure.name}.png", figure.png)
    files.write_text(directory / f"{name}.md", markdown(document))
    page = directory / f"{name}.html"
    files.write_text(page, html(document))
    return page

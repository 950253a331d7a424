"""A document as one self-contained HTML page, without network or foreign scripts; and all files of a document."""

import base64
import hashlib
import re
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from mtbench import files
from mtbench.document import plots
from mtbench.document.markdown_text import markdown
from mtbench.document.model import Document, Figure, Row, Section, Widget

THEME = {  # the figures' colours -> the page's, so that figures follow its light and dark theme
    plots.INK: "var(--ink)",
    plots.MUTED: "var(--muted)",
    plots.RULE: "var(--rule)",
    plots.ACCENT: "var(--accent)",
    plots.PAPER: "var(--paper)",
    plots.WARN: "var(--warn)",
    plots.ON_LOW: "var(--on-low)",
    plots.ON_HIGH: "var(--on-high)",
    **{color: f"var(--shade-{i})" for i, color in enumerate(plots.SHADES)},
}


def html(document: Document) -> str:
    """Return the page."""
    widgets = [block for section in document.sections for block in section.blocks if isinstance(block, Widget)]
    return template("page.html.j2").render(document=document, widgets=widgets)


def write(directory: Path, name: str, document: Document) -> Path:
    """Write `<name>.md`, `<name>.html` and the figures' files. Return the path of the page."""
    for figure in document.figures():
        files.write_text(directory / f"figures/{figure.name}.svg", figure.svg)
        files.write_bytes(directory / f"figures/{figure.name}.png", figure.png)
    files.write_text(directory / f"{name}.md", markdown(document))
    page = directory / f"{name}.html"
    files.write_text(page, html(document))
    return page


def template(name: str, package: str = "mtbench.document") -> Template:
    """Return a template of a package's folder `page`. Values put into it are escaped; `code` becomes an element."""
    environment = Environment(
        loader=PackageLoader(package, "page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_with_code,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"sha256": _sha256_source, "inline": inline, "id": figure_id, "anchor": anchor}
    environment.filters |= {"broken": _broken, "by_group": _by_group}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment.get_template(name)


def anchor(section: Section) -> str:
    """Return the id of a section."""
    made = re.sub(r"[^a-z0-9]+", "-", section.heading.lower()).strip("-")
    return section.anchor.replace(".", "-") or made or "section"


def inline(figure: Figure) -> Markup:
    """Return a figure as part of the page: it has the page's colours, unique ids, and loads nothing."""
    prefix = figure_id(figure)
    svg = figure.bare[figure.bare.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'id="([^"]+)"', rf'id="{prefix}-\1"', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\1{prefix}-", svg).replace("xlink:href", "href")
    head, _, rest = svg.partition(">")
    box = re.search(r'viewBox="[^"]+"', head)
    svg = f'<svg {box.group(0) if box else ""} role="img" aria-labelledby="{prefix}-alt">{rest}'
    svg = re.sub(r"font(-family)?: ([^;\"]*?)'[^;\"]*", _page_font, svg)
    for color, variable in THEME.items():
        svg = svg.replace(color, variable)
    return Markup(svg)


def figure_id(figure: Figure) -> str:
    """Return the prefix of the ids in a figure."""
    return f"figure-{re.sub(r'[^A-Za-z0-9]+', '-', figure.name)}"


def _page_font(found: re.Match[str]) -> str:
    """Return `font: 700 13px 'DejaVu Sans', …` with the page's typeface in its place."""
    return f"font{found[1] or ''}: {found[2]}var(--sans)"


def _with_code(value: object) -> object:
    if type(value) is not str or "`" not in value:
        return value
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(value))))


def _broken(name: str) -> Markup:
    return Markup(re.sub(r"(?<=[:,])|(?=@)|(?<=\.)(?=[a-z])", "<wbr>", str(escape(name))))


def _by_group(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    return [(group, list(of_group)) for group, of_group in groupby(rows, key=lambda row: row.group)]


def _sha256_source(script: str) -> str:
    """Return a script's source expression in a Content-Security-Policy (W3C, CSP level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"

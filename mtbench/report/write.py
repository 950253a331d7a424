"""The last stage: report.md, report.html, tables and figures, from results.json and the stored generations.

It needs no model and no GPU, changes no measured value, and writes the same bytes from the same run.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from mtbench.records import cleaned, dump
from mtbench.report import figures, tables, text
from mtbench.report.batch_sweep import Sweep, sweep
from mtbench.report.figures import Drawing
from mtbench.report.formatting import NONE, counted, listed
from mtbench.report.generation_viewer import ITEMS, Viewer, viewer
from mtbench.report.phrases import batches, checkpoint_names, disclaimers, simulations, suite_name
from mtbench.report.summary import remarks, summary
from mtbench.report.tables import Entry, Table
from mtbench.results.comparisons import GroupKey, groups_of, own_speedups
from mtbench.results.format import ResultCell, Results
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan_checks import read_plan

LONGEST_SLUG = 80  # characters of a suite's name in a file's name
THEME = {  # the figures' colours -> the page's, so that figures follow its light and dark theme
    figures.INK: "var(--ink)",
    figures.MUTED: "var(--muted)",
    figures.RULE: "var(--rule)",
    figures.ACCENT: "var(--accent)",
    figures.PAPER: "var(--paper)",
    figures.WARN: "var(--warn)",
    figures.ON_LOW: "var(--on-low)",
    figures.ON_HIGH: "var(--on-high)",
    **{color: f"var(--shade-{i})" for i, color in enumerate(figures.SHADES)},
}


@dataclass(frozen=True, slots=True)
class Section:
    """The part of the report about one suite at one batch size, with one way of batching."""

    slug: str
    suite: str
    batch_size: int
    batching: str
    facts: list[str]
    summary: list[str]
    table: Table
    remarks: list[str]
    acceptance: Table
    tasks: Table
    cost: Table
    gaps: list[str]
    simulated: list[str]
    factors: Table
    engines: Table
    accuracies: Table
    drawings: list[Drawing]
    cells: list[ResultCell]

    @property
    def compared(self) -> bool:
        """Whether any arm has a baseline on its own checkpoint."""
        return bool(self.factors.rows)

    @property
    def headline(self) -> str:
        """The sentence of the summary that says which arms are faster."""
        return next(sentence for sentence in self.summary if sentence.startswith("On "))

    @property
    def for_papers(self) -> dict[str, Table]:
        """The tables written as LaTeX, by the end of the file's name. The main table ends with the grade."""
        last = [heading for heading, _ in self.table.columns].index("lossless")
        found = {"": self.table.first(last + 1), ".acceptance": self.acceptance, ".tasks": self.tasks}
        return {name: table for name, table in found.items() if table.rows}

    @property
    def batches(self) -> str:
        return batches(self.batch_size, self.batching)

    @property
    def anchor(self) -> str:
        """The section's id in the page."""
        return self.slug.replace(".", "-")


@dataclass(frozen=True, slots=True)
class Words:
    """What the page and the Markdown say around the sections."""

    title: str
    subject: str
    summary: list[str]
    own: dict[str, str]  # summary of each section that does not repeat the report's
    environment: list[tuple[str, str]]
    method: list[tuple[str, str]]


def write_report(run: RunDirectory, results: Results) -> Path:
    """Write report.md, report.html, tables and figures. Return the path of report.html."""
    plan, results = read_plan(run), cleaned(results)
    arms = dict.fromkeys(cell.arm for cell in results.cells)
    numbers = {arm: number for number, arm in enumerate(arms, start=1)}
    sections, sweeps = _sections(results, numbers), _sweeps(results, numbers)
    for section in sections:
        for name, table in section.for_papers.items():
            run.write_text(f"tables/{section.slug}{name}.tex", _latex(section, table))
        for drawing in section.drawings:
            _write_drawing(run, f"{section.slug}.{drawing.name}", drawing)
    for swept in sweeps:
        _write_drawing(run, swept.slug, swept.drawing)
    words = _words(results, sections)
    run.write_text("report.md", _markdown(sections, sweeps, words))
    run.write_text("report.html", _page(sections, sweeps, words, viewer(run, plan, results, numbers)))
    return run.path / "report.html"


def _write_drawing(run: RunDirectory, name: str, drawing: Drawing) -> None:
    run.write_text(f"figures/{name}.svg", drawing.svg)
    run.write_bytes(f"figures/{name}.png", drawing.png)


def _sections(results: Results, numbers: Mapping[str, int]) -> list[Section]:
    sections: list[Section] = []
    for group, cells in groups_of(results.cells).items():
        slug = _unique(_slug(group.suite, group.batching, f"b{group.batch_size}"), [s.slug for s in sections])
        sections.append(_section(slug, group, cells, results, numbers))
    return sections


def _section(
    slug: str, group: GroupKey, cells: list[ResultCell], results: Results, numbers: Mapping[str, int]
) -> Section:
    own, suite = own_speedups(cells), suite_name(group.suite)
    margin = results.statistics.accuracy_margin
    sound = [cell for cell in cells if cell.status != "failed"]
    return Section(
        slug=slug,
        suite=suite,
        batch_size=group.batch_size,
        batching=group.batching,
        facts=text.facts(cells),
        summary=summary(cells, own.same, suite, batches(group.batch_size, group.batching), margin),
        table=tables.main_table(cells, numbers, own),
        remarks=remarks(cells, own.same),
        acceptance=tables.acceptance_table(cells, numbers),
        tasks=tables.task_table(cells, numbers, own),
        cost=tables.cost_table(cells, numbers),
        gaps=tables.gaps(cells),
        simulated=simulations(cells),
        factors=tables.factor_table(cells, numbers, own),
        engines=tables.engine_table(cells, numbers),
        accuracies=tables.accuracy_table(cells, numbers),
        drawings=figures.draw(figures.Scene(sound, numbers, own.same, _figure_note(cells, results))),
        cells=cells,
    )


def _sweeps(results: Results, numbers: Mapping[str, int]) -> list[Sweep]:
    """Return the sweep of each suite and way of batching that ran at enough batch sizes."""
    sweeps: list[Sweep] = []
    for suite, batching in dict.fromkeys((entry.suite, entry.batching) for entry in results.stops_paying):
        cells = [c for c in results.cells if (c.suite, c.batching) == (suite, batching)]
        entries = [e for e in results.stops_paying if (e.suite, e.batching) == (suite, batching)]
        slug = _unique(_slug(suite, batching, "batch-sizes"), [s.slug for s in sweeps])
        heading = f"{suite_name(suite)}, over batch sizes"
        if batching != "static":
            heading += f", {batching}"
        found = sweep(slug, heading, cells, entries, numbers, _figure_note(cells, results))
        if found is not None:
            sweeps.append(found)
    return sweeps


def _slug(suite: str, batching: str, end: str) -> str:
    """Return the name of a section's files."""
    name = re.sub(r"[^A-Za-z0-9-]+", "_", suite_name(suite))[:LONGEST_SLUG]
    return f"{name}.{end}" if batching == "static" else f"{name}.{batching}.{end}"


def _unique(slug: str, others: Sequence[str]) -> str:
    return f"{slug}_{len(others)}" if slug in others else slug


def _figure_note(cells: Sequence[ResultCell], results: Results) -> str:
    """Return the note in every figure: what the cells are not, or which run they are of."""
    return ". ".join(disclaimers(cells)) or f"mtbench, run {results.run_id}"


def _words(results: Results, sections: Sequence[Section]) -> Words:
    lead = ["Nothing was run."]
    if sections:
        first = _headline(sections)
        others = [section for section in sections if section is not first and section.compared]
        lead = [*first.summary, *(section.headline for section in others)]
    return Words(
        title=text.title(results),
        subject=_subject(sections),
        summary=lead,
        own={section.slug: _own_summary(section, sections) for section in sections},
        environment=text.environment(results),
        method=text.method_notes(results),
    )


def _subject(sections: Sequence[Section]) -> str:
    """Return what was compared, on what."""
    cells = [cell for section in sections for cell in section.cells]
    suites = listed(dict.fromkeys(section.suite for section in sections))
    sizes = dict.fromkeys(section.batch_size for section in sections)
    noun = "batch size" if len(sizes) == 1 else "batch sizes"
    arms = counted(len({cell.arm for cell in cells}), "arm")
    return f"{arms} on {suites}, checkpoints {checkpoint_names(cells)}, {noun} {listed(sizes)}"


def _headline(sections: Sequence[Section]) -> Section:
    """Return the section that the page starts with: the first suite's largest batch, which has all its items."""
    of_first = (s for s in sections if s.suite == sections[0].suite)
    return max(of_first, key=lambda s: (s.batch_size, s.batching == "static"))


def _own_summary(section: Section, sections: Sequence[Section]) -> str:
    """Return a section's summary; none if the report starts with it and it is the only one, or compares nothing."""
    repeated = section is _headline(sections) and (len(sections) == 1 or not section.compared)
    return "" if repeated else " ".join(section.summary)


def _page(sections: Sequence[Section], sweeps: Sequence[Sweep], words: Words, data: Viewer) -> str:
    drawn = {s.slug: [(d, inline(d, f"{s.anchor}-{d.name}")) for d in s.drawings] for s in sections}
    return template("report.html.j2").render(
        sections=sections,
        drawn=drawn,
        sweeps=[(s, inline(s.drawing, s.slug.replace(".", "-"))) for s in sweeps],
        viewer=dump(data),
        most_items=ITEMS,
        shades=range(len(figures.SHADES)),
        light=figures.SHADES,
        title=words.title,
        subject=words.subject,
        summary=words.summary,
        own=words.own,
        environment=words.environment,
        method=words.method,
    )


def template(name: str) -> Template:
    """Return a page of mtbench/report/page/; every value put into it is escaped."""
    environment = Environment(
        loader=PackageLoader("mtbench.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = _sha256_source
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment.get_template(name)


def _sha256_source(script: str) -> str:
    """Return a script's source expression in a Content-Security-Policy (W3C, CSP level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def inline(drawing: Drawing, prefix: str) -> Markup:
    """Return a figure as part of the page: it has the page's colours, unique ids, and loads nothing."""
    svg = drawing.svg[drawing.svg.index("<svg") :]
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


def _page_font(found: re.Match[str]) -> str:
    """Return `font: 700 13px 'DejaVu Sans', …` with the page's typeface in its place."""
    return f"font{found[1] or ''}: {found[2]}var(--sans)"


def _markdown(sections: Sequence[Section], sweeps: Sequence[Sweep], words: Words) -> str:
    lines = [f"# {plain(words.title)}", "", plain(f"{words.subject}."), "", plain(" ".join(words.summary)), ""]
    for section in sections:
        lines += _markdown_section(section, words.own[section.slug])
    for one in sweeps:
        lines += [f"## {plain(one.heading)}", "", *(f"- {plain(line)}" for line in one.sentences), ""]
        lines += _markdown_figure(one.slug, one.drawing)
    lines += ["## Environment", "", *(f"- {name}: {plain(value)}" for name, value in words.environment), ""]
    lines += ["## How to read it", "", *(f"- **{name}.** {plain(note)}" for name, note in words.method), ""]
    return "\n".join(lines)


def _markdown_section(section: Section, own_summary: str) -> list[str]:
    lines = [f"## {plain(section.suite)}, {section.batches}", "", plain(f"{listed(section.facts)}."), ""]
    if own_summary:
        lines += [plain(own_summary), ""]
    if section.simulated:
        lines += [f"**{plain(' '.join(section.simulated))}**", ""]
    lines += _markdown_table(section.table)
    notes = [plain(f"{row.number} {row.arm}: {note}") for row in section.table.rows for _, note in row.notes]
    if notes:
        lines += [*(f"- {note}" for note in notes), ""]
    for remark in section.remarks:
        lines += [plain(remark), ""]
    for drawing in section.drawings:
        lines += _markdown_figure(f"{section.slug}.{drawing.name}", drawing)
    for heading, table in (
        ("By task", section.tasks),
        ("Acceptance", section.acceptance),
        ("Factors of the speedup", section.factors),
        ("Speedup over another engine", section.engines),
        ("Accuracy, compared on the same items", section.accuracies),
        ("Cost of the measurement", section.cost),
    ):
        if table.rows:
            lines += [f"### {heading}", "", *_markdown_table(table)]
    if section.gaps:
        lines += [plain(" ".join(section.gaps)), ""]
    return lines


def _markdown_figure(name: str, drawing: Drawing) -> list[str]:
    return [f"![{plain(drawing.alt)}](figures/{name}.svg)", "", f"*{plain(drawing.caption)}*", ""]


def _markdown_table(table: Table) -> list[str]:
    headings = " | ".join(plain(heading) for heading, _ in table.columns)
    lines = [f"| | {table.of} | {headings} |", "|--:|:--|" + "--:|" * len(table.columns)]
    for row in table.rows:
        places = [plain(entry.line()) for entry in row.entries]
        if row.failed:
            places = ["failed"] + [NONE] * (len(table.columns) - 1)
        if row.tags:
            places[0] = f"**{plain(listed(row.tags))}** {places[0]}"
        lines.append(f"| {row.number or ''} | {plain(row.arm)} | {' | '.join(places)} |")
    return [*lines, ""]


def plain(text: str) -> str:
    """Return text with its Markdown signs escaped."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|\[\]])", r"\\\1", text)


def _latex(section: Section, table: Table) -> str:
    """Return a table for a paper; it needs the package booktabs."""
    columns = [heading for heading, _ in table.columns]
    lines = [
        f"% {_tex(section.suite)}, {section.batches}. {_tex(listed(section.facts))}.",
        *(f"% {_tex(sentence)}" for sentence in section.summary),
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        "\\toprule",
        " & ".join([table.of, *map(_tex, columns)]) + " \\\\",
        "\\midrule",
    ]
    for row in table.rows:
        if row.failed:
            reason = _tex(row.notes[0][1])
            lines.append(f"{_tex(row.arm)} & \\multicolumn{{{len(columns)}}}{{l}}{{{reason}}} \\\\")
            continue
        arm = _tex(row.arm) + "".join(f"\\,({_tex(tag)})" for tag in row.tags)
        lines.append(" & ".join([arm, *map(_latex_entry, row.entries)]) + " \\\\")
    for disclaimer in disclaimers(section.cells):
        lines.append(f"\\midrule\n\\multicolumn{{{len(columns) + 1}}}{{l}}{{{_tex(disclaimer)}}} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _latex_entry(entry: Entry) -> str:
    value = f"{entry.value} {entry.interval}" if entry.interval else entry.value
    if entry.detail:
        value = f"{value}, {entry.detail}"
    if entry.verdict:
        value = f"{value} ({entry.verdict})"
    return _tex(value)


def _tex(text: str) -> str:
    """Return text with its LaTeX signs escaped."""
    text = text.replace("\\", "\\textbackslash ")
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    for sign, written in (("~", "\\textasciitilde "), ("^", "\\textasciicircum "), ("×", "$\\times$"), ("–", "--")):
        text = text.replace(sign, written)
    return text.replace("≈", "$\\approx$").replace("−", "$-$").replace("\n", " ")

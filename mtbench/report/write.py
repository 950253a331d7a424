"""The last stage: report.md, report.html, tables and figures, from results.json and the stored generations.

Needs no model and no GPU, changes nothing that was measured, and writes the same bytes from the same run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from mtbench.report import figures, tables, terminal, text
from mtbench.report.batch_sweep import Sweep, sweep
from mtbench.report.figures import Drawing
from mtbench.report.formatting import NONE
from mtbench.report.generation_viewer import ITEMS, suite_name, viewer
from mtbench.report.tables import Cell, Table
from mtbench.report.terminal import batches, disclaimers, simulations
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan import read_plan

THEME = {  # the figures' colours, as the page's, so that they follow its light and dark
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
    """What is said of one suite at one batch size, with one way of batching."""

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
    cells: list[Cell]

    @property
    def compared(self) -> bool:
        """Whether any arm has a baseline on its own checkpoint."""
        return bool(self.factors.rows)

    @property
    def for_papers(self) -> dict[str, Table]:
        """What of a file's name -> the tables that go into papers; of the main one, what is claimed."""
        last = [heading for heading, _ in self.table.columns].index("lossless")
        found = {"": self.table.first(last + 1), ".acceptance": self.acceptance, ".tasks": self.tasks}
        return {name: table for name, table in found.items() if table.rows}

    @property
    def batches(self) -> str:
        return batches(self.batch_size, self.batching)

    @property
    def anchor(self) -> str:
        """An id for the page."""
        return self.slug.replace(".", "-")


def write_report(run: RunDirectory, results: Mapping[str, Any]) -> Path:
    """Write everything people look at; the path of report.html."""
    plan = read_plan(run)
    numbers = {arm: i for i, arm in enumerate(dict.fromkeys(c["arm"] for c in results["cells"]), start=1)}
    sections, sweeps = _sections(results, numbers), _sweeps(results, numbers)
    for section in sections:
        for name, table in section.for_papers.items():
            run.write_text(f"tables/{section.slug}{name}.tex", _latex(section, table))
        for drawing in section.drawings:
            run.write_text(f"figures/{section.slug}.{drawing.name}.svg", drawing.svg)
            run.write_bytes(f"figures/{section.slug}.{drawing.name}.png", drawing.png)
    for swept in sweeps:
        run.write_text(f"figures/{swept.slug}.svg", swept.drawing.svg)
        run.write_bytes(f"figures/{swept.slug}.png", swept.drawing.png)
    lead = _headline(sections).summary if sections else ["Nothing was run."]
    said = {
        "title": text.title(results),
        "subject": _subject(sections),
        "summary": lead,
        "own": {section.slug: _own_words(section, sections, lead) for section in sections},
        "environment": text.environment(results),
        "method": text.method_notes(results),
    }
    run.write_text("report.md", _markdown(sections, sweeps, said))
    page = _page(sections, sweeps, said, viewer(run, plan, results, numbers))
    run.write_text("report.html", page)
    return run.path / "report.html"


def _sections(results: Mapping[str, Any], numbers: Mapping[str, int]) -> list[Section]:
    sections: list[Section] = []
    margin = results["statistics"]["accuracy_margin"]
    for (suite, batch_size, batching), cells in terminal.sections(results["cells"]).items():
        on = {c["arm"]: c["on"] for c in cells}
        compared = [(c, s) for c in cells for s in c["speedup"] if s["baseline"] in on and not s.get("includes_engine")]
        own = {c["arm"]: s for c, s in compared if on[s["baseline"]] == c["on"]}
        deployed = {c["arm"]: s for c, s in compared if on[s["baseline"]] != c["on"]}
        shown = suite_name(suite)
        slug = f"{_file_name(shown)}.{'' if batching == 'static' else f'{batching}.'}b{batch_size}"
        slug += f"_{len(sections)}" if any(s.slug == slug for s in sections) else ""
        note = ". ".join(disclaimers(cells)) or f"mtbench, run {results['run_id']}"
        sections.append(
            Section(
                slug=slug,
                suite=shown,
                batch_size=batch_size,
                batching=batching,
                facts=text.facts(cells),
                summary=text.summary(cells, own, shown, batches(batch_size, batching), margin),
                table=tables.main_table(cells, numbers, own, deployed),
                remarks=text.remarks(cells, own),
                acceptance=tables.acceptance_table(cells, numbers),
                tasks=tables.task_table(cells, numbers, own),
                cost=tables.cost_table(cells, numbers),
                gaps=tables.gaps(cells),
                simulated=simulations(cells),
                factors=tables.factor_table(cells, numbers, own),
                engines=tables.engine_table(cells, numbers),
                accuracies=tables.accuracy_table(cells, numbers),
                drawings=figures.draw(cells, numbers, own, note),
                cells=cells,
            )
        )
    return sections


def _sweeps(results: Mapping[str, Any], numbers: Mapping[str, int]) -> list[Sweep]:
    """One for each suite and way of batching that ran at enough batch sizes."""
    drawn: list[Sweep] = []
    for suite, batching in dict.fromkeys((s["suite"], s["batching"]) for s in results["stops_paying"]):
        cells = [c for c in results["cells"] if (c["suite"], c["batching"]) == (suite, batching)]
        entries = [s for s in results["stops_paying"] if (s["suite"], s["batching"]) == (suite, batching)]
        note = ". ".join(disclaimers(cells)) or f"mtbench, run {results['run_id']}"
        slug = f"{_file_name(suite_name(suite))}.{'' if batching == 'static' else f'{batching}.'}batch-sizes"
        slug += f"_{len(drawn)}" if any(s.slug == slug for s in drawn) else ""
        found = sweep(slug, suite_name(suite), batching, cells, entries, numbers, note)
        drawn += [found] if found else []
    return drawn


def _file_name(suite: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]+", "_", suite)


def _subject(sections: Sequence[Section]) -> str:
    cells = [cell for section in sections for cell in section.cells]
    suites = ", ".join(dict.fromkeys(section.suite for section in sections))
    families = ", ".join(dict.fromkeys(cell["family"] for cell in cells))
    sizes = list(dict.fromkeys(str(section.batch_size) for section in sections))
    batch = f"batch size{'' if len(sizes) == 1 else 's'} {', '.join(sizes)}"
    arms = len({cell["arm"] for cell in cells})
    return f"{arms} arm{'' if arms == 1 else 's'} on {suites}, checkpoints {families}, {batch}"


def _headline(sections: Sequence[Section]) -> Section:
    """The section the page's first sentences are about: the first suite's largest batch, which has all its items."""
    of_first = (s for s in sections if s.suite == sections[0].suite)
    return max(of_first, key=lambda s: (s.batch_size, s.batching == "static"))


def _own_words(section: Section, sections: Sequence[Section], lead: Sequence[str]) -> str:
    """A section's summary; none if the report opens with it and it is the only one, or compares nothing."""
    repeated = section.summary == lead and (len(sections) == 1 or not section.compared)
    return "" if repeated else " ".join(section.summary)


def _page(
    sections: Sequence[Section], sweeps: Sequence[Sweep], said: Mapping[str, Any], data: Mapping[str, Any]
) -> str:
    drawn = {s.slug: [(d, inline(d, f"{s.anchor}-{d.name}")) for d in s.drawings] for s in sections}
    swept = [(s, inline(s.drawing, s.slug.replace(".", "-"))) for s in sweeps]
    return template("report.html.j2").render(
        sections=sections,
        drawn=drawn,
        sweeps=swept,
        viewer=data,
        most_items=ITEMS,
        shades=range(len(figures.SHADES)),
        light=figures.SHADES,
        **said,
    )


def template(name: str) -> Template:
    """One of the pages of mtbench/report/page/; what is put into it is escaped."""
    environment = Environment(
        loader=PackageLoader("mtbench.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment.get_template(name)


def inline(drawing: Drawing, prefix: str) -> Markup:
    """A figure as part of the page: its colours follow the theme, its ids cannot clash, it asks for nothing."""
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
    """`font: 700 13px 'DejaVu Sans', …` with the page's typeface instead."""
    return f"font{found[1] or ''}: {found[2]}var(--sans)"


def _markdown(sections: Sequence[Section], sweeps: Sequence[Sweep], said: Mapping[str, Any]) -> str:
    lines = [f"# {said['title']}", "", f"{said['subject']}.", "", " ".join(said["summary"]), ""]
    for section in sections:
        lines += [f"## {section.suite}, {section.batches}", ""]
        lines += [", ".join(section.facts) + ".", ""]
        lines += [said["own"][section.slug], ""] * bool(said["own"][section.slug])
        lines += [f"**{plain(' '.join(section.simulated))}**", ""] * bool(section.simulated)
        lines += _markdown_table(section.table)
        notes = [(row, text) for row in section.table.rows for _, text in row.notes]
        lines += [f"- {plain(f'{row.number} {row.arm}: {text}')}" for row, text in notes] + [""] * bool(notes)
        for remark in section.remarks:
            lines += [plain(remark), ""]
        for drawing in section.drawings:
            source = f"figures/{section.slug}.{drawing.name}.svg"
            lines += [f"![{plain(drawing.alt)}]({source})", "", f"*{plain(drawing.caption)}*", ""]
        for heading, table in (
            ("By task", section.tasks),
            ("Acceptance", section.acceptance),
            ("Where the speedup went", section.factors),
            ("Over another engine", section.engines),
            ("Accuracy, compared on the same items", section.accuracies),
            ("Cost and conduct", section.cost),
        ):
            if table.rows:
                lines += [f"### {heading}", "", *_markdown_table(table)]
        lines += [plain(" ".join(section.gaps)), ""] * bool(section.gaps)
    for one in sweeps:
        lines += [f"## {one.heading}", "", *(f"- {plain(said_of)}" for said_of in one.sentences), ""]
        lines += [f"![{plain(one.drawing.alt)}](figures/{one.slug}.svg)", "", f"*{plain(one.drawing.caption)}*", ""]
    lines += ["## Environment", "", *(f"- {name}: {plain(value)}" for name, value in said["environment"]), ""]
    lines += ["## How to read it", "", *(f"- **{name}.** {text}" for name, text in said["method"]), ""]
    return "\n".join(lines)


def _markdown_table(table: Table) -> list[str]:
    lines = [f"| | {table.of} | " + " | ".join(plain(heading) for heading, _ in table.columns) + " |"]
    lines.append("|--:|:--|" + "--:|" * len(table.columns))
    for row in table.rows:
        places = [plain(entry.line()) for entry in row.entries]
        if row.failed:
            places = ["failed"] + [NONE] * (len(table.columns) - 1)
        if row.tags:
            places[0] = f"**{', '.join(row.tags)}** {places[0]}"
        lines.append(f"| {row.number or ''} | {plain(row.arm)} | " + " | ".join(places) + " |")
    return [*lines, ""]


def plain(text: str) -> str:
    """Text that Markdown takes for text."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\`*_|])", r"\\\1", text)


def _latex(section: Section, table: Table) -> str:
    """A table for a paper; needs booktabs."""
    columns = [heading for heading, _ in table.columns]
    lines = [
        f"% {section.suite}, {section.batches}. {', '.join(section.facts)}.",
        *(f"% {text}" for text in section.summary),
        f"\\begin{{tabular}}{{l{'r' * len(columns)}}}",
        "\\toprule",
        " & ".join([table.of, *map(_tex, columns)]) + " \\\\",
        "\\midrule",
    ]
    for row in table.rows:
        if row.failed:
            lines.append(f"{_tex(row.arm)} & \\multicolumn{{{len(columns)}}}{{l}}{{{_tex(row.notes[0][1])}}} \\\\")
            continue
        places = []
        for entry in row.entries:
            value = _tex(", ".join(filter(None, (f"{entry.value} {entry.interval or ''}".strip(), entry.detail))))
            places.append(f"{value} {_tex(f'({entry.verdict})')}" if entry.verdict else value)
        tags = "".join(f"\\,({tag})" for tag in row.tags)
        lines.append(" & ".join([_tex(row.arm) + tags, *places]) + " \\\\")
    for said in disclaimers(section.cells):
        lines.append(f"\\midrule\n\\multicolumn{{{len(columns) + 1}}}{{l}}{{{_tex(said)}}} \\\\")
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _tex(text: str) -> str:
    text = text.replace("\\", "\\textbackslash ")
    text = re.sub(r"([&%$#_{}])", r"\\\1", text)
    for sign, written in (("~", "\\textasciitilde "), ("^", "\\textasciicircum "), ("×", "$\\times$"), ("–", "--")):
        text = text.replace(sign, written)
    return text.replace("≈", "$\\approx$").replace("−", "$-$").replace("\n", " ")

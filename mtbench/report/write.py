"""The last stage: report.md, report.html, tables and figures, from results.json and the stored generations.

It needs no model and no GPU, changes no measured value, and writes the same bytes from the same run.
"""

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from mtbench.document.formatting import listed
from mtbench.records import cleaned, dump
from mtbench.report import figures, text
from mtbench.report.acceptance_table import acceptance_table
from mtbench.report.accuracy_tables import accuracy_table, task_table
from mtbench.report.arm_names import in_words
from mtbench.report.batch_sweep import Sweep, sweep
from mtbench.report.cost_tables import cost_table, gaps, latency_table
from mtbench.report.csv_tables import csv_tables
from mtbench.report.decided import decided, read_decision
from mtbench.report.figures import Drawing
from mtbench.report.generation_viewer import ITEMS, Viewer, viewer
from mtbench.report.latex import latex
from mtbench.report.main_table import main_table
from mtbench.report.markdown import markdown
from mtbench.report.phrases import batches, checkpoint_names, disclaimers, simulations, suite_name
from mtbench.report.race import race_parts
from mtbench.report.sections import Detail, Naming, Section, Words, pictured
from mtbench.report.speed_tables import engine_table, factor_table, speed_table
from mtbench.report.summary import remarks, summary, warnings
from mtbench.results.comparisons import GroupKey, OwnSpeedups, groups_of, own_speedups
from mtbench.results.decision_format import Decision
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


def write_report(run: RunDirectory, results: Results) -> Path:
    """Write report.md, report.html, tables and figures. Return the path of report.html."""
    plan, results, decision = read_plan(run), cleaned(results), read_decision(run)
    naming = Naming.of(results.cells)
    sections, sweeps = _sections(results, naming), _sweeps(results, naming)
    for section in sections:
        for name, (caption, table) in section.for_papers.items():
            label = f"{section.slug}{name}"
            run.write_text(f"tables/{label}.tex", latex(table, caption, label, _paper_notes(section)))
        for name, written in section.csv.items():
            run.write_text(f"tables/{section.slug}{name}.csv", written)
        for drawing in section.drawings:
            _write_drawing(run, f"{section.slug}.{drawing.name}", drawing)
    for swept in sweeps:
        _write_drawing(run, swept.slug, swept.drawing)
    words = _words(results, None if decision is None else cleaned(decision), sections, naming)
    run.write_text("report.md", markdown(sections, sweeps, words))
    run.write_text("report.html", _page(sections, sweeps, words, viewer(run, plan, results, *naming)))
    return run.path / "report.html"


def _write_drawing(run: RunDirectory, name: str, drawing: Drawing) -> None:
    run.write_text(f"figures/{name}.svg", drawing.svg)
    run.write_bytes(f"figures/{name}.png", drawing.png)


def _sections(results: Results, naming: Naming) -> list[Section]:
    sections: list[Section] = []
    for group, cells in groups_of(results.cells).items():
        slug = _unique(_slug(group.suite, group.batching, f"b{group.batch_size}"), [s.slug for s in sections])
        sections.append(_section(slug, group, cells, results, naming))
    return sections


def _section(slug: str, group: GroupKey, cells: list[ResultCell], results: Results, naming: Naming) -> Section:
    own, suite = own_speedups(cells), suite_name(group.suite)
    margin, price, numbers = results.statistics.accuracy_margin, results.price_per_hour, naming.numbers
    main = main_table(cells, numbers, own, price).named(naming.words)
    details = [detail._replace(table=detail.table.named(naming.words)) for detail in _details(cells, numbers, own)]
    by_heading = {detail.heading: detail for detail in details}
    last = [heading for heading, _ in main.columns].index("lossless")
    of_paper = {"": Detail("Methods", "What each arm gains and what it costs", main.first(last + 1))}
    of_paper |= {".acceptance": by_heading["Acceptance"], ".tasks": by_heading["By task"]}
    place = f"{suite}, {batches(group.batch_size, group.batching)}"
    sound = [cell for cell in cells if cell.status != "failed"]
    note = source(cells, results, group)
    scene = figures.Scene(sound, numbers, own.same, note, own.headline, naming.words)
    said = summary(cells, own.headline, suite, batches(group.batch_size, group.batching), margin)
    return Section(
        slug=slug,
        suite=suite,
        batch_size=group.batch_size,
        batching=group.batching,
        facts=text.facts(cells),
        summary=[in_words(sentence, naming.words) for sentence in said],
        table=main,
        remarks=[in_words(remark, naming.words) for remark in remarks(cells, own.same)],
        details=[detail for detail in details if detail.table.rows],
        gaps=[in_words(gap, naming.words) for gap in gaps(cells)],
        simulated=[in_words(mark, naming.words) for mark in simulations(cells)],
        for_papers={
            name: (f"{of.heading}: {place}. {of.caption}.", of.table) for name, of in of_paper.items() if of.table.rows
        },
        csv=csv_tables(cells, own.headline, naming.words, price),
        drawings=figures.draw(scene),
        note=note,
        cells=cells,
    )


def _details(cells: list[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> list[Detail]:
    """Return the tables behind the main table, in the order of the page. Those that a run lacks are empty."""
    return [
        Detail(
            "Accuracy compared",
            "Paired differences on the same items, one row for each arm and baseline",
            accuracy_table(cells, numbers),
            open=True,
        ),
        Detail(
            "By task",
            "Speedup, tokens per forward and acceptance rate, and accuracy if the suite is scored; for a baseline, "
            "tokens per second instead of a speedup",
            task_table(cells, numbers, own),
        ),
        Detail(
            "Acceptance",
            "Our figures, and those of other projects by their own formulas, from the same commits",
            acceptance_table(cells, numbers),
        ),
        Detail("Speed", "Rates, and speedups over each kind of baseline", speed_table(cells, numbers, own)),
        Detail(
            "Latency, answers and memory",
            "Times of a request, how answers ended, and what they took",
            latency_table(cells, numbers),
        ),
        Detail(
            "Factors of the speedup",
            "Factors over the baseline on the same checkpoint; the rate ratio is the product of the first five",
            factor_table(cells, numbers, own),
        ),
        Detail(
            "Speedup over another engine",
            "These ratios include the gain of the engine; plain decoding on the arm's own engine shows how large that "
            "gain is",
            engine_table(cells, numbers),
        ),
        Detail(
            "Cost of the measurement",
            "Time, memory and disturbances of each arm's measurement",
            cost_table(cells, numbers),
        ),
    ]


def _sweeps(results: Results, naming: Naming) -> list[Sweep]:
    """Return the sweep of each suite and way of batching that ran at enough batch sizes."""
    sweeps: list[Sweep] = []
    for suite, batching in dict.fromkeys((entry.suite, entry.batching) for entry in results.stops_paying):
        cells = [c for c in results.cells if (c.suite, c.batching) == (suite, batching)]
        entries = [e for e in results.stops_paying if (e.suite, e.batching) == (suite, batching)]
        slug = _unique(_slug(suite, batching, "batch-sizes"), [s.slug for s in sweeps])
        heading = f"{suite_name(suite)}, over batch sizes"
        if batching != "static":
            heading += f", {batching}"
        found = sweep(slug, heading, cells, entries, naming.numbers, source(cells, results), naming.words)
        if found is not None:
            sweeps.append(found)
    return sweeps


def _slug(suite: str, batching: str, end: str) -> str:
    """Return the name of a section's files."""
    name = re.sub(r"[^A-Za-z0-9-]+", "_", suite_name(suite))[:LONGEST_SLUG]
    return f"{name}.{end}" if batching == "static" else f"{name}.{batching}.{end}"


def _unique(slug: str, others: Sequence[str]) -> str:
    return f"{slug}_{len(others)}" if slug in others else slug


def source(cells: Sequence[ResultCell], results: Results, group: GroupKey | None = None) -> str:
    """Return the source that every figure names, since figures leave the page: what ran, on what, and what it is not.

    group: of which the cells are; None: of several.
    """
    suites = listed(dict.fromkeys(suite_name(cell.suite) for cell in cells))
    sizes = None if group is None else batches(group.batch_size, group.batching)
    known = [suites, sizes, checkpoint_names(cells), text.machine(results), f"mtbench run {results.run_id}"]
    return ". ".join([*disclaimers(cells), f"Source: {listed(part for part in known if part)}"])


def _words(results: Results, decision: Decision | None, sections: Sequence[Section], naming: Naming) -> Words:
    headline, texts, _ = decided(results, decision)
    several = len(sections) > 1
    return Words(
        title=text.title(results),
        disclaimers=disclaimers(results.cells),
        question=text.question(results.cells),
        subject=text.subject(results),
        decision=in_words(headline, naming.words) if sections else "Nothing was run.",
        warnings=[in_words(warning, naming.words) for warning in warnings(results.cells)],
        own={s.slug: in_words(texts.get(s.key, ""), naming.words) if several else "" for s in sections},
        race=race_parts(results, decision, naming.words),
        environment=text.environment(results),
        method=text.method_notes(results),
    )


def _paper_notes(section: Section) -> list[str]:
    """Return the notes below a table for a paper."""
    return [f"{listed(section.facts)}.", "95% intervals in brackets.", f"{section.note}."]


def _page(sections: Sequence[Section], sweeps: Sequence[Sweep], words: Words, data: Viewer) -> str:
    drawn = {s.slug: [(d, inline(d, f"{s.anchor}-{d.name}")) for d in s.drawings] for s in sections}
    first = pictured(sections)
    picture = None if first is None else (first, *drawn[first.slug].pop(0))
    return template("report.html.j2").render(
        sections=sections,
        drawn=drawn,
        picture=picture,
        sweeps=[(s, inline(s.drawing, s.slug.replace(".", "-"))) for s in sweeps],
        viewer=dump(data),
        most_items=ITEMS,
        shades=range(len(figures.SHADES)),
        light=figures.SHADES,
        words=words,
    )


def template(name: str) -> Template:
    """Return a page of mtbench/report/page/; every value put into it is escaped, and `code` becomes an element."""
    environment = Environment(
        loader=PackageLoader("mtbench.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_with_code,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sha256"] = _sha256_source
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False}
    return environment.get_template(name)


def _with_code(value: object) -> object:
    if type(value) is not str or "`" not in value:
        return value
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(value))))


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

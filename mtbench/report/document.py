"""The last stage: report.md, report.html, tables and figures, from results.json and the stored generations.

It needs no model and no GPU, changes no measured value, and writes the same bytes from the same run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from mtbench import document as documents
from mtbench.document import Beside, Block, Document, Figure, Notes, Pairs, Part, Points, Section, Table, Text, Widget
from mtbench.document.formatting import listed
from mtbench.document.html_page import template
from mtbench.records import cleaned, dump
from mtbench.report import figures, text
from mtbench.report.acceptance_table import acceptance_table
from mtbench.report.accuracy_tables import accuracy_table, task_table
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.arm_table import named
from mtbench.report.batch_sweep import Sweep, sweep
from mtbench.report.cost_tables import cost_table, gaps, latency_table
from mtbench.report.csv_tables import csv_tables
from mtbench.report.decided import decided, read_decision
from mtbench.report.generation_viewer import ITEMS, viewer
from mtbench.report.main_table import main_table
from mtbench.report.phrases import batches, checkpoint_names, disclaimers, simulations, suite_name
from mtbench.report.race import race_parts
from mtbench.report.speed_tables import engine_table, factor_table, speed_table
from mtbench.report.summary import remarks, summary, warnings
from mtbench.results.comparisons import GroupKey, OwnSpeedups, groups_of, own_speedups
from mtbench.results.decision_format import Decision
from mtbench.results.format import ResultCell, Results
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan_checks import read_plan

LONGEST_SLUG = 80  # characters of a suite's name in a file's name
MAIN = "95% intervals in brackets. Bars: speedup on a log scale; the upright line is 1."
PAPER = {  # tables for papers by the end of the file's name: heading here, and caption there
    "": ("Methods", "What each arm gains and what it costs"),
    ".acceptance": ("Acceptance", ""),
    ".tasks": ("By task", ""),
}


class Naming(NamedTuple):
    """How people read an arm: its number in the tables and its words, by its id."""

    numbers: dict[str, int]
    words: dict[str, str]

    @classmethod
    def of(cls, cells: Sequence[ResultCell]) -> "Naming":
        arms = dict.fromkeys(cell.arm for cell in cells)
        return cls({arm: number for number, arm in enumerate(arms, start=1)}, arm_names(cells))


@dataclass(frozen=True, slots=True)
class Group:
    """What is shown of one suite at one batch size, with one way of batching."""

    key: GroupKey
    slug: str
    cells: list[ResultCell]
    own: OwnSpeedups
    main: Table
    details: Mapping[str, Table]  # by heading
    figures: list[Figure]
    note: str  # its source, and what it is not

    @property
    def place(self) -> str:
        return f"{suite_name(self.key.suite)}, {batches(self.key.batch_size, self.key.batching)}"


def write_report(run: RunDirectory, results: Results) -> Path:
    """Write report.md, report.html, tables and figures. Return the path of report.html."""
    results, decision = cleaned(results), read_decision(run)
    naming = Naming.of(results.cells)
    groups = _groups(results, naming)
    for group in groups:
        for end, table in _paper_tables(group).items():
            label = f"{group.slug}{end}"
            notes = [f"{listed(text.facts(group.cells))}.", "95% intervals in brackets.", f"{group.note}."]
            run.write_text(f"tables/{label}.tex", documents.latex(table, label, notes))
        of_group = csv_tables(group.cells, group.own.headline, naming.words, results.price_per_hour)
        for end, written in of_group.items():
            run.write_text(f"tables/{group.slug}{end}.csv", written)
    shown = document(
        results, None if decision is None else cleaned(decision), groups, naming, _viewer(run, results, naming)
    )
    return documents.write(run.path, "report", shown)


def document(
    results: Results, decision: Decision | None, groups: Sequence[Group], naming: Naming, generations: Widget
) -> Document:
    """Return what a run shows."""
    headline, texts, _ = decided(results, decision)
    first = _pictured(groups)
    picture = first.figures[0] if first else None
    margin, cells = results.statistics.accuracy_margin, results.cells
    sections = [
        _section(group, texts.get(group.key, "") if len(groups) > 1 else "", picture, margin, naming)
        for group in groups
    ]
    sections += [
        Section(s.heading, [Points(s.sentences), Beside([s.drawing])], anchor=_anchor(s.slug))
        for s in _sweeps(results, naming)
    ]
    race = [
        Part(
            part.heading,
            [
                *([Text(part.text)] if part.text else []),
                *([Pairs(part.rows, [name for name, _ in part.rows] if part.code else ())] if part.rows else []),
            ],
            folded=False,
        )
        for part in race_parts(results, decision, naming.words)
    ]
    return Document(
        title=text.question(cells),
        lead=in_words(headline, naming.words) if groups else "Nothing was run.",
        subject=text.subject(results),
        marks=disclaimers(cells),
        warnings=[in_words(warning, naming.words) for warning in warnings(cells)],
        picture=picture,
        source="`results.json`; rebuild with `mtbench report DIR`",
        sections=[
            *sections,
            *([Section("How the race went", race, folded=True, anchor="race")] if race else []),
            Section("Generations", [generations], folded=True),
            Section("Environment", [Pairs(text.environment(results), {"Command"})], folded=True),
            Section("How to read it", [Notes(text.method_notes(results))], folded=True, anchor="reading"),
        ],
    )


def _section(group: Group, own: str, picture: Figure | None, margin: float, naming: Naming) -> Section:
    """Return the section of a group. own: what to use here, if the decision covers several groups."""

    def words(sentences: Sequence[str]) -> list[str]:
        return [in_words(sentence, naming.words) for sentence in sentences]

    cells, key = group.cells, group.key
    in_short = summary(cells, group.own.headline, suite_name(key.suite), batches(key.batch_size, key.batching), margin)
    texts = [
        ("facts", " · ".join(text.facts(cells))),
        ("own", *words([own])),
        ("", " ".join(words(in_short))),
        ("mark", " ".join(words(simulations(cells)))),
    ]
    blocks: list[Block] = [Text(said, role) for role, said in texts if said]
    blocks.append(group.main)
    lacking = [Text(" ".join(words(gaps(cells))), "facts")] if gaps(cells) else []
    tables = [(heading, table) for heading, table in group.details.items() if table.rows]
    for heading, table in tables:
        of_part: list[Block] = [table, *(lacking if heading == tables[-1][0] else [])]
        blocks.append(Part(heading, of_part, open=heading == "Accuracy compared"))
    said = [Text(remark, "remark") for remark in words(remarks(cells, group.own.same))]
    drawn = [figure for figure in group.figures if figure is not picture]
    blocks += [Part("Remarks", said)] if said else []
    blocks += [Part("Figures", [Beside(drawn)])] if drawn else []
    return Section(group.place, blocks, anchor=_anchor(group.slug), link=group.place.replace("batch size", "batch"))


def _groups(results: Results, naming: Naming) -> list[Group]:
    groups: list[Group] = []
    for key, cells in groups_of(results.cells).items():
        slug = _unique(_slug(key.suite, key.batching, f"b{key.batch_size}"), [group.slug for group in groups])
        own, note = own_speedups(cells), source(cells, results, key)
        main = named(main_table(cells, naming.numbers, own, results.price_per_hour), naming.words)
        sound = [cell for cell in cells if cell.status != "failed"]
        drawn = figures.draw(figures.Scene(sound, naming.numbers, own.same, note, own.headline, naming.words))
        groups.append(
            Group(
                key,
                slug,
                cells,
                own,
                replace(main, caption=MAIN, leading=True),
                {heading: named(table, naming.words) for heading, table in _details(cells, naming.numbers, own)},
                [replace(figure, name=f"{slug}.{figure.name}") for figure in drawn],
                note,
            )
        )
    return groups


def _details(cells: list[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> list[tuple[str, Table]]:
    """Return the tables behind the main table, in the order of the page. Those that a run lacks are empty."""
    tables = [
        (
            "Accuracy compared",
            accuracy_table(cells, numbers),
            "Paired differences on the same items, one row for each arm and baseline",
        ),
        (
            "By task",
            task_table(cells, numbers, own),
            "Speedup, tokens per forward and acceptance rate, and accuracy if the suite is scored; for a baseline, "
            "tokens per second instead of a speedup",
        ),
        (
            "Acceptance",
            acceptance_table(cells, numbers),
            "Our figures, and those of other projects by their own formulas, from the same commits",
        ),
        ("Speed", speed_table(cells, numbers, own), "Rates, and speedups over each kind of baseline"),
        (
            "Latency, answers and memory",
            latency_table(cells, numbers),
            "Times of a request, how answers ended, and what they took",
        ),
        (
            "Factors of the speedup",
            factor_table(cells, numbers, own),
            "Factors over the baseline on the same checkpoint; the rate ratio is the product of the first five",
        ),
        (
            "Speedup over another engine",
            engine_table(cells, numbers),
            "These ratios include the gain of the engine; plain decoding on the arm's own engine shows how large that "
            "gain is",
        ),
        (
            "Cost of the measurement",
            cost_table(cells, numbers),
            "Time, memory and disturbances of each arm's measurement",
        ),
    ]
    return [(heading, replace(table, caption=caption)) for heading, table, caption in tables]


def _paper_tables(group: Group) -> dict[str, Table]:
    """Return the tables for papers, by the end of their file's name."""
    last = [heading for heading, _ in group.main.columns].index("lossless")
    found = {}
    for end, (heading, caption) in PAPER.items():
        table = group.details[heading] if heading in group.details else group.main.only(range(last + 1))
        said = f"{heading}: {group.place}. {caption or table.caption}."
        found[end] = replace(table, caption=said)
    return {end: table for end, table in found.items() if table.rows}


def _pictured(groups: Sequence[Group]) -> Group | None:
    """Return the group whose first figure the page starts with; None if nothing is drawn.

    That is the first suite's largest batch, which has all items, among those with speedups.
    """
    of_first = [group for group in groups if group.key.suite == groups[0].key.suite and group.figures]
    with_speedups = [group for group in of_first if group.figures[0].name.endswith(figures.SPEEDUPS)]
    return max(with_speedups or of_first, key=lambda g: (g.key.batch_size, g.key.batching == "static"), default=None)


def _viewer(run: RunDirectory, results: Results, naming: Naming) -> Widget:
    """Return the generations, which only the page shows."""
    data = dump(viewer(run, read_plan(run), results, *naming))
    page = resources.files("mtbench.report") / "page"
    script, style = ((page / f"viewer.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    return Widget(template("viewer.html.j2", "mtbench.report").render(viewer=data, most_items=ITEMS), script, style)


def _anchor(slug: str) -> str:
    return slug.replace(".", "-")


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

"""The last stage: report.md, report.html, tables and figures, from results.json and the stored generations.

It needs no model and no GPU, changes no measured value, and writes the same bytes from the same run.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from mtbench.document.formatting import listed
from mtbench.document.html_page import template, write
from mtbench.document.latex_table import latex
from mtbench.document.model import (
    Beside,
    Block,
    Document,
    Figure,
    Notes,
    Pairs,
    Part,
    Points,
    Section,
    Table,
    Text,
    Widget,
)
from mtbench.plan.run import Run
from mtbench.records import cleaned, dump
from mtbench.report import figures, text
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.arm_table import named, said_once
from mtbench.report.detail_tables import detail_tables
from mtbench.report.generation_viewer import ITEMS, viewer
from mtbench.report.main_table import main_table
from mtbench.report.phrases import batches, checkpoint_names, disclaimers, fewer_items, simulations, suite_name
from mtbench.report.publication import publication_section
from mtbench.report.race import race_parts, steps
from mtbench.report.summary import decided, over_batch_sizes, read_decision, summary, warnings
from mtbench.results.comparisons import GroupKey, OwnSpeedups, groups_of, own_speedups
from mtbench.results.decision_format import Decision
from mtbench.results.format import ResultCell, Results

LONGEST_SLUG = 80  # characters of a suite's name in a file's name
SIZES_NEEDED = 3  # batch sizes of a sweep


class Naming(NamedTuple):
    """The names of arms, by id: number in the tables, and readable name."""

    numbers: dict[str, int]
    words: dict[str, str]

    @classmethod
    def of(cls, cells: Sequence[ResultCell]) -> "Naming":
        arms = dict.fromkeys(cell.arm for cell in sorted(cells, key=text.has_begun, reverse=True))
        return cls({arm: number for number, arm in enumerate(arms, start=1)}, arm_names(cells))

    def texts(self, sentences: Sequence[str]) -> list[str]:
        """Return sentences with readable names of arms."""
        return [in_words(sentence, self.words) for sentence in sentences]


@dataclass(frozen=True, slots=True)
class Group:
    """The content for one suite at one batch size, with one way of batching."""

    key: GroupKey
    slug: str
    cells: list[ResultCell]
    own: OwnSpeedups
    main: Table
    details: Mapping[str, Table]  # by heading
    figures: list[Figure]
    note: str  # its source and limits
    not_begun: list[str]  # arms without an answer, in sentences

    @property
    def place(self) -> str:
        return f"{suite_name(self.key.suite)}, {batches(self.key.batch_size, self.key.batching)}"


def write_report(run: Run, results: Results) -> Path:
    """Write report.md, report.html, tables and figures. Return the path of report.html."""
    results, decision = cleaned(results), read_decision(run.directory)
    naming = Naming.of(results.cells)
    groups = _groups(results, naming)
    for group in groups:
        last = [heading for heading, _ in group.main.columns].index("lossless")
        caption = f"Methods: {group.place}. What each arm gains and what it costs."
        table = replace(group.main.only(range(last + 1)), caption=caption)
        notes = [f"{listed(text.facts(group.cells))}.", "95% intervals in brackets.", f"{group.note}."]
        run.directory.write_text(f"tables/{group.slug}.tex", latex(table, group.slug, notes))
    shown = document(results, decision and cleaned(decision), groups, naming, _viewer(run, results, naming))
    return write(run.directory.path, "report", shown)


def document(
    results: Results, decision: Decision | None, groups: Sequence[Group], naming: Naming, generations: Widget
) -> Document:
    """Return the document of a run."""
    found = decided(results, decision)
    picture = _picture(groups)
    cells = results.cells
    sections = [_section(group, found.beside.get(group.key, ""), picture, naming) for group in groups]
    todo = [] if decision is None else steps(decision, "DIR")
    race = [] if decision is None else race_parts(results, decision, naming.words)
    records = text.training_records(cells)
    facts = [*text.environment(results), *((name, text.training_cost(file)) for name, file in records.items())]
    environment = Pairs(facts, {"Command"}, {name: file.as_uri() for name, file in records.items()})
    return Document(
        title=text.question(cells),
        lead=in_words(found.headline, naming.words) if groups else "Nothing was run.",
        open=found.open,
        steps=[(in_words(words, naming.words), command) for words, command in todo],
        subject=text.subject(results),
        marks=disclaimers(cells),
        warnings=naming.texts(warnings(cells, decision)),
        picture=picture,
        source="`results.json`; rebuild with `mtbench report DIR`",
        sections=[
            *sections,
            *([] if results.publication is None else [publication_section(results.publication)]),
            *_sweeps(results, naming),
            *([Section("How the race went", race, folded=True, anchor="race")] if race else []),
            Section("Generations", [generations], folded=True),
            Section("Environment", [environment], folded=True),
            Section("How to read it", [Notes(text.method_notes(results))], folded=True, anchor="reading"),
        ],
    )


def _section(group: Group, own: str, picture: Figure | None, naming: Naming) -> Section:
    """Return the section of a group. own: what the decision says of it beside the first sentence."""
    cells = group.cells
    in_short = summary(cells, group.own.headline, group.place.replace(", ", " at ", 1))
    texts = [
        ("facts", " · ".join(text.facts(cells))),
        ("", *naming.texts([own])),
        ("", " ".join(naming.texts(in_short))),
        ("mark", " ".join(naming.texts(simulations(cells)))),
    ]
    main, notes = said_once(group.main)
    blocks: list[Block] = [Text(line, role) for role, line in texts if line]
    blocks += [main, *(Text(note, "remark") for note in [*notes, *naming.texts(group.not_begun)])]
    blocks += [Part(name, [table], open=name == "Accuracy compared") for name, table in group.details.items()]
    remarks = [*(f"{fact[:1].upper()}{fact[1:]}." for fact in fewer_items(cells)), *text.gaps(cells)]
    marked = [Text(remark, "remark") for remark in naming.texts(remarks)]
    drawn = [figure for figure in group.figures if figure is not picture]
    blocks += [Part("Remarks", marked)] if marked else []
    blocks += [Part("Figures", [Beside(drawn)])] if drawn else []
    return Section(group.place, blocks, anchor=group.slug, link=group.place.replace("batch size", "batch"))


def _groups(results: Results, naming: Naming) -> list[Group]:
    groups: list[Group] = []
    for key, planned in groups_of(results.cells).items():
        cells = [*filter(text.has_begun, planned)]
        if not cells:
            continue
        slug = _unique(_slug(key.suite, key.batching, f"b{key.batch_size}"), [group.slug for group in groups])
        own, note = own_speedups(cells), source(cells, results, key)
        sound = [cell for cell in cells if cell.status != "failed"]
        drawn = figures.draw(figures.Scene(sound, naming.numbers, own.headline, note, naming.words))
        details = detail_tables(cells, naming.numbers, own)
        groups.append(
            Group(
                key,
                slug,
                cells,
                own,
                named(main_table(cells, naming.numbers, own), naming.words),
                {heading: named(table, naming.words) for heading, table in details.items()},
                [replace(figure, name=f"{slug}.{figure.name}") for figure in drawn],
                note,
                text.not_begun(planned),
            )
        )
    return groups


def _picture(groups: Sequence[Group]) -> Figure | None:
    """Return the speedups of the first suite's largest batch, which has all items; the page starts with them."""
    drawn = [group for group in groups if group.figures and group.figures[0].name.endswith(figures.SPEEDUPS)]
    of_first = [group for group in drawn if group.key.suite == groups[0].key.suite]
    by_size = sorted(of_first, key=lambda g: (g.key.batch_size, g.key.batching == "static"))
    return by_size[-1].figures[0] if by_size else None


def _viewer(run: Run, results: Results, naming: Naming) -> Widget:
    """Return the generations, which only the page shows."""
    data = dump(viewer(run, results, *naming))
    page = resources.files("mtbench.report") / "page"
    script, style = ((page / f"viewer.{kind}").read_text(encoding="utf-8") for kind in ("js", "css"))
    return Widget(template("viewer.html.j2", "mtbench.report").render(viewer=data, most_items=ITEMS), script, style)


def _sweeps(results: Results, naming: Naming) -> list[Section]:
    """Return a section for each suite and way of batching that ran at enough batch sizes.

    The figure shows only baselines on the arms' own checkpoints if there are any, so that each arm has one curve.
    """
    sections, slugs = list[Section](), list[str]()
    for suite, batching in dict.fromkeys((entry.suite, entry.batching) for entry in results.stops_paying):
        cells = [c for c in results.cells if (c.suite, c.batching) == (suite, batching)]
        references, roles = {cell.arm for cell in cells if cell.reference}, {cell.arm: cell.on for cell in cells}
        of_group = [e for e in results.stops_paying if (e.suite, e.batching) == (suite, batching)]
        swept = [e for e in of_group if len(e.swept) >= SIZES_NEEDED and e.arm not in references]
        if not swept:
            continue
        slug = _unique(_slug(suite, batching, "batch-sizes"), slugs)
        slugs.append(slug)
        heading = f"{suite_name(suite)}, over batch sizes{'' if batching == 'static' else f', {batching}'}"
        scene = figures.Scene(cells, naming.numbers, {}, source(cells, results), naming.words)
        drawing = figures.sweep(scene, [e for e in swept if roles[e.arm] == roles[e.baseline]] or swept, slug)
        sentences = Points(naming.texts([over_batch_sizes(entry) for entry in swept]))
        sections.append(Section(heading, [sentences, Beside([drawing])], anchor=slug))
    return sections


def _slug(suite: str, batching: str, end: str) -> str:
    name = re.sub(r"[^A-Za-z0-9-]+", "_", suite_name(suite))[:LONGEST_SLUG]
    return f"{name}.{end}" if batching == "static" else f"{name}.{batching}.{end}"


def _unique(slug: str, others: Sequence[str]) -> str:
    return f"{slug}_{len(others)}" if slug in others else slug


def source(cells: Sequence[ResultCell], results: Results, group: GroupKey | None = None) -> str:
    """Return the source that every figure names, since figures leave the page: run, machine and limits.

    group: of which the cells are; None: of several.
    """
    suites = listed(dict.fromkeys(suite_name(cell.suite) for cell in cells))
    sizes = None if group is None else batches(group.batch_size, group.batching)
    known = [suites, sizes, checkpoint_names(cells), text.machine(results), f"mtbench run {results.run_id}"]
    return ". ".join([*disclaimers(cells), f"Source: {listed(part for part in known if part)}"])

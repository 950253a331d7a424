"""What `mtbench import` shows: a row per meaning of a figure, a column per imported result and per cell of ours.

The meanings that several tools or we have come first, then those of each tool. Figures share a row only if they have
the same meaning. A table has at most four columns of values, so that it fits in 80 characters; further results follow
in further tables.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from mtbench.document.formatting import NONE, count, counted, number
from mtbench.document.model import Document, Entry, Points, Row, Section, Table
from mtbench.results.imports.format import Imported, ImportedResult, OurCell

COLUMNS = 4
COUNTS = ("requests", "drafts", "count")  # units of whole numbers
SHARED = "Same definition"
HOW_TO_READ = (
    "Each figure is its tool's own, by the definition below. Figures of two columns can be compared only within a row; "
    "the machines, prompts and loads may still differ. mtbench forms no ratio and no verdict with them."
)
OUR_COUNTS = (
    "Ours: the figure of a cell by the same formula. Our answers are cut at the end token; a tool that counts tokens "
    "accepted after it gets a larger figure."
)


class _Meaning(NamedTuple):
    """A meaning: its names, each with its tool, its unit and definition, and the values by column."""

    names: dict[tuple[str, str], None]  # tool and name, in order
    unit: str
    definition: str
    ours: str | None
    values: dict[str, float]

    @property
    def title(self) -> str:
        """The names, with their tools where there are several."""
        return " = ".join(f"{tool}: {name}" if len(self.names) > 1 else name for tool, name in self.names)


def imported_document(imported: Imported) -> Document:
    """Return the tables and definitions. All texts are untrusted; the renderers escape them."""
    ours = [f"{column}: {_our(cell)}" for column, cell in _our_columns(imported).items()]
    results = [
        Points([*map(_described, imported.results)], numbered=True),
        Points([*ours, *([OUR_COUNTS] if ours else [])]),
    ]
    sections = [Section("Results", results)]
    for group, rows in _groups(imported).items():
        definitions = Points([f"{row.title}, {row.unit}: {_definition(row)}" for row in rows])
        sections.append(Section(group, [*_tables(imported, rows), definitions]))
    subject = counted(len(imported.results), "result")
    return Document("Results of other tools", HOW_TO_READ, subject, sections)


def _described(result: ImportedResult) -> str:
    tool = f"{result.tool} {result.version}" if result.version else f"{result.tool}, version not recorded"
    words = [result.file, tool, *filter(None, (result.model, result.part))]
    return "; ".join([*words, *(f"{name}: {value}" for name, value in result.settings.items())])


def _our(cell: OurCell) -> str:
    simulated = "; simulated weights or acceptance" if cell.simulated else ""
    return f"mtbench, {cell.run}; {cell.suite}; {cell.arm}; batch size {cell.batch_size}{simulated}"


def _our_columns(imported: Imported) -> dict[str, OurCell]:
    return {f"ours {place}": cell for place, cell in enumerate(imported.beside, start=1)}


def _groups(imported: Imported) -> dict[str, list[_Meaning]]:
    """Return the meanings: first those of several tools or of ours, then those of each tool, in its order."""
    rows: dict[str, _Meaning] = {}
    for column, result in enumerate(imported.results, start=1):
        for figure in result.figures:
            row = rows.setdefault(figure.meaning, _Meaning({}, figure.unit, figure.definition, figure.ours, {}))
            row.names[result.tool, figure.name] = None
            row.values[str(column)] = figure.value
    shared = {ours.meaning for cell in imported.beside for ours in cell.figures}
    for our_column, cell in _our_columns(imported).items():
        for ours in cell.figures:
            rows[ours.meaning].values[our_column] = ours.value
    groups: dict[str, list[_Meaning]] = {SHARED: []}
    for meaning, row in rows.items():
        tools = {tool for tool, _ in row.names}
        group = SHARED if len(tools) > 1 or meaning in shared else next(iter(tools))
        groups.setdefault(group, []).append(row)
    return {group: found for group, found in groups.items() if found}


def _tables(imported: Imported, rows: Sequence[_Meaning]) -> Iterator[Table]:
    """Yield the tables of a group: the columns that have a value in it, some at a time."""
    every = [*map(str, range(1, len(imported.results) + 1)), *_our_columns(imported)]
    columns = [column for column in every if any(column in row.values for row in rows)]
    for first in range(0, len(columns), COLUMNS):
        some = columns[first : first + COLUMNS]
        shown = [
            Row(row.title, [Entry(row.unit), *(Entry(_shown(row.values.get(column), row.unit)) for column in some)])
            for row in rows
            if any(column in row.values for column in some)
        ]
        yield Table([("unit", ""), *((column, "") for column in some)], shown, of="figure")


def _shown(value: float | None, unit: str) -> str:
    """Return a value with as many digits as the tools print: two decimals, more for what is near zero."""
    if value is None:
        return NONE
    if unit in COUNTS and value.is_integer():
        return count(int(value))
    if value == 0 or abs(value) >= 1:
        return number(value, 2)
    return number(value, 4) if abs(value) >= 1e-3 else f"{value:.3g}"


def _definition(row: _Meaning) -> str:
    return f"{row.definition} Ours: {row.ours}." if row.ours else row.definition

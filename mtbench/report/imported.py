"""The tables of `mtbench import`: a row per meaning of a figure, a column per imported result and per cell of ours.

The terminal and Markdown show the same tables: one for the meanings that several tools or we have, and one for each
tool. Figures share a row only if they have the same meaning. A table has at most four columns of values, so that it
fits in 80 characters; further results follow in further tables.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mtbench.document.formatting import NONE, count, counted, number
from mtbench.imports.format import Imported, ImportedResult, OurCell, PairedSamples

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


class _Row(NamedTuple):
    """A meaning: its names, each with its tool, its unit and definition, and the values by column."""

    names: dict[tuple[str, str], None]  # tool and name, in order
    unit: str
    definition: str
    ours: str | None
    values: dict[str, float]


class _Part(NamedTuple):
    """A table: rows of one group, and the columns that it shows."""

    group: str
    columns: Sequence[str]
    rows: Sequence[_Row]


def imported_blocks(imported: Imported) -> Iterator[RenderableType]:
    """Yield what the terminal shows, from top to bottom. A string is a line with names, which must not be wrapped."""
    yield from _results(imported)
    for part in _tables(imported):
        yield ""
        yield Text(part.group, style="bold")
        yield _table(part)
    yield from (line for pair in imported.paired_samples for line in ("", _pair(pair)))
    yield ""
    yield Text(HOW_TO_READ)
    if imported.beside:
        yield Text(OUR_COUNTS)
    for group, rows in _groups(imported).items():
        yield ""
        yield Text(group, style="bold")
        for row in rows:
            yield Text.assemble((_title(row), "italic"), f", {row.unit}: {_definition(row)}")


def imported_markdown(imported: Imported) -> str:
    """Return the same as a Markdown page."""
    lines = ["# Results of other tools", "", HOW_TO_READ, ""]
    lines += [OUR_COUNTS, ""] if imported.beside else []
    lines += [f"- {_escaped(line)}" for line in _results(imported)]
    for part in _tables(imported):
        lines += ["", f"## {_escaped(part.group)}", ""]
        lines += [f"| figure | unit | {' | '.join(part.columns)} |", f"|---|---|{'---:|' * len(part.columns)}"]
        for row in part.rows:
            cells = [_title(row), row.unit, *_values(row, part.columns)]
            lines.append(f"| {' | '.join(map(_escaped, cells))} |")
    lines += [line for pair in imported.paired_samples for line in ("", _escaped(_pair(pair)))]
    lines += ["", "## Definitions"]
    for group, rows in _groups(imported).items():
        lines += ["", f"### {_escaped(group)}", ""]
        lines += [f"- {_escaped(f'{_title(row)}, {row.unit}: {_definition(row)}')}" for row in rows]
    return "\n".join(lines) + "\n"


def _results(imported: Imported) -> Iterator[str]:
    """Yield what each column is."""
    for place, result in enumerate(imported.results, start=1):
        yield f"{place}: {_described(result)}"
    for column, cell in zip(_our_columns(imported), imported.beside, strict=True):
        yield f"{column}: {_our(cell)}"


def _described(result: ImportedResult) -> str:
    tool = f"{result.tool} {result.version}" if result.version else f"{result.tool}, version not recorded"
    words = [result.file, tool, *filter(None, (result.model, result.part))]
    return "; ".join([*words, *(f"{name}: {value}" for name, value in result.settings.items())])


def _our(cell: OurCell) -> str:
    simulated = "; simulated weights or acceptance" if cell.simulated else ""
    return f"mtbench, {cell.run}; {cell.suite}; {cell.arm}; batch size {cell.batch_size}{simulated}"


def _our_columns(imported: Imported) -> list[str]:
    return [f"ours {place}" for place in range(1, len(imported.beside) + 1)]


def _groups(imported: Imported) -> dict[str, list[_Row]]:
    """Return a row per meaning: first those of several tools or of ours, then those of each tool, in its order."""
    rows: dict[str, _Row] = {}
    for column, result in enumerate(imported.results, start=1):
        for figure in result.figures:
            row = rows.setdefault(figure.meaning, _Row({}, figure.unit, figure.definition, figure.ours, {}))
            row.names[result.tool, figure.name] = None
            row.values[str(column)] = figure.value
    shared = {ours.meaning for cell in imported.beside for ours in cell.figures}
    for our_column, cell in zip(_our_columns(imported), imported.beside, strict=True):
        for ours in cell.figures:
            rows[ours.meaning].values[our_column] = ours.value
    groups: dict[str, list[_Row]] = {SHARED: []}
    for meaning, row in rows.items():
        tools = {tool for tool, _ in row.names}
        group = SHARED if len(tools) > 1 or meaning in shared else next(iter(tools))
        groups.setdefault(group, []).append(row)
    return {group: found for group, found in groups.items() if found}


def _tables(imported: Imported) -> Iterator[_Part]:
    """Yield the tables: of each group, the columns that have a value in it, some at a time."""
    every = [*map(str, range(1, len(imported.results) + 1)), *_our_columns(imported)]
    for group, rows in _groups(imported).items():
        columns = [column for column in every if any(column in row.values for row in rows)]
        for first in range(0, len(columns), COLUMNS):
            some = columns[first : first + COLUMNS]
            yield _Part(group, some, [row for row in rows if any(column in row.values for column in some)])


def _table(part: _Part) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("figure", overflow="fold")
    table.add_column("unit", overflow="fold")
    for column in part.columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    for row in part.rows:
        table.add_row(*map(Text, ("\n".join(_labels(row)), row.unit, *_values(row, part.columns))))
    return table


def _values(row: _Row, columns: Sequence[str]) -> list[str]:
    return [_shown(row.values[column], row.unit) if column in row.values else NONE for column in columns]


def _shown(value: float, unit: str) -> str:
    """Return a value with as many digits as the tools print: two decimals, more for what is near zero."""
    if unit in COUNTS and value.is_integer():
        return count(int(value))
    if value == 0 or abs(value) >= 1:
        return number(value, 2)
    return number(value, 4) if abs(value) >= 1e-3 else f"{value:.3g}"


def _labels(row: _Row) -> list[str]:
    """Return the names of a row, with their tools where there are several names."""
    return [f"{tool}: {name}" if len(row.names) > 1 else name for tool, name in row.names]


def _title(row: _Row) -> str:
    return " = ".join(_labels(row))


def _definition(row: _Row) -> str:
    return f"{row.definition} Ours: {row.ours}." if row.ours else row.definition


def _pair(pair: PairedSamples) -> str:
    about = f"samples of {pair.first} and {pair.second}, {pair.metric}"
    if not pair.items:
        return f"{about}: no item in common"
    return (
        f"{about}: {counted(pair.items, 'item')} in both; mean {number(pair.mean_first, 4)} and "
        f"{number(pair.mean_second, 4)}; higher in {pair.first}: {pair.higher_first}, in {pair.second}: "
        f"{pair.higher_second}"
    )


def _escaped(text: str) -> str:
    """Return an untrusted text so that Markdown shows it as it is."""
    return "".join(f"\\{character}" if character in "\\|<>`*_[]" else character for character in text)

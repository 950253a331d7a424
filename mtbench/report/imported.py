"""The tables of `mtbench import`: a row per meaning of a figure, a column per imported result and per cell of ours.

The terminal and Markdown show the same tables. Figures share a row only if they have the same meaning. A table has at
most six columns of values; further results follow in further tables.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mtbench.imports.format import Imported, ImportedResult, OurCell, PairedSamples
from mtbench.report.formatting import NONE, counted, number

COLUMNS = 6
HOW_TO_READ = (
    "Each figure is its tool's own, by the definition below. Figures of two columns can be compared only within a row; "
    "the machines, prompts and loads may still differ. mtbench forms no ratio and no verdict with them."
)
OUR_COUNTS = (
    "Ours: the figure of a cell by the same formula. Our answers are cut at the end token; a tool that counts tokens "
    "accepted after it gets a larger figure."
)


class _Row(NamedTuple):
    """A meaning: its names in the tools, its unit and definition, and the values by column."""

    names: tuple[str, ...]
    unit: str
    definition: str
    ours: str | None
    values: dict[str, float]


def imported_blocks(imported: Imported) -> Iterator[RenderableType]:
    """Yield what the terminal shows, from top to bottom. A string is a line with names, which must not be wrapped."""
    yield from _results(imported)
    for columns, rows in _tables(imported):
        yield ""
        yield _table(columns, rows)
    yield from (line for pair in imported.paired_samples for line in ("", _pair(pair)))
    yield ""
    yield Text(HOW_TO_READ)
    if imported.beside:
        yield Text(OUR_COUNTS)
    yield ""
    for row in _rows(imported):
        yield Text.assemble((_name(row), "bold"), f", {row.unit}: {_definition(row)}")


def imported_markdown(imported: Imported) -> str:
    """Return the same as a Markdown page."""
    lines = ["# Results of other tools", "", HOW_TO_READ, ""]
    lines += [OUR_COUNTS, ""] if imported.beside else []
    lines += [f"- {_escaped(line)}" for line in _results(imported)]
    for columns, rows in _tables(imported):
        lines += ["", f"| figure | unit | {' | '.join(columns)} |", f"|---|---|{'---:|' * len(columns)}"]
        lines += [
            f"| {_escaped(_name(row))} | {_escaped(row.unit)} | {' | '.join(_values(row, columns))} |" for row in rows
        ]
    lines += [line for pair in imported.paired_samples for line in ("", _escaped(_pair(pair)))]
    lines += ["", "## Definitions", ""]
    lines += [
        f"- **{_escaped(_name(row))}**, {_escaped(row.unit)}: {_escaped(_definition(row))}" for row in _rows(imported)
    ]
    return "\n".join(lines) + "\n"


def _results(imported: Imported) -> Iterator[str]:
    """Yield what each column is."""
    for column, result in enumerate(imported.results, start=1):
        yield f"{column}: {_described(result)}"
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


def _rows(imported: Imported) -> list[_Row]:
    """Return a row per meaning: first those of several tools or of ours, then the others in the tools' order."""
    rows: dict[str, _Row] = {}
    tools: dict[str, set[str]] = {}
    for column, result in enumerate(imported.results, start=1):
        for figure in result.figures:
            row = rows.setdefault(figure.meaning, _Row((), figure.unit, figure.definition, figure.ours, {}))
            names = dict.fromkeys((*row.names, figure.name))
            rows[figure.meaning] = row._replace(names=tuple(names), values=row.values | {str(column): figure.value})
            tools.setdefault(figure.meaning, set()).add(result.tool)
    for our_column, cell in zip(_our_columns(imported), imported.beside, strict=True):
        for ours in cell.figures:
            rows[ours.meaning].values[our_column] = ours.value
            tools[ours.meaning].add("mtbench")
    return [rows[meaning] for meaning in sorted(rows, key=lambda meaning: len(tools[meaning]) < 2)]


def _tables(imported: Imported) -> Iterator[tuple[Sequence[str], list[_Row]]]:
    """Yield the columns of each table and its rows, without rows that have no value there."""
    columns = [*map(str, range(1, len(imported.results) + 1)), *_our_columns(imported)]
    rows = _rows(imported)
    for first in range(0, len(columns), COLUMNS):
        some = columns[first : first + COLUMNS]
        yield some, [row for row in rows if any(column in row.values for column in some)]


def _table(columns: Sequence[str], rows: Sequence[_Row]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("figure", overflow="fold")
    table.add_column("unit", overflow="fold")
    for column in columns:
        table.add_column(Text(column), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, (_name(row), row.unit, *_values(row, columns))))
    return table


def _values(row: _Row, columns: Sequence[str]) -> list[str]:
    return [_shown(row.values[column]) if column in row.values else NONE for column in columns]


def _shown(value: float) -> str:
    """Return a value with at least three digits: shares and small times are near zero."""
    return (
        number(value) if value == 0 or abs(value) >= 1 else number(value, 4) if abs(value) >= 1e-3 else f"{value:.3g}"
    )


def _name(row: _Row) -> str:
    return " = ".join(row.names)


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
    """Return a stranger's text so that Markdown shows it as it is."""
    return "".join(f"\\{character}" if character in "\\|<>`*_[]" else character for character in text)

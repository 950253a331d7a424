"""The terminal's tables of `mtbench compare`: a table per suite and batch size, with rows for each arm and run.

An arm's name stands above its rows, so that all columns fit in 80 characters. A value is written as base → head, with
the difference or the ratio and its 95 % interval below.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from mtbench.document.formatting import (
    NONE,
    bounds,
    count,
    interval,
    listed,
    number,
    percent,
    points,
    stacked,
    times,
)
from mtbench.report.phrases import SMALL_MODEL, batches
from mtbench.results.comparison_format import CellAcrossRuns, CellFigures, Comparison, PairedAccuracy, PairedRatio
from mtbench.results.comparisons import GroupKey

SIMULATED = "Simulated weights or acceptance: not the figures of a trained model"
HEADINGS = ("run", "items", "accuracy, %", "tokens per\nforward", "accept.\nlength", "answer\ntokens", "tokens/s")
TWO_SIDED = NormalDist().inv_cdf(0.975)
HOW_TO_READ = (
    "Values: run 1 → the other run, on the items that both answered. Differ: items with other tokens. In brackets: 95% "
    "intervals, paired by item for accuracy, over blocks of run 1 for ratios."
)
OTHER_SESSION = "tokens/s: each run's own items in its own session. Sessions differ, so these times have no verdict."
NOISE = "±: sessions of one build on this machine differ by this much, 95% of pairs by less (floor.json)."
SPEED_VERDICT = "For a verdict on speed: `mtbench gate --base ENV --head ENV`"


class _Row(NamedTuple):
    """A cell in one of the compared runs."""

    run: int  # from 2
    cell: CellAcrossRuns


def comparison_blocks(comparison: Comparison) -> Iterator[RenderableType]:
    """Yield what the terminal shows, from top to bottom. A string is a line with names, which must not be wrapped."""
    yield from _runs(comparison)
    groups: dict[GroupKey, dict[str, list[_Row]]] = {}  # group -> arm -> rows
    for run, compared in enumerate(comparison.comparisons, start=2):
        for cell in compared.cells:
            group = groups.setdefault(GroupKey(cell.suite, cell.batch_size, cell.batching), {})
            group.setdefault(cell.arm, []).append(_Row(run, cell))
    for key, arms in groups.items():
        yield from _group(key, arms)
    yield ""
    yield from _ending(comparison)


def _runs(comparison: Comparison) -> Iterator[str]:
    """Yield the runs, what differs between them, and what everybody must know of them first."""
    for number_, run in enumerate(comparison.runs, start=1):
        yield f"run {number_}: {run.directory}"
    for run_number, compared in enumerate(comparison.comparisons, start=2):
        for differs in compared.differs:
            yield f"run {run_number}: other {differs.name}: {differs.base or 'unknown'} → {differs.head or 'unknown'}"
    cells = [cell for compared in comparison.comparisons for cell in compared.cells]
    if any(cell.simulated for cell in cells):
        yield SIMULATED
    if any(cell.demonstration for cell in cells):
        yield SMALL_MODEL


def _ending(comparison: Comparison) -> Iterator[RenderableType]:
    """Yield the cells of one run only, how to read the tables, and how to get a verdict on speed."""
    for run, compared in enumerate(comparison.comparisons, start=2):
        for number_, names in ((1, compared.only_base), (run, compared.only_head)):
            if names:
                against = run if number_ == 1 else 1
                yield Text(f"only in run {number_}, not in run {against}: {listed(names)}")
    yield Text(HOW_TO_READ)
    yield Text(OTHER_SESSION)
    if any(cell.session_sd is not None for compared in comparison.comparisons for cell in compared.cells):
        yield Text(NOISE)
    yield Text(SPEED_VERDICT)


def _group(key: GroupKey, arms: dict[str, list[_Row]]) -> Iterator[RenderableType]:
    """Yield the title, the head and the arms of one suite and batch size."""
    several = any(row.run > 2 for rows in arms.values() for row in rows)
    headings = HEADINGS if several else HEADINGS[1:]
    texts = {
        arm: [_texts(row)[-len(headings) :] for row in rows if row.cell.figures is not None]
        for arm, rows in arms.items()
    }
    widths = [
        max(len(line) for text in (heading, *column) for line in text.split("\n"))
        for heading, *column in zip(headings, *(row for rows in texts.values() for row in rows), strict=True)
    ]
    yield ""
    yield Text(f"{key.suite}, {batches(key.batch_size, key.batching)}", style="bold")
    if any(texts.values()):
        yield _table(headings, widths, [], head=True)
    for number_, (arm, rows) in enumerate(arms.items()):
        yield Text(f"\n{arm}" if number_ else arm, style="italic")
        if texts[arm]:
            yield _table(headings, widths, texts[arm])
        yield from (f"  {note}" for row in rows for note in _notes(row))


def _table(headings: Sequence[str], widths: Sequence[int], rows: Iterable[Sequence[str]], head: bool = False) -> Table:
    """Return the head of a group's tables, or the rows of one arm below it."""
    table = Table(box=SIMPLE_HEAD, show_header=head, show_edge=False, padding=(0, 1, 0, 0))
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(Text(heading), justify="right", no_wrap=True, width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _texts(row: _Row) -> list[str]:
    """Return a row's values under HEADINGS."""
    figures = row.cell.figures
    assert figures is not None
    return [
        str(row.run),
        stacked(count(figures.items), f"{count(figures.differing)} differ"),
        _accuracy(figures.accuracy),
        _ratio(figures.tokens_per_forward, 2, with_interval=True),
        _both(figures.acceptance_length.base, figures.acceptance_length.head, 2),
        _ratio(figures.answer_length, 1),
        stacked(_both(figures.tokens_per_s.base, figures.tokens_per_s.head, 0), _noise(row.cell)),
    ]


def _accuracy(accuracy: PairedAccuracy | None) -> str:
    if accuracy is None:
        return NONE
    values = f"{percent(accuracy.base)} → {percent(accuracy.head)}"
    return stacked(values, points(accuracy.difference), interval(bounds(accuracy), 100, 1))


def _ratio(ratio: PairedRatio, digits: int, with_interval: bool = False) -> str:
    if ratio.base is None and ratio.head is None:
        return NONE
    if not with_interval:
        return stacked(_both(ratio.base, ratio.head, digits), times(ratio.ratio, 2))
    values = f"{number(ratio.base, digits)} → {number(ratio.head, digits)}"
    return stacked(values, times(ratio.ratio, 2), interval(bounds(ratio), digits=2))


def _both(base: float | None, head: float | None, digits: int) -> str:
    if base is None and head is None:
        return NONE
    return f"{number(base, digits)} →\n{number(head, digits)}"


def _noise(cell: CellAcrossRuns) -> str | None:
    """Return by how much two sessions of one build differ, from the standard deviation of the log of their ratio."""
    if cell.session_sd is None:
        return None
    return f"±{percent(math.expm1(TWO_SIDED * cell.session_sd))}%"


def _notes(row: _Row) -> Iterator[str]:
    """Yield what a reader must know of a cell: why it is not compared or not to be trusted."""
    cell, figures = row.cell, row.cell.figures
    if cell.reason:
        yield f"run {row.run}: not compared: {cell.reason}"
    for run, reasons in ((1, cell.void_base), (row.run, cell.void_head)):
        yield from (f"run {run}: void, not to be trusted: {reason}" for reason in reasons)
    if figures is not None:
        yield from _notes_on_figures(row.run, figures)


def _notes_on_figures(run: int, figures: CellFigures) -> Iterator[str]:
    if figures.accuracy_reason:
        yield f"run {run}: accuracy not compared: {figures.accuracy_reason}"
    elif figures.accuracy is not None and figures.accuracy.n < figures.items:
        yield f"run {run}: accuracy over {figures.accuracy.n:,} of {figures.items:,} items: the others are not scored"

"""The document of `mtbench compare`: a table per suite and batch size, with a row for each arm and run."""

from collections.abc import Callable, Iterator

from mtbench.document.formatting import NONE, bounds, interval, listed, number, percent
from mtbench.document.model import Document, Entry, Points, Row, Section, Table
from mtbench.report.phrases import SMALL_MODEL, batches
from mtbench.results.across_runs import CellAcrossRuns, CellFigures, Comparison, RunFigures
from mtbench.results.comparisons import GroupKey

SIMULATED = "Simulated weights or acceptance: not the figures of a trained model"
COLUMNS = ("differ", "accuracy, %", "tokens per forward", "accept. length", "answer tokens", "tokens/s")
IMPORTANT = ("accuracy, %", "tokens per forward", "tokens/s", "differ", "answer tokens", "accept. length")
HOW_TO_READ = (
    "Values: run 1 → the other run, on the items that both answered. Differ: items with other tokens. In brackets: 95% "
    "intervals of the difference in points, paired by item, and of the ratio of tokens per forward, over blocks of run "
    "1. `--json` has all figures."
)
OTHER_SESSION = "tokens/s: each run's own items in its own session. Sessions differ, so these times have no verdict."
SPEED_VERDICT = "For a verdict on speed: `mtbench gate --base ENV --head ENV`"


def comparison_document(comparison: Comparison) -> Document:
    """Return the tables of a comparison, what differs between the runs, and how to get a verdict on speed."""
    several = len(comparison.comparisons) > 1
    groups: dict[GroupKey, dict[str, list[Row]]] = {}  # group -> arm -> rows
    for run, compared in enumerate(comparison.comparisons, start=2):
        for cell in compared.cells:
            arms = groups.setdefault(GroupKey(cell.suite, cell.batch_size, cell.batching), {})
            name = f"{cell.arm}, run {run}" if several else cell.arm
            notes = [("flag", note) for note in _notes(run, cell)]
            arms.setdefault(cell.arm, []).append(Row(name, _entries(cell), notes=notes))
    columns = [(heading, "") for heading in COLUMNS]
    sections = [
        Section(
            f"{key.suite}, {batches(key.batch_size, key.batching)}",
            [Table(columns, [row for rows in arms.values() for row in rows], brief=IMPORTANT)],
        )
        for key, arms in groups.items()
    ]
    cells = [cell for compared in comparison.comparisons for cell in compared.cells]
    marks = {SIMULATED: any(cell.simulated for cell in cells), SMALL_MODEL: any(c.demonstration for c in cells)}
    return Document(
        title=f"{len(comparison.runs)} runs compared",
        subject=HOW_TO_READ,
        lead=SPEED_VERDICT,
        marks=[mark for mark, holds in marks.items() if holds],
        sections=[
            Section("Runs", [Points([*_runs(comparison)])]),
            *sections,
            Section("Notes", [Points([*_only_in_one(comparison), OTHER_SESSION])]),
        ],
    )


def _runs(comparison: Comparison) -> Iterator[str]:
    for number_, run in enumerate(comparison.runs, start=1):
        yield f"run {number_}: {run.directory}"
    for run_number, compared in enumerate(comparison.comparisons, start=2):
        for differs in compared.differs:
            yield f"run {run_number}: other {differs.name}: {differs.base or 'unknown'} → {differs.head or 'unknown'}"


def _only_in_one(comparison: Comparison) -> Iterator[str]:
    for run, compared in enumerate(comparison.comparisons, start=2):
        for here, there, names in ((1, run, compared.only_base), (run, 1, compared.only_head)):
            if names:
                yield f"only in run {here}, not in run {there}: {listed(names)}"


def _entries(cell: CellAcrossRuns) -> list[Entry]:
    """Return the values of a row under COLUMNS; dashes for a cell that is not compared."""
    figures = cell.figures
    if figures is None:
        return [Entry() for _ in COLUMNS]
    same, scored, ratio = figures.agreement, figures.accuracy, figures.tokens_per_forward
    difference = None if scored is None else interval(bounds(scored), 100, 1)
    return [
        Entry(f"{same.items - same.identical:,} of {same.items:,}"),
        Entry(_both(figures, lambda run: percent(run.accuracy.value if run.accuracy else None)), difference),
        Entry(_both(figures, lambda run: number(run.tokens_per_forward, 2)), interval(bounds(ratio), digits=2)),
        Entry(_both(figures, lambda run: number(run.acceptance_length, 2))),
        Entry(_both(figures, lambda run: number(run.answer_length, 1))),
        Entry(_both(figures, lambda run: number(run.tokens_per_s, 0))),
    ]


def _both(figures: CellFigures, shown: Callable[[RunFigures], str]) -> str:
    base, head = shown(figures.base), shown(figures.head)
    return NONE if base == head == NONE else f"{base} → {head}"


def _notes(run: int, cell: CellAcrossRuns) -> Iterator[str]:
    """Yield what a reader must know of a cell: why it is not compared or not to be trusted."""
    if cell.reason:
        yield f"run {run}: not compared: {cell.reason}"
    for of_run, reasons in ((1, cell.void_base), (run, cell.void_head)):
        yield from (f"run {of_run}: void, not to be trusted: {reason}" for reason in reasons)
    if cell.figures is None:
        return
    scored, items = cell.figures.accuracy, cell.figures.agreement.items
    if scored is None:
        yield f"run {run}: accuracy not compared: {cell.figures.accuracy_reason}"
    elif scored.n < items:
        yield f"run {run}: accuracy over {scored.n:,} of {items:,} items: the others are not scored"

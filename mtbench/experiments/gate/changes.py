"""What other tokens cost and gain, where they are allowed: accuracy on the same items, tokens per forward."""

from collections.abc import Mapping

from mtbench.errors import UserError
from mtbench.experiments.gate.exact import ExactCell
from mtbench.experiments.gate.format import ChangedCell
from mtbench.results.across_runs import compare_runs
from mtbench.results.aggregate import read_stored
from mtbench.results.comparison_format import CellFigures
from mtbench.runs.directory import RunDirectory
from mtbench.runs.score import due, score


def changed_cells(base: RunDirectory, head: RunDirectory, changed: Mapping[str, ExactCell]) -> list[ChangedCell]:
    """Return the figures of the cells whose tokens differ. `base`, `head`: runs of one plan, which are scored here.

    The figures are null if this environment cannot score or read the runs: it may lack a plugin of the builds.
    """
    try:
        for run in (base, head):
            if due(run):
                score(run)
        figures = {cell.cell: cell.figures for cell in compare_runs(read_stored(base), read_stored(head)).cells}
    except UserError:
        figures = {}
    return [_changed_cell(cell, outcome, figures.get(cell)) for cell, outcome in changed.items()]


def _changed_cell(cell: str, outcome: ExactCell, figures: CellFigures | None) -> ChangedCell:
    accuracy = figures and figures.accuracy
    ratio = figures and figures.tokens_per_forward
    return ChangedCell(
        cell=cell,
        items=outcome.items,
        differing=outcome.differing,
        accuracy_difference=accuracy.difference if accuracy else None,
        accuracy_ci_low=accuracy.ci_low if accuracy else None,
        accuracy_ci_high=accuracy.ci_high if accuracy else None,
        tokens_per_forward_ratio=ratio.ratio if ratio else None,
        tokens_per_forward_ci_low=ratio.ci_low if ratio else None,
        tokens_per_forward_ci_high=ratio.ci_high if ratio else None,
    )

"""What `mtbench choose` prints: candidates, a line for each arm, the decision."""

from collections.abc import Mapping, Sequence

from rich.markup import escape
from rich.table import Table

from mtbench.document.formatting import NONE, bounds, interval, number
from mtbench.report.arm_names import arm_names
from mtbench.report.terminal import note_lines
from mtbench.results.comparisons import groups_of
from mtbench.results.decision_format import Decision, Recommendation
from mtbench.results.figure_formats import Speedup
from mtbench.results.format import ResultCell, Results


def candidate_tables(arms: Sequence[str], refused: Mapping[str, str]) -> list[Table]:
    """Return the arms that can be raced, and the methods that cannot with the reason."""
    can = Table("arm", title="Can be raced", box=None, title_justify="left")
    for arm in arms:
        can.add_row(escape(arm))
    if not refused:
        return [can]
    cannot = Table("method", "why not", title="Cannot be raced", box=None, title_justify="left", padding=(0, 2, 0, 0))
    for method, reason in refused.items():
        cannot.add_row(escape(method), escape(reason))
    return [can, cannot]


def decision_tables(results: Results, decision: Decision) -> list[Table | str]:
    """Return a table for each suite and batch size, with a line for each arm, the chosen ones first; then its notes."""
    found = {(r.suite, r.batch_size, r.batching): r for r in decision.recommendations}
    blocks: list[Table | str] = []
    for key, cells in groups_of(results.cells).items():
        blocks.append(_table(key.suite, key.batch_size, cells, found.get((key.suite, key.batch_size, key.batching))))
        blocks += note_lines([cell for cell in cells if cell.items], arm_names(cells))
        blocks.append("")
    return blocks


def _table(suite: str, size: int, cells: Sequence[ResultCell], found: Recommendation | None) -> Table:
    table = Table(title=f"{suite}, batch size {size}", box=None, title_justify="left", padding=(0, 2, 0, 0))
    for heading in ("arm", "speedup (95 %)", "accuracy", "outcome"):
        table.add_column(heading, justify="right" if heading == "accuracy" else "left", no_wrap=heading != "arm")
    names = arm_names(cells)
    order = sorted(cells, key=lambda cell: (_place(cell, found), -_value(cell, found)))
    for cell in order:
        table.add_row(*map(escape, (names[cell.arm], _interval(cell, found), _accuracy(cell), _outcome(cell, found))))
    return table


def _place(cell: ResultCell, found: Recommendation | None) -> int:
    if cell.reference:
        return 2
    if found is not None and cell.arm in _chosen(found):
        return 0
    return 3 if cell.left is not None and cell.left.lost else 1


def _chosen(found: Recommendation) -> dict[str, str]:
    words = {}
    if found.within_loss is not None:
        words[found.within_loss.arm] = "use, if the loss is acceptable"
    if found.same_tokens is not None:
        words[found.same_tokens.arm] = "use: same tokens"
    return words


def _speedup(cell: ResultCell, found: Recommendation | None) -> Speedup | None:
    return next((s for s in cell.speedup if found is not None and s.baseline == found.baseline), None)


def _value(cell: ResultCell, found: Recommendation | None) -> float:
    speedup = _speedup(cell, found)
    return 0.0 if speedup is None else speedup.value or 0.0


def _interval(cell: ResultCell, found: Recommendation | None) -> str:
    if cell.reference:
        return "1"
    speedup = _speedup(cell, found)
    if speedup is None:
        return NONE
    return " ".join(filter(None, (number(speedup.value, 2), interval(bounds(speedup), digits=2))))


def _accuracy(cell: ResultCell) -> str:
    if cell.accuracy is None or cell.accuracy.value is None:
        return NONE
    return f"{100 * cell.accuracy.value:.1f} %"


def _outcome(cell: ResultCell, found: Recommendation | None) -> str:
    """Return what became of an arm, in a few words; decision.json has the reason for which it left."""
    if found is not None and cell.arm in (chosen := _chosen(found)):
        return chosen[cell.arm]
    if cell.reference:
        return NONE
    if cell.error or cell.void:
        return "failed" if cell.error else "void"
    if cell.left is not None:
        return f"{'lost' if cell.left.lost else 'left'} after {cell.left.block} blocks"
    return f"stayed, {cell.blocks} blocks"

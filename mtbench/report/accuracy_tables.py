"""The tables of accuracy: paired comparisons on the same items, and the figures of each task."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtbench.document import Entry, Row, Table
from mtbench.document.formatting import NONE, bounds, count, interval, listed, number, percent, points, times
from mtbench.report.arm_table import arm_row
from mtbench.report.phrases import short_verdict
from mtbench.results.comparisons import OwnSpeedups
from mtbench.results.figure_formats import Accuracy, Speedup, TaskFigures, TaskSpeedup
from mtbench.results.format import ResultCell


def accuracy_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return every paired comparison of accuracy, one row each."""
    columns = [
        ("difference, points", "accuracy less the baseline's, on the same items"),
        ("only arm correct", "items that only the arm answers correctly"),
        ("only baseline correct", "items that only the baseline answers correctly"),
        ("McNemar p", "exact p-value; it decides nothing"),
        ("items needed", "items for a verdict at this margin, if the arms differ as often as here"),
        ("same answers", "items with the baseline's tokens"),
    ]
    rows = []
    for cell in cells:
        same = {a.baseline: f"{a.identical:,} of {a.items:,}" for a in cell.agreement}
        for versus in cell.accuracy_vs:
            difference = interval(bounds(versus), 100, 1)
            entries = [
                Entry(points(versus.difference), difference, versus.verdict, versus.baseline),
                Entry(count(versus.gained)),
                Entry(count(versus.lost)),
                Entry(NONE if versus.p_mcnemar is None else f"{versus.p_mcnemar:.2g}"),
                Entry(count(versus.n_needed or None)),
                Entry(same.get(versus.baseline, NONE)),
            ]
            rows.append(arm_row(cell, numbers, entries))
    return Table(columns, rows)


def task_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> Table:
    """Return a row per task and a column per arm if the suite has several tasks; then all items together."""
    items: dict[str, int] = {}
    for part in (part for cell in cells for part in cell.tasks):
        items[part.task] = max(part.items, items.get(part.task, 0))
    shown = [cell for cell in cells if cell.status != "failed"]
    if not items or not shown:
        return Table([], [], of="task")
    baselines = {cell.arm: own.headline[cell.arm].baseline for cell in shown if cell.arm in own.headline}
    columns = []
    for cell in shown:
        over = f"speedup over {baselines[cell.arm]}" if cell.arm in baselines else "a baseline"
        columns.append((f"{numbers[cell.arm]}. {cell.arm}", over))
    tags = ["simulated"] if any(cell.simulated for cell in shown) else []
    rows = []
    for task, n in items.items():
        parts = {cell.arm: part for cell in shown for part in cell.tasks if part.task == task}
        entries = [_task_entry(parts.get(cell.arm), baselines.get(cell.arm)) for cell in shown]
        rows.append(Row(f"{task} ({n:,})", entries, tags=tags))
    whole = [_task_entry(cell, baselines.get(cell.arm)) for cell in shown]
    rows.append(Row(f"all items ({sum(items.values()):,})", whole, tags=tags))
    if any(cell.accuracy_macro for cell in shown):
        mean = [percent_entry(cell.accuracy_macro) for cell in shown]
        rows.append(Row(f"mean of the {len(items)}", mean, tags=tags))
    return Table(columns, rows, of="task")


def _task_entry(part: TaskFigures | ResultCell | None, baseline: str | None) -> Entry:
    """Return the accuracy of a task with the other figures as its detail; if it is not scored, the speedup."""
    if part is None:
        return Entry()
    details = []
    if part.tokens_per_forward:
        details.append(f"{number(part.tokens_per_forward)} per forward")
    if part.acceptance is not None and part.acceptance.rate is not None:
        details.append(f"{percent(part.acceptance.rate, 0)}% accepted")
    speedups: Sequence[Speedup | TaskSpeedup] = part.speedup
    speedup = next((s for s in speedups if s.baseline == baseline), None)
    speed = Entry()
    if speedup is not None and speedup.value:
        speed = Entry(times(speedup.value), interval(bounds(speedup)), short_verdict(speedup.verdict))
    elif part.tokens_per_s.value is not None:
        speed = Entry(f"{number(part.tokens_per_s.value)} tokens/s")
    if part.accuracy is None:
        return replace(speed, detail=listed(details) or None)
    if speed.value != NONE and (speedup is None or speedup.ci_low is not None):
        details.insert(0, speed.value)
    return replace(percent_entry(part.accuracy), detail=listed(details) or None)


def percent_entry(accuracy: Accuracy | None) -> Entry:
    if accuracy is None or accuracy.value is None:
        return Entry()
    return Entry(percent(accuracy.value), interval(bounds(accuracy), 100, 1))

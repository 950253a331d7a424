"""The figures of a cell over all its items, and of each task alone if the suite has several.

An item's id is `<task>/<doc id>/<turn>`. Tasks that differ in kind, as the six of Spec-Bench (arXiv 2401.07851), hide
behind one mean, so the worst and the best of them stand next to it. The planner puts items of one task only in a block,
so every task has times of its own.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from mtbench import statistics
from mtbench.plan.plan import Item
from mtbench.results import acceptance
from mtbench.results.comparisons import bounds, compare
from mtbench.results.figure_formats import (
    AcceptanceFigures,
    Accuracy,
    Estimate,
    Speedup,
    Spread,
    TaskFigures,
    TaskSpeedup,
    TaskValue,
)
from mtbench.results.samples import CellData


class Summary(NamedTuple):
    """Quality, acceptance and speed of a cell, or of one of its tasks. The names are those of the records."""

    items: int
    accuracy: Accuracy | None
    accuracy_macro: Accuracy | None
    tokens_per_forward: float | None
    tokens_per_forward_ci: list[float] | None
    acceptance: AcceptanceFigures | None
    tokens_per_s: Estimate


def task_of(item: str) -> str:
    """Return the task of an item's id."""
    return item.partition("/")[0]


def summarize(data: CellData, metric: str | None) -> Summary:
    """Return what holds for a cell, or for one task of it, without a comparison."""
    lines = list(data.lines.values())
    counts = data.tokens_and_forwards()
    per_forward = rate = None
    if counts is not None:
        per_forward = statistics.ratio_of_totals([counts[0]], [counts[1]])
    if data.samples:
        rate = statistics.ratio_of_totals([data.per_unit("tokens")], [data.per_unit("wall_s")], unit=data.unit)
    return Summary(
        items=len(lines),
        accuracy=_accuracy(metric, data.scores),
        accuracy_macro=_macro_accuracy(metric, data.scores),
        tokens_per_forward=None if per_forward is None else per_forward.value,
        tokens_per_forward_ci=None if per_forward is None else bounds(per_forward),
        acceptance=acceptance.of_cell(data),
        tokens_per_s=Estimate.of(rate),
    )


def by_task(
    group: Mapping[str, CellData],
    items: Sequence[Item],
    blocks: Sequence[Sequence[int]],
    metric: str | None,
    synchronisation_s: float,
    max_loss: float,
    void: Collection[str] = (),
    looks: int = 1,
) -> dict[str, list[TaskFigures]]:
    """Return the `tasks` of every arm of a group; empty lists if all items are of one task.

    blocks: the group's blocks, as indices into `items`. The time of a block that mixes tasks counts for none of them.
    The verdicts of one task and baseline are decided over all arms together, as for a whole suite.
    """
    tasks_of_block = [{task_of(items[i].item) for i in block} for block in blocks]
    indices = sorted(i for block in blocks for i in block)
    tasks = list(dict.fromkeys(task_of(items[i].item) for i in indices))
    found: dict[str, list[TaskFigures]] = {arm: [] for arm in group}
    if len(tasks) < 2:
        return found
    for task in tasks:
        own_blocks = {block for block, of_block in enumerate(tasks_of_block) if of_block == {task}}
        parts = {arm: _part(data, task, own_blocks) for arm, data in group.items()}
        comparisons = compare(parts, synchronisation_s, max_loss, void, looks)
        for arm, data in parts.items():
            speedups = [_task_speedup(s) for s in comparisons[arm].speedup if not s.includes_engine]
            found[arm].append(TaskFigures(task=task, **summarize(data, metric)._asdict(), speedup=speedups))
    return found


def with_spreads(speedups: Sequence[Speedup], tasks: Sequence[TaskFigures]) -> list[Speedup]:
    """Return an arm's speedups with their worst and best task. Over another engine no task has a speedup."""
    return [s if s.includes_engine else s.changed(spread=_speedup_spread(tasks, s.baseline)) for s in speedups]


def tokens_per_forward_spread(tasks: Sequence[TaskFigures]) -> Spread | None:
    """Return the tasks with the fewest and the most tokens per forward."""
    figures = [(part.task, part.tokens_per_forward, *(part.tokens_per_forward_ci or (None, None))) for part in tasks]
    return _spread(figures, len(tasks))


def _speedup_spread(tasks: Sequence[TaskFigures], baseline: str) -> Spread | None:
    """Return the spread over the tasks that were measured enough for a verdict."""
    figures = [
        (part.task, speedup.value, speedup.ci_low, speedup.ci_high)
        for part in tasks
        for speedup in part.speedup
        if speedup.baseline == baseline and speedup.verdict.reason is None
    ]
    return _spread(figures, len(tasks))


def _spread(figures: Sequence[tuple[str, float | None, float | None, float | None]], tasks: int) -> Spread | None:
    """Return the extremes of the tasks that have an interval; None if fewer than two have one, or all are equal.

    figures: (task, value, lower bound, upper bound).
    """
    values = [
        TaskValue(task=task, value=value, ci_low=low, ci_high=high)
        for task, value, low, high in figures
        if value is not None and low is not None and high is not None
    ]
    if len({figure.value for figure in values}) < 2:
        return None
    worst, best = (extreme(values, key=lambda figure: figure.value) for extreme in (min, max))
    return Spread(worst=worst, best=best, compared=len(values), tasks=tasks)


def _part(data: CellData, task: str, blocks: set[int]) -> CellData:
    """Return the data of one task. blocks: those that hold items of this task only."""
    return dataclasses.replace(
        data,
        lines={item: line for item, line in data.lines.items() if task_of(item) == task},
        timings=[t for t in data.timings if t.block in blocks],
        scores={item: score for item, score in data.scores.items() if task_of(item) == task},
    )


def _task_speedup(speedup: Speedup) -> TaskSpeedup:
    return TaskSpeedup(**{name: getattr(speedup, name) for name in TaskSpeedup.model_fields})


def _accuracy(metric: str | None, scores: Mapping[str, float]) -> Accuracy | None:
    if metric is None or not scores:
        return None
    return Accuracy(metric=metric, **statistics.wilson(round(sum(scores.values())), len(scores))._asdict())


def _macro_accuracy(metric: str | None, scores: Mapping[str, float]) -> Accuracy | None:
    """Return the unweighted mean over tasks; None if there is one task, or no score."""
    by_task: dict[str, list[float]] = {}
    for item, score in scores.items():
        by_task.setdefault(task_of(item), []).append(score)
    if metric is None or len(by_task) < 2:
        return None
    parts = [(round(sum(scored)), len(scored)) for scored in by_task.values()]
    return Accuracy(metric=metric, tasks=len(parts), **statistics.mean_of_proportions(parts)._asdict())

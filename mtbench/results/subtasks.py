"""The figures of a cell over all its items, and of its parts alone: tasks; turns and contexts of conversations.

An item's id is `<task>/<doc id>/<turn>`. Tasks that differ in kind, as the six of Spec-Bench (arXiv 2401.07851), hide
behind one mean, so the worst and the best of them stand next to it. The planner puts items of one task only in a block,
and turns of one number, so every part has times of its own.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from math import ceil
from typing import Any

from mtbench import statistics
from mtbench.document.formatting import bounds
from mtbench.plan.plan import Item
from mtbench.records import dump
from mtbench.results import acceptance
from mtbench.results.comparisons import Comparisons
from mtbench.results.figure_formats import (
    Accuracy,
    ByValue,
    Estimate,
    RangeFigures,
    Speedup,
    Spread,
    Summary,
    TaskFigures,
    TaskSpeedup,
    TaskValue,
    Unread,
)
from mtbench.results.parts import context_part, turn_part
from mtbench.results.samples import CellData
from mtbench.statistics import Unit


def task_of(item: str) -> str:
    """Return the task of an item's id."""
    return item.partition("/")[0]


def summarize(data: CellData, metric: str | None) -> Summary:
    """Return what holds for a cell, or for a part of it, without a comparison."""
    counts = data.tokens_and_forwards()
    per_forward = None if counts is None else statistics.ratio_of_totals([counts[0]], [counts[1]])
    return Summary(
        items=len(data.lines),
        accuracy=accuracy_of(metric, data.scores),
        accuracy_macro=_macro_accuracy(metric, data.scores),
        tokens_per_forward=None if per_forward is None else per_forward.value,
        tokens_per_forward_ci=None if per_forward is None else bounds(per_forward),
        acceptance=acceptance.of_cell(data),
        tokens_per_s=Estimate.of(data.ratio("tokens", "wall_s")),
    )


def by_part(
    group: Mapping[str, CellData],
    items: Sequence[Item],
    blocks: Sequence[Sequence[int]],
    metric: str | None,
    compare: Callable[[Mapping[str, CellData]], Mapping[str, Comparisons]],
) -> dict[str, dict[str, Any]]:
    """Return the `tasks` of every arm of a group, and its `turns` and `contexts` if an item follows another.

    blocks: the group's blocks, as indices into `items`. The time of a block that mixes parts counts for none of them.
    The verdicts of one part and baseline are decided over all arms together, as for a whole suite.
    """
    tasks = {i: task_of(items[i].item) for i in sorted(chain(*blocks))}
    keys: dict[str, Mapping[int, str]] = {"tasks": tasks if len({*tasks.values()}) > 1 else {}}
    if any(items[i].follows is not None for i in tasks):
        keys |= _ranges(group, items, blocks)
    figures: dict[str, dict[str, Any]] = {arm: {name: [] for name in keys} for arm in group}
    for name, key_of in keys.items():
        for key in dict.fromkeys(key_of.values()):
            own_items = {items[i].item for i, of_item in key_of.items() if of_item == key}
            own_blocks = {block for block, of_block in enumerate(blocks) if {key_of.get(i) for i in of_block} == {key}}
            parts = {arm: _part(data, own_items, own_blocks, name == "tasks") for arm, data in group.items()}
            compared = compare(parts)
            for arm, data in parts.items():
                own = [s for s in compared[arm].speedup if not s.includes_engine]
                figures[arm][name].append(_figures(name, key, data, metric, own))
    return figures


def _ranges(
    group: Mapping[str, CellData], items: Sequence[Item], blocks: Sequence[Sequence[int]]
) -> dict[str, Mapping[int, str]]:
    """Return by item the range of turns that it is in, and that of contexts: its block's mean prompt, over all arms."""
    turns, prompts, requests = list[int](), Counter[int](), Counter[int]()
    for item in items:
        turns.append(1 if item.follows is None else turns[item.follows] + 1)
    for timing in chain.from_iterable(data.timings for data in group.values()):
        prompts[timing.block] += timing.prompt_tokens
        requests[timing.block] += timing.items
    means = sorted((ceil(prompts[block] / requests[block]), block) for block in requests)
    turn_of = {i: turn_part(turns[i]) for i in chain(*blocks)}
    return {"turns": turn_of, "contexts": {i: context_part(n) for n, block in means for i in blocks[block]}}


def _figures(
    of: str, part: str, data: CellData, metric: str | None, speedups: Sequence[Speedup]
) -> TaskFigures | RangeFigures:
    figures: dict[str, Any] = dict(summarize(data, metric))
    figures["speedup"] = [TaskSpeedup(**{f: getattr(s, f) for f in TaskSpeedup.model_fields}) for s in speedups]
    if of == "tasks":
        return TaskFigures(task=part, **figures)
    later_s = data.ratio(lambda t: t.ttft_s and (t.wall_s - t.ttft_s) * t.rows, lambda t: t.tokens - t.items)
    guesses = acceptance.accepted_and_offered(data)
    return RangeFigures(
        part=part,
        **figures,
        tokens=data.tokens,
        acceptance_rate=Estimate.of(None) if guesses is None else _share(*guesses),
        ttft_s=Estimate.of(data.ratio("ttft_s", lambda t: 1)),
        tpot_s=Estimate.of(later_s),
        cached_share=_share(data.per_unit("cached_tokens"), data.per_unit("prompt_tokens"), data.unit),
    )


def _share(part: statistics.Values, whole: statistics.Values, unit: Unit = "block") -> Estimate:
    """Return Σ part / Σ whole, each per unit, at most 1. One of 0 has no interval on a scale of logs."""
    share = Estimate.of(statistics.ratio_of_totals([part], [whole], unit=unit))
    if sum(part) == 0 < sum(whole):
        return share.changed(value=0.0)
    return share if share.ci_high is None else share.changed(ci_high=min(1.0, share.ci_high))


def with_spreads(speedups: Sequence[Speedup], tasks: Sequence[TaskFigures]) -> list[Speedup]:
    """Return an arm's speedups with their worst and best task. Over another engine no task has a speedup."""
    return [s if s.includes_engine else s.changed(spread=_speedup_spread(tasks, s.baseline)) for s in speedups]


def tokens_per_forward_spread(tasks: Sequence[TaskFigures]) -> Spread | None:
    """Return the tasks with the fewest and the most tokens per forward."""
    figures = [(part.task, part.tokens_per_forward, *(part.tokens_per_forward_ci or (None, None))) for part in tasks]
    return _spread(figures, len(tasks))


def _speedup_spread(tasks: Sequence[TaskFigures], baseline: str) -> Spread | None:
    of_tasks = [(part.task, s) for part in tasks for s in part.speedup if s.baseline == baseline]
    judged = [(task, s.value, s.ci_low, s.ci_high) for task, s in of_tasks if s.verdict.reason is None]
    return _spread(judged, len(tasks))


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


def _part(data: CellData, items: Collection[str], blocks: Collection[int], in_seconds: bool) -> CellData:
    """Return the data of one part. blocks: those that hold items of this part only.

    in_seconds: units of servers' times last a second. Else they are conversations: equal turns are far apart in time.
    """
    return dataclasses.replace(
        data,
        lines={item: line for item, line in data.lines.items() if item in items},
        timings=[t for t in data.timings if t.block in blocks],
        scores={item: score for item, score in data.scores.items() if item in items},
        timed_unit_of=data.timed_unit_of if in_seconds else data.unit_of,
        unit=data.unit if in_seconds or data.unit == "round" else "conversation",
        validity={},
        readings={},
    )


def accuracy_of(metric: str | None, scores: Mapping[str, float]) -> Accuracy | None:
    """Return the mean of scores; None without any."""
    if metric is None or not scores:
        return None
    return Accuracy(metric=metric, **statistics.wilson(round(sum(scores.values())), len(scores))._asdict())


def readings(metric: str | None, data: CellData) -> dict[str, Any]:
    """Return a cell's unread answers and its accuracy by value; None where there are none."""
    accuracy, reasons = accuracy_of(metric, data.values), dict(Counter(data.unread.values()).most_common())
    difference = statistics.paired_difference(*statistics.gains_and_losses(data.values, data.scores))
    differs = bool(difference.ci_low and difference.ci_high and difference.ci_low * difference.ci_high > 0)
    by_value = accuracy and ByValue(
        **dump(accuracy), missed=difference.gained, false_passes=difference.lost, differs=differs
    )
    unread = Unread(answers=len(data.unread), of=len(data.scores), reasons=reasons) if reasons else None
    return {"unread": unread, "by_value": by_value}


def _macro_accuracy(metric: str | None, scores: Mapping[str, float]) -> Accuracy | None:
    """Return the unweighted mean over tasks; None if there is one task, or no score."""
    by_task: dict[str, list[float]] = {}
    for item, score in scores.items():
        by_task.setdefault(task_of(item), []).append(score)
    if metric is None or len(by_task) < 2:
        return None
    parts = [(round(sum(scored)), len(scored)) for scored in by_task.values()]
    return Accuracy(metric=metric, tasks=len(parts), **statistics.mean_of_proportions(parts)._asdict())

"""What a cell's answers came to: of all its items, and of each task apart where a suite has several.

An item's id is `<task>/<doc id>/<turn>`; where tasks differ in kind, as Spec-Bench's six do (arXiv 2401.07851), one
mean over them hides more than it says. The planner makes blocks of one task each, so that a task has times of its own.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from mtbench import statistics
from mtbench.results import acceptance
from mtbench.results.comparisons import bounds, compare, ratio
from mtbench.results.samples import Measured
from mtbench.runs.directory import Record
from mtbench.runs.plan import Item


def task_of(item: str) -> str:
    return item.partition("/")[0]


def summarize(one: Measured, metric: str | None) -> Record:
    """Quality, acceptance and speed of a cell, or of one task of it, by itself."""
    lines = list(one.lines.values())
    tokens = [len(g["token_ids"]) for g in lines]
    per_forward = None
    if one.counted("forwards") is not None:
        per_forward = statistics.ratio_of_totals([tokens], [[g["forwards"] for g in lines]], unit="item")
    rate = statistics.ratio_of_totals([one.by_block("tokens")], [one.by_block("wall_s")]) if one.samples else None
    return {
        "items": len(lines),
        "accuracy": _accuracy(metric, one.scores),
        "accuracy_macro": _macro(metric, one.scores),
        "tokens_per_forward": per_forward and per_forward.value,
        "tokens_per_forward_ci": per_forward and bounds(per_forward),
        "acceptance": acceptance.of_cell(one),
        "tokens_per_s": ratio(rate),
    }


def by_task(
    of_group: Mapping[str, Measured],
    items: Sequence[Item],
    blocks: Sequence[Sequence[int]],
    metric: str | None,
    synchronisation_s: float,
    margin: float,
) -> dict[str, list[Record]]:
    """arm -> its `tasks`; none where all items are of one task.

    blocks: those of the group, as indices into `items`. A block that mixes tasks gives its time to none of them. Words
    are decided over the arms of one task and baseline together, as they are over a whole suite's.
    """
    in_block = {number: {task_of(items[i].item) for i in block} for number, block in enumerate(blocks)}
    tasks = list(dict.fromkeys(task_of(items[i].item) for i in sorted(i for block in blocks for i in block)))
    found: dict[str, list[Record]] = {arm: [] for arm in of_group}
    for task in tasks if len(tasks) > 1 else ():
        own = {number for number, there in in_block.items() if there == {task}}
        parts = {arm: _part(one, task, own) for arm, one in of_group.items()}
        comparisons = compare(parts, synchronisation_s, margin)
        for arm, one in parts.items():
            speedups = [s for s in comparisons[arm]["speedup"] if not s.get("includes_engine")]
            kept = ("baseline", "value", "ci_low", "ci_high", "verdict")
            said = {"speedup": [{name: s[name] for name in kept} for s in speedups]}
            found[arm].append({"task": task, **summarize(one, metric), **said})
    return found


def _part(one: Measured, task: str, blocks: set[int]) -> Measured:
    """Of a cell what belongs to one task, whose blocks these are."""
    return dataclasses.replace(
        one,
        lines={item: line for item, line in one.lines.items() if task_of(item) == task},
        timings=[t for t in one.timings if t["block"] in blocks],
        scores={item: score for item, score in one.scores.items() if task_of(item) == task},
    )


def _accuracy(metric: str | None, scores: Mapping[str, float]) -> Record | None:
    if metric is None or not scores:
        return None
    return {"metric": metric, **statistics.wilson(round(sum(scores.values())), len(scores))._asdict()}


def _macro(metric: str | None, scores: Mapping[str, float]) -> Record | None:
    """The mean over tasks, each counted alike; None where there is one task, or no score."""
    of_task: dict[str, list[float]] = {}
    for item, score in scores.items():
        of_task.setdefault(task_of(item), []).append(score)
    if metric is None or len(of_task) < 2:
        return None
    parts = [(round(sum(scored)), len(scored)) for scored in of_task.values()]
    return {"metric": metric, "tasks": len(parts), **statistics.mean_of_proportions(parts)._asdict()}

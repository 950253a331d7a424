"""The worst and the best task of a headline figure: which tasks count, and where the spread is shown."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from made_records import cell_data, generation_line, speedup, timing_line

from mtbench.plan.plan import Item
from mtbench.records import dump
from mtbench.results.comparisons import compare
from mtbench.results.figure_formats import Speedup, Spread, TaskFigures
from mtbench.results.samples import CellData
from mtbench.results.subtasks import by_part, tokens_per_forward_spread, with_spreads

AR, ARM = "ar@ar/graph", "mars@ar/graph"
BLOCKS = 6


def figures(
    speeds: Mapping[str, float], blocks: Mapping[str, int] | None = None, wall_s: float = 1.0
) -> tuple[list[Speedup], list[TaskFigures]]:
    """The speedups and the tasks of an arm that decodes so many tokens per forward, and is so many times as fast.

    Each block has one item of one task, and takes the baseline `wall_s`. blocks: task -> its number of blocks.
    """
    items = [
        Item(item=f"{task}/{n}/0", prompt_ids=[1], stop=[], follows=None)
        for task in speeds
        for n in range((blocks or {}).get(task, BLOCKS))
    ]

    def cell(arm: str, factor: Mapping[str, float]) -> CellData:
        lines, timings = [], []
        for block, item in enumerate(items):
            speed = factor[item.item.partition("/")[0]]
            tokens = [1] * (100 + block)
            lines.append(generation_line(item=item.item, block=block, token_ids=tokens, forwards=round(100 / speed)))
            timings.append(timing_line(block=block, wall_s=wall_s / speed, tokens=len(tokens)))
        return cell_data(lines, timings, arm=arm, baselines=[AR] if arm == ARM else [])

    group = {AR: cell(AR, dict.fromkeys(speeds, 1.0)), ARM: cell(ARM, speeds)}
    judged = partial(compare, synchronisation_s=0.0, max_loss=0.02)
    tasks = by_part(group, items, [[i] for i in range(len(items))], None, judged)[ARM]["tasks"]
    return with_spreads(judged(group)[ARM].speedup, tasks), tasks


def ends(spread: Spread | None) -> tuple[Any, ...] | None:
    if spread is None:
        return None
    return spread.worst.task, spread.best.task, spread.compared, spread.tasks


def test_the_worst_and_the_best_task_are_named_with_their_figures() -> None:
    """They are those of the tasks' own records."""
    [over], tasks = figures({"code": 2.5, "chat": 1.25, "math": 2.0})
    assert ends(over.spread) == ("chat", "code", 3, 3)
    assert over.spread is not None
    assert (over.spread.worst.value, over.spread.best.value) == pytest.approx((1.25, 2.5))
    of_code = next(part for part in tasks if part.task == "code").speedup[0]
    best = over.spread.best
    assert (best.value, best.ci_low, best.ci_high) == (of_code.value, of_code.ci_low, of_code.ci_high)
    spread = tokens_per_forward_spread(tasks)
    assert ends(spread) == ("chat", "code", 3, 3)
    assert spread is not None
    assert [spread.best.ci_low, spread.best.ci_high] == next(p for p in tasks if p.task == "code").tokens_per_forward_ci


def test_a_task_with_too_few_blocks_does_not_count() -> None:
    """Even if it is the best: five blocks have no interval. Its existence is known."""
    [over], tasks = figures({"code": 2.5, "chat": 1.25, "math": 2.0}, blocks={"code": BLOCKS - 1})
    assert ends(over.spread) == ends(tokens_per_forward_spread(tasks)) == ("chat", "math", 2, 3)


def test_a_speedup_whose_times_are_too_short_does_not_count() -> None:
    """Six blocks of 0.1 s give no verdict. Tokens per forward need no clock."""
    [over], tasks = figures({"code": 2.5, "chat": 1.25}, wall_s=0.1)
    assert over.spread is None
    assert ends(tokens_per_forward_spread(tasks)) == ("chat", "code", 2, 2)


@pytest.mark.parametrize(
    ("speeds", "blocks"),
    [
        ({"code": 2.5}, {}),
        ({"code": 2.5, "chat": 1.25}, {"chat": 2}),
    ],
    ids=["one task", "one with enough blocks"],
)
def test_one_task_gives_no_spread(speeds: Mapping[str, float], blocks: Mapping[str, int]) -> None:
    [over], tasks = figures(speeds, blocks)
    assert over.spread is None
    assert tokens_per_forward_spread(tasks) is None


def test_equal_tasks_give_no_spread() -> None:
    """As those of `ar`, whose tokens per forward are 1 on every task."""
    tasks = [
        part.changed(tokens_per_forward=1.0, tokens_per_forward_ci=[1.0, 1.0])
        for part in figures({"code": 2.5, "chat": 1.25})[1]
    ]
    assert tokens_per_forward_spread(tasks) is None


def test_a_ratio_that_contains_an_engine_has_none() -> None:
    """No task has a speedup over another engine."""
    tasks = figures({"code": 2.5, "chat": 1.25})[1]
    [over] = with_spreads([speedup(baseline=AR, includes_engine=True, plain=None)], tasks)
    assert "spread" not in dump(over)

"""The worst and the best task of a headline figure: which tasks count, and where the spread is shown."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from made_records import cell_data, generation_line, result_cell, speedup, timing_line
from stages import assemble

from mtbench.records import dump
from mtbench.report.main_table import main_table
from mtbench.report.phrases import spread_over_tasks
from mtbench.results import subtasks
from mtbench.results.comparisons import compare, own_speedups
from mtbench.results.figure_formats import Speedup, Spread, TaskFigures, TaskValue
from mtbench.results.format import Results
from mtbench.results.samples import CellData
from mtbench.results.subtasks import by_task, tokens_per_forward_spread, with_spreads
from mtbench.runs.directory import RunDirectory
from mtbench.runs.plan import Item

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
    tasks = by_task(group, items, [[i] for i in range(len(items))], None, 0.0, 0.02)[ARM]
    return with_spreads(compare(group, 0.0, 0.02)[ARM].speedup, tasks), tasks


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


def test_a_run_stores_the_spread(small_run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In results.json, beside the headline; null for a suite of one task."""
    run = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path / "run")))
    assert not any(cell.tokens_per_forward_spread for cell in assemble(run).cells)
    spread = made(1.2, 2.6)
    monkeypatch.setattr(subtasks, "_spread", lambda figures, tasks: spread)
    assemble(run)
    stored = run.read("results.json", Results).cells
    assert all(cell.tokens_per_forward_spread == spread for cell in stored)
    assert {over.spread == spread for cell in stored for over in cell.speedup} == {True}


def made(low: float, high: float, compared: int = 3) -> Spread:
    worst = TaskValue(task="chat", value=low, ci_low=low - 0.1, ci_high=low + 0.1)
    best = TaskValue(task="code", value=high, ci_low=high - 0.1, ci_high=high + 0.1)
    return Spread(worst=worst, best=best, compared=compared, tasks=3)


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        (None, None),
        (made(1.2, 2.6), "from 1.20 on chat to 2.60 on code"),
        (made(1.2, 2.6, compared=2), "from 1.20 on chat to 2.60 on code, 1 of 3 tasks measured too little"),
        (made(1.201, 1.204), None),
    ],
    ids=["none", "all tasks", "some tasks", "written alike"],
)
def test_the_words_name_both_tasks(spread: Spread | None, words: str | None) -> None:
    """And how many tasks do not count, if any."""
    assert spread_over_tasks(spread) == words


def test_the_row_of_an_arm_says_it() -> None:
    """Below its speedup and its tokens per forward. The baseline has nothing to say."""
    over = speedup(baseline=AR, verdict="faster", value=1.9, ci_low=1.8, ci_high=2.0, spread=made(1.2, 2.6))
    arm = result_cell(arm=ARM, tokens_per_forward=2.0, tokens_per_forward_spread=made(1.5, 2.4), speedup=[over])
    both = [result_cell(arm=AR, reference=True), arm]
    of_baseline, of_arm = main_table(both, {AR: 1, ARM: 2}, own_speedups(both)).rows
    said = [entry.detail for entry in of_arm.entries if entry.detail]
    assert said[:2] == ["by task from 1.20 on chat to 2.60 on code", "by task from 1.50 on chat to 2.40 on code"]
    assert not any("by task" in (entry.detail or "") for entry in of_baseline.entries)

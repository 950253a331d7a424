"""Figures of single tasks: each is of its own items and blocks, and none is of a block that mixes tasks."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from stages import assemble, write_report
from stored import keep_lines, stored_json, stored_lines

from mtbench.plan.directory import RunDirectory
from mtbench.results.format import ResultCell, Results

RIDGE_POSITIONS, ODD = "even & co", "odd"


@pytest.fixture(scope="module")
def run(small_run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The small run, with the items of its first suite renamed to two tasks in turn.

    At batch size 2 every block mixes the tasks except the last, which has one item.
    """
    run = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path_factory.mktemp("tasks") / "run")))
    plan, scores = stored_json(run, "plan.json"), stored_json(run, "scores.json")
    items = plan["suites"][0]["items"]
    pairs = next(g["blocks"] for g in plan["groups"] if (g["suite"], g["batch_size"]) == ("arithmetic", 2))
    assert [len(block) for block in pairs] == [2, 2, 2, 1]
    task = {items[i]["item"]: (RIDGE_POSITIONS, ODD)[place] for block in pairs for place, i in enumerate(block)}

    def renamed(item: str) -> str:
        return f"{task[item]}/{item.partition('/')[2]}"

    for item in items:
        item["item"] = renamed(item["item"])
    for group in plan["groups"]:
        for name in group["cells"] if group["suite"] == "arithmetic" else ():
            lines = stored_lines(run, f"generations/{name}.jsonl")
            keep_lines(run, f"generations/{name}.jsonl", [{**g, "item": renamed(g["item"])} for g in lines])
            scores[name] = {renamed(item): score for item, score in scores[name].items()}
    run.write_json("plan.json", plan)
    run.write_json("scores.json", scores)
    write_report(run, assemble(run))
    return run


@pytest.fixture(scope="module")
def results(run: RunDirectory) -> Results:
    return run.read("results.json", Results)


def cell_of(results: Results, suite: str, arm: str, batch_size: int) -> ResultCell:
    cells = [c for c in results.cells if (c.arm, c.batch_size) == (arm, batch_size)]
    return next(c for c in cells if c.suite.startswith(suite))


def test_a_task_is_counted_by_its_own_lines(run: RunDirectory, results: Results) -> None:
    """Items, tokens per forward, acceptance, speed and accuracy equal those computed from the files by hand."""
    cell = cell_of(results, "arithmetic", "mars:tau=0.3@mars/graph", 1)
    assert {t.task: t.items for t in cell.tasks} == {RIDGE_POSITIONS: 4, ODD: 3}
    lines, timings = (stored_lines(run, f"{folder}/{cell.cell}.jsonl") for folder in ("generations", "timings"))
    scores = stored_json(run, "scores.json")[cell.cell]
    for part in cell.tasks:
        own = [g for g in lines if g["item"].startswith(part.task)]
        assert part.acceptance is not None
        assert part.accuracy is not None
        assert part.tokens_per_forward == pytest.approx(
            sum(len(g["token_ids"]) for g in own) / sum(g["forwards"] for g in own)
        )
        commits = [n for g in own for n in g["commits"] if n]
        assert part.acceptance.length == pytest.approx(sum(commits) / len(commits))
        first = [t for t in timings if t["block"] in {g["block"] for g in own} and not t["dropped"]]
        rates = [t["tokens"] / t["wall_s"] for t in first]
        assert min(rates) <= (part.tokens_per_s.value or 0) <= max(rates)
        assert part.accuracy.n == len(own)
        assert part.accuracy.value == sum(scores[g["item"]] for g in own) / len(own)


def test_a_task_is_compared_over_its_own_blocks(run: RunDirectory, results: Results) -> None:
    """Only baselines by the same engine, in the order of the whole suite."""
    cell = cell_of(results, "arithmetic", "mars@mars/graph", 1)
    for part in cell.tasks:
        assert [s.baseline for s in part.speedup] == ["ar@mars/graph", "ar@ar/graph"]
        lines = stored_lines(run, f"generations/{cell.cell}.jsonl")
        blocks = {g["block"] for g in lines if g["item"].startswith(part.task)}

        def wall_s(name: str, blocks: set[int] = blocks) -> Any:
            seen = [t for t in stored_lines(run, f"timings/{name}.jsonl") if t["block"] in blocks]
            of_block = [[t["wall_s"] for t in seen if t["block"] == block] for block in blocks]
            return sum(sum(walls) / len(walls) for walls in of_block)

        baseline = cell_of(results, "arithmetic", "ar@mars/graph", 1)
        if not any(c.samples.dropped for c in (cell, baseline)):
            speedup = wall_s(baseline.cell) / wall_s(cell.cell)
            assert part.speedup[0].value == pytest.approx(speedup)
        assert part.speedup[0].verdict.reason is not None


def test_a_mixed_block_gives_time_to_no_task(results: Results) -> None:
    """Tokens still count, since they belong to items; the wall time belongs to no task."""
    cell = cell_of(results, "arithmetic", "mars@mars/graph", 2)
    apart = {t.task: t for t in cell.tasks}
    alone, mixed = apart[RIDGE_POSITIONS], apart[ODD]
    assert [(t.items, t.tokens_per_forward) for t in (alone, mixed)] == [(4, 1), (3, 1)]
    assert (alone.tokens_per_s.value or 0) > 0
    assert mixed.tokens_per_s.value is None
    assert [s.value for s in mixed.speedup] == [None] * 2
    assert {s.verdict.word for s in mixed.speedup} == {"inconclusive"}


def test_a_suite_of_one_task_has_no_task_figures(results: Results) -> None:
    """The list is empty."""
    assert cell_of(results, "prompts", "mars@mars/graph", 1).tasks == []


def test_the_mean_over_tasks_counts_each_alike(run: RunDirectory, results: Results) -> None:
    """It stands next to the mean over items, with an interval that is not empty even if all answers are wrong."""
    scores = stored_json(run, "scores.json")
    for cell in (c for c in results.cells if c.tasks):
        scored = scores[cell.cell].items()
        of_task = {name: [value for item, value in scored if item.startswith(name)] for name in (RIDGE_POSITIONS, ODD)}
        macro = cell.accuracy_macro
        assert macro is not None
        assert macro.value == pytest.approx(sum(sum(v) / len(v) for v in of_task.values()) / 2)
        assert (macro.n, macro.tasks) == (7, 2)
        assert (macro.ci_low or 0) <= (macro.value or 0) < (macro.ci_high or 0)
    assert all(c.accuracy_macro is None for c in results.cells if not c.tasks)

"""Tasks apart: each by its own items and blocks, and nothing by a block that mixes them."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from rich.console import Console

from mtbench.report.terminal import results_tables
from mtbench.report.write import write_report
from mtbench.results.aggregate import assemble
from mtbench.runs.directory import RunDirectory

EVEN, ODD = "even & co", "odd"


@pytest.fixture(scope="module")
def run(small_run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The small run, its first suite's items given to two tasks in turn: of its blocks at batch size 2, all but the
    last, which has one item, mix them.
    """
    run = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path_factory.mktemp("tasks") / "run")))
    plan, scores = run.read_json("plan.json"), run.read_json("scores.json")
    items = plan["suites"][0]["items"]
    pairs = next(g["blocks"] for g in plan["groups"] if (g["suite"], g["batch_size"]) == ("arithmetic", 2))
    assert [len(block) for block in pairs] == [2, 2, 2, 1]
    task = {items[i]["item"]: (EVEN, ODD)[place] for block in pairs for place, i in enumerate(block)}

    def renamed(item: str) -> str:
        return f"{task[item]}/{item.partition('/')[2]}"

    for item in items:
        item["item"] = renamed(item["item"])
    for group in plan["groups"]:
        for name in group["cells"] if group["suite"] == "arithmetic" else ():
            lines = run.lines(f"generations/{name}.jsonl")
            run.keep_lines(f"generations/{name}.jsonl", [{**g, "item": renamed(g["item"])} for g in lines])
            scores[name] = {renamed(item): score for item, score in scores[name].items()}
    run.write_json("plan.json", plan)
    run.write_json("scores.json", scores)
    write_report(run, assemble(run))
    return run


@pytest.fixture(scope="module")
def results(run: RunDirectory) -> Any:
    return run.read_json("results.json")


def cell_of(results: Any, suite: str, arm: str, batch_size: int) -> Any:
    return next(
        c for c in results["cells"] if (c["suite"][: len(suite)], c["arm"], c["batch_size"]) == (suite, arm, batch_size)
    )


def test_a_task_is_counted_by_its_own_lines(run: RunDirectory, results: Any) -> None:
    """Items, tokens per forward, acceptance, speed and accuracy, from the files by hand."""
    cell = cell_of(results, "arithmetic", "mars:tau=0.3@mars/graph", 1)
    assert {t["task"]: t["items"] for t in cell["tasks"]} == {EVEN: 4, ODD: 3}
    lines, timings = (run.lines(f"{folder}/{cell['cell']}.jsonl") for folder in ("generations", "timings"))
    scores = run.read_json("scores.json")[cell["cell"]]
    for part in cell["tasks"]:
        own = [g for g in lines if g["item"].startswith(part["task"])]
        assert part["tokens_per_forward"] == pytest.approx(
            sum(len(g["token_ids"]) for g in own) / sum(g["forwards"] for g in own)
        )
        commits = [n for g in own for n in g["commits"] if n]
        assert part["acceptance"]["length"] == pytest.approx(sum(commits) / len(commits))
        first = [t for t in timings if t["block"] in {g["block"] for g in own} and not t["dropped"]]
        rates = [t["tokens"] / t["wall_s"] for t in first]
        assert min(rates) <= part["tokens_per_s"]["value"] <= max(rates)
        assert part["accuracy"]["n"] == len(own)
        assert part["accuracy"]["value"] == sum(scores[g["item"]] for g in own) / len(own)


def test_a_task_is_compared_over_its_own_blocks(run: RunDirectory, results: Any) -> None:
    """Same engine's baselines alone, in their order, as over the whole suite."""
    cell = cell_of(results, "arithmetic", "mars@mars/graph", 1)
    for part in cell["tasks"]:
        assert [s["baseline"] for s in part["speedup"]] == ["ar@mars/graph", "ar@ar/graph"]
        blocks = {
            g["block"] for g in run.lines(f"generations/{cell['cell']}.jsonl") if g["item"].startswith(part["task"])
        }

        def wall_s(name: str, blocks: set[int] = blocks) -> Any:
            seen = [t for t in run.lines(f"timings/{name}.jsonl") if t["block"] in blocks]
            of_block = [[t["wall_s"] for t in seen if t["block"] == block] for block in blocks]
            return sum(sum(walls) / len(walls) for walls in of_block)

        baseline = cell_of(results, "arithmetic", "ar@mars/graph", 1)
        if not any(c["samples"]["dropped"] for c in (cell, baseline)):
            speedup = wall_s(baseline["cell"]) / wall_s(cell["cell"])
            assert part["speedup"][0]["value"] == pytest.approx(speedup)
        assert part["speedup"][0]["verdict"].startswith("inconclusive: ")


def test_a_mixed_block_gives_time_to_no_task(results: Any) -> None:
    """Tokens are still counted, for they are the items'; wall-clock is nobody's."""
    cell = cell_of(results, "arithmetic", "mars@mars/graph", 2)
    apart = {t["task"]: t for t in cell["tasks"]}
    alone, mixed = apart[EVEN], apart[ODD]
    assert [(t["items"], t["tokens_per_forward"]) for t in (alone, mixed)] == [(4, 1), (3, 1)]
    assert alone["tokens_per_s"]["value"] > 0
    assert mixed["tokens_per_s"]["value"] is None
    assert [s["value"] for s in mixed["speedup"]] == [None] * 2
    assert {s["verdict"].partition(":")[0] for s in mixed["speedup"]} == {"inconclusive"}


def test_a_suite_of_one_task_has_none_apart(results: Any) -> None:
    """An empty list, and no table."""
    assert cell_of(results, "prompts", "mars@mars/graph", 1)["tasks"] == []


def test_the_schema_knows_tasks(results: Any) -> None:
    """With times and without."""
    schema = json.loads((files("mtbench") / "schemas" / "results.schema.json").read_text())
    Draft202012Validator(schema).validate(results)


def test_tasks_have_a_table_wherever_people_look(run: RunDirectory, results: Any) -> None:
    """A row each and one of all, in page, Markdown, LaTeX and terminal; none for a suite of one task."""
    markdown, page = ((run.path / name).read_text() for name in ("report.md", "report.html"))
    assert markdown.count("### By task") == page.count('<h3 class="apart">By task</h3>') == 2
    for row in ("|  | even &amp; co (4) |", "|  | odd (3) |", "|  | all items (7) |", "|  | mean of the 2 |"):
        assert markdown.count(row) == 2
    assert "even &amp; co (4)" in page
    assert " per forward, " in markdown
    latex = (run.path / "tables/arithmetic.b1.tasks.tex").read_text()
    assert "even \\& co (4) & " in latex
    assert not (run.path / "tables/prompts_my_prompts_jsonl.b1.tasks.tex").exists()
    for width in (120, 60):
        console = Console(width=width, record=True)
        for table in results_tables(results, width):
            console.print(table)
        text = console.export_text()
        begins = [line.strip().startswith((EVEN, ODD, "all items")) for line in text.splitlines()]
        assert sum(begins) == 2 * 3
        assert ("on the page: " in text) == (width == 60)


def test_the_mean_over_tasks_counts_each_alike(run: RunDirectory, results: Any) -> None:
    """Beside the mean over items, with an interval that is not empty even where all is wrong."""
    scores = run.read_json("scores.json")
    for cell in (c for c in results["cells"] if c["tasks"]):
        scored = scores[cell["cell"]].items()
        of_task = {name: [value for item, value in scored if item.startswith(name)] for name in (EVEN, ODD)}
        macro = cell["accuracy_macro"]
        assert macro["value"] == pytest.approx(sum(sum(v) / len(v) for v in of_task.values()) / 2)
        assert (macro["n"], macro["tasks"]) == (7, 2)
        assert macro["ci_low"] <= macro["value"] < macro["ci_high"]
    assert all(c["accuracy_macro"] is None for c in results["cells"] if not c["tasks"])

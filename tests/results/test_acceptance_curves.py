"""acceptance.yaml of a run: what InferenceX's reader finds in it, and its replay."""

from pathlib import Path
from typing import Any

import freeze
import pytest
import stages
import yaml  # type: ignore[import-untyped]
from stored import keep_lines, stored_json, stored_lines
from whole import whole_run

from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest

CELL = "arithmetic.prompt-lookup.ar.graph.b2"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Plain decoding, prompt lookup and MARS on 24 items, at two batch sizes, static and refilled."""
    freeze.unpack("run", tmp_path)
    return RunDirectory(tmp_path)


def written(run: RunDirectory, variables: Any = None, thinking: Any = None) -> dict[str, Any]:
    """Return acceptance.yaml of a run with variables of the template and marks of thinking."""
    plan = stored_json(run, "plan.json")
    plan["request"]["chat_template_kwargs"] = variables or {}
    plan["suites"][0]["thinking"] = thinking
    run.write_json("plan.json", plan)
    stages.assemble(run)
    return dict(yaml.safe_load((run.path / "acceptance.yaml").read_text()))


def acceptance_length(run: RunDirectory, task: str = "") -> float:
    """Return 1 + accepted / drafts of a cell; what its last forwards accepted behind the ends is accepted, too."""
    lines = [line for line in stored_lines(run, f"generations/{CELL}.jsonl") if line["item"].startswith(task)]
    accepted = sum(sum(n - 1 for n in line["commits"] if n) + (line.get("surplus") or 0) for line in lines)
    return float(1 + accepted / sum(n > 0 for line in lines for n in line["commits"]))


def test_their_reader_finds_the_lengths_of_a_run(run: RunDirectory) -> None:
    """By key, mode and integer. The cell with an interval counts; last forwards accept 3 tokens behind the ends."""
    name = f"generations/{CELL}.jsonl"
    keep_lines(run, name, [line | {"surplus": 3} for line in stored_lines(run, name)])
    data, length = written(run), acceptance_length(run)
    assert data.get("tiny/ar/prompt-lookup")["thinking_off"][10] == round(length, 2)  # type: ignore[index]
    rows = {row["arm"]: row for row in data["mtbench"]}
    assert [*rows] == ["mars:tau=0.95@mars/graph", "prompt-lookup@ar/graph"]  # plain decoding drafts nothing
    row = rows["prompt-lookup@ar/graph"]
    assert row["acceptance_length"] == pytest.approx(length, abs=1e-12)
    assert 1 < row["ci_low"] < length < row["ci_high"] < 2
    assert (row["category"], row["answers"], row["num_speculative_tokens"]) == (None, 24, 10)


def test_each_category_has_a_row(run: RunDirectory) -> None:
    """Some of the items are of another task; the curve is of all."""
    for name in ("plan.json", *(f"generations/{path.name}" for path in run.path.glob("generations/*"))):
        run.write_text(name, (run.path / name).read_text().replace('"arithmetic/1', '"coding/1'))
    rows = [row for row in written(run)["mtbench"] if row["arm"] == "prompt-lookup@ar/graph"]
    expected = {task: acceptance_length(run, task or "") for task in (None, "arithmetic", "coding")}
    assert {row["category"]: row["acceptance_length"] for row in rows} == pytest.approx(expected)
    assert {row["category"]: row["answers"] for row in rows} == {None: 24, "arithmetic": 13, "coding": 11}


def test_the_mode_is_that_of_the_template_or_of_the_answers(run: RunDirectory) -> None:
    for variables, thinking, mode in (
        ({"enable_thinking": True}, None, "thinking_on"),
        ({"enable_thinking": False}, None, "thinking_off"),
        ({"enable_thinking": False}, {"opening": [1], "closing": [2], "opened": True}, "thinking_on"),
    ):
        assert {row["mode"] for row in written(run, variables, thinking=thinking)["mtbench"]} == {mode}


@pytest.mark.whole
def test_a_replay_has_the_acceptance_that_was_measured(tmp_path: Path) -> None:
    """EAGLE with 1 and 3 drafts, measured and then scripted: within the intervals of the file, for each number."""
    drafts: dict[str, Any] = {"family": "tiny", "method": ["eagle:ahead=1|3"], "batch_size": (2,), "rounds": 1}
    path = whole_run(tmp_path, RunRequest(limit=12, **drafts)).path / "acceptance.yaml"
    drafts |= {"suite": ["synthetic:8x60"], "limit": 8, "simulate_acceptance": str(path)}
    replay = whole_run(tmp_path / "replay", RunRequest(**drafts))
    rows, cells = yaml.safe_load(path.read_text())["mtbench"], stored_json(replay, "results.json")["cells"]
    assert [row["num_speculative_tokens"] for row in rows] == [1, 3]
    for row, cell in zip(rows, cells, strict=True):
        assert row["ci_low"] <= cell["acceptance"]["vllm"] <= row["ci_high"]
        assert cell["simulated"]["accept"].startswith(f"{path}#tiny/ar/eagle/thinking_off, length=")
    assert not (replay.path / "acceptance.yaml").exists()

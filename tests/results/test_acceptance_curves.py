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


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Plain decoding, prompt lookup and MARS on 24 items, at two batch sizes, static and refilled."""
    freeze.unpack("run", tmp_path)
    return RunDirectory(tmp_path)


def written(run: RunDirectory, **request: Any) -> str:
    """Return acceptance.yaml of a run whose request has these options."""
    plan = stored_json(run, "plan.json")
    plan["request"] |= request
    run.write_json("plan.json", plan)
    stages.assemble(run)
    return (run.path / "acceptance.yaml").read_text()


def looked_up(text: str, key: str, drafts: int, mode: str = "thinking_on") -> Any:
    """Return what InferenceX's reader finds: by key, by mode where names in the block begin so, by the integer."""
    block = yaml.safe_load(text).get(key)
    if any(str(name).startswith("thinking") for name in block):
        block = block[mode]
    return block.get(drafts)


def acceptance_length(run: RunDirectory, cell: str, task: str = "") -> float:
    """Return 1 + accepted / drafts of a cell; what its last forwards accepted behind the ends is accepted, too."""
    accepted = drafts = 0
    for line in stored_lines(run, f"generations/{cell}.jsonl"):
        if line["item"].startswith(task):
            accepted += sum(n - 1 for n in line["commits"] if n) + (line.get("surplus") or 0)
            drafts += sum(n > 0 for n in line["commits"])
    return 1 + accepted / drafts


def test_their_reader_finds_the_lengths_of_a_run(run: RunDirectory) -> None:
    """Rounded as theirs; the rows are not. Of an arm's cells the one with an interval counts.

    Last forwards accept 3 tokens behind the ends of answers.
    """
    cell = "arithmetic.prompt-lookup.ar.graph.b2"
    name = f"generations/{cell}.jsonl"
    keep_lines(run, name, [line | {"surplus": 3} for line in stored_lines(run, name)])
    text, length = written(run), acceptance_length(run, cell)
    assert looked_up(text, "tiny/ar/prompt-lookup", 10, "thinking_off") == round(length, 2)
    rows = {row["arm"]: row for row in yaml.safe_load(text)["mtbench"]}
    assert [*rows] == ["mars:tau=0.95@mars/graph", "prompt-lookup@ar/graph"]  # plain decoding drafts nothing
    row = rows["prompt-lookup@ar/graph"]
    assert row["acceptance_length"] == pytest.approx(length, abs=1e-12)
    assert 1 < row["ci_low"] < length < row["ci_high"] < 2
    assert (row["category"], row["answers"], row["num_speculative_tokens"]) == (None, 24, 10)


def test_each_category_has_a_row(run: RunDirectory) -> None:
    """Half of the items are of another task; the curve is of all."""
    for name in ("plan.json", *(f"generations/{path.name}" for path in run.path.glob("generations/*"))):
        text = (run.path / name).read_text()
        for number in range(12):
            text = text.replace(f'"arithmetic/{number}/0"', f'"coding/{number}/0"')
        run.write_text(name, text)
    rows = [row for row in yaml.safe_load(written(run))["mtbench"] if row["arm"] == "prompt-lookup@ar/graph"]
    cell = "arithmetic.prompt-lookup.ar.graph.b2"
    expected = {task: acceptance_length(run, cell, task or "") for task in (None, "arithmetic", "coding")}
    assert {row["category"]: row["acceptance_length"] for row in rows} == pytest.approx(expected)
    assert {row["category"]: row["answers"] for row in rows} == {None: 24, "arithmetic": 12, "coding": 12}


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({"enable_thinking": True}, "thinking_on"),
        ({"enable_thinking": False}, "thinking_off"),
        ({"thinking_mode": "enabled"}, "thinking_on"),
    ],
)
def test_the_mode_is_that_of_the_template(run: RunDirectory, variables: dict[str, Any], mode: str) -> None:
    text = written(run, chat_template_kwargs=variables)
    assert {row["mode"] for row in yaml.safe_load(text)["mtbench"]} == {mode}
    assert str(variables) in text


def test_answers_that_think_are_of_that_mode(run: RunDirectory) -> None:
    plan = stored_json(run, "plan.json")
    plan["suites"][0]["thinking"] = {"opening": [1], "closing": [2], "opened": True}
    run.write_json("plan.json", plan)
    text = written(run, chat_template_kwargs={"enable_thinking": False})
    assert {row["mode"] for row in yaml.safe_load(text)["mtbench"]} == {"thinking_on"}


def test_cells_that_measured_nothing_real_have_no_curve(run: RunDirectory) -> None:
    plan = stored_json(run, "plan.json")
    for cell in plan["cells"]:
        cell["simulated"] = {"weights": None, "accept": "0.8", "note": None}
    run.write_json("plan.json", plan)
    stages.assemble(run)
    assert not (run.path / "acceptance.yaml").exists()


@pytest.mark.whole
def test_a_replay_has_the_acceptance_that_was_measured(tmp_path: Path) -> None:
    """EAGLE with 1 and 3 drafts, measured and then scripted: within the intervals of the file, for each number."""
    drafts: dict[str, Any] = {"family": "tiny", "method": ["eagle:ahead=1|3"], "batch_size": (2,), "rounds": 1}
    path = whole_run(tmp_path, RunRequest(limit=12, **drafts)).path / "acceptance.yaml"
    rows = yaml.safe_load(path.read_text())["mtbench"]
    drafts |= {"suite": ["synthetic:8x60"], "limit": 8, "simulate_acceptance": str(path)}
    replay = whole_run(tmp_path / "replay", RunRequest(**drafts))
    assert [row["num_speculative_tokens"] for row in rows] == [1, 3]
    for row, cell in zip(rows, stored_json(replay, "results.json")["cells"], strict=True):
        assert row["ci_low"] <= cell["acceptance"]["derived"]["vllm"] <= row["ci_high"]
        length = f"{row['acceptance_length']:.2f}"
        assert cell["simulated"]["accept"] == f"{path}#tiny/ar/eagle/thinking_off, length={length}"
    assert not (replay.path / "acceptance.yaml").exists()

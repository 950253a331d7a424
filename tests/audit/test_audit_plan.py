"""An answer that breaks its own plan is a fault; plans with other options are none."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from planted_answers import AR, decoded, honest_run, judge_runner, planted, told
from typer.testing import CliRunner

from mtbench.cli import main

Line = dict[str, Any]
RUNNER = judge_runner()
END = RUNNER.checkpoint.end_ids[0]
STOP = "."


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return honest_run(tmp_path_factory.mktemp("plan") / "honest", method=("ar",), batch_size=(4,))


def cut(at: int, finish: str = "length") -> Callable[[Line], Line]:
    return lambda line: told(line["token_ids"][:at], RUNNER, finish_reason=finish)


def until_stop(line: Line) -> Line:
    """The answer up to the first stop string."""
    ids = line["token_ids"]
    at = next(n for n in range(1, len(ids)) if STOP in RUNNER.checkpoint.tokenizer.decode(ids[:n]))
    made = told(ids[:at], RUNNER, finish_reason="stop")
    return made | {"text": made["text"].partition(STOP)[0]}


def beyond_end(line: Line) -> Line:
    return told([*line["token_ids"][:20], END, *line["token_ids"][20:40]], RUNNER, finish_reason="length")


def endless(line: Line) -> Line:
    """The answer without its end token, and what the model goes on with."""
    ids = [token for token in line["token_ids"] if token != END]

    def choose(logits: Any, _: Any) -> int:
        return int(logits.index_fill(0, torch.tensor(RUNNER.checkpoint.end_ids), float("-inf")).argmax())

    return told(decoded(RUNNER, line["prompt_ids"], 64, choose, ids), RUNNER)


def as_it_is(_: Line) -> Line:
    return {}


CASES: dict[str, tuple[dict[str, Any], Callable[[Line], Line], dict[str, Any], Callable[[Line], Line], str]] = {
    "an end before the budget": ({}, as_it_is, {}, cut(30), "B ends before max_new_tokens=64, without an end token"),
    "A is the one": ({}, cut(30), {}, as_it_is, "A ends before max_new_tokens=64, without an end token"),
    "a stop string": ({"stop": [STOP]}, until_stop, {"stop": [STOP]}, as_it_is, "B goes on behind the stop string"),
    "an end token": ({"budget": 20}, cut(20), {}, beyond_end, "B goes on behind an end token"),
    "an end that is none": ({}, as_it_is, {}, cut(30, "end"), "B ends before max_new_tokens=64, without an end token"),
    "a stop that is none": ({}, as_it_is, {}, cut(30, "stop"), "B ends before max_new_tokens=64, without an end token"),
    "no end token": ({}, as_it_is, {}, endless, "as the model does if end tokens are ignored, against its plan.json"),
    "no end token, as planned": ({}, as_it_is, {"length": "fixed"}, endless, ""),
    "another budget": ({}, as_it_is, {"budget": 30}, cut(30), ""),
    "another stop string": ({}, as_it_is, {"stop": [STOP]}, until_stop, ""),
    "end tokens are ignored": ({"budget": 20}, cut(20), {"length": "fixed", "budget": 41}, beyond_end, ""),
}


def run(honest: Path, path: Path, plan: dict[str, Any], change: Callable[[Line], Line]) -> Path:
    """Return a copy of a run with another plan and other answers."""
    planted(honest, path, {f"{AR}.b4": lambda line, _: change(line.model_dump())})
    stored = json.loads((path / "plan.json").read_text())
    suite = stored["suites"][0]
    suite["max_new_tokens"] = plan.get("budget", 64)
    for item in suite["items"]:
        item["stop"] = plan.get("stop", [])
    for cell in stored["cells"]:
        cell["length"] = plan.get("length", "natural")
    (path / "plan.json").write_text(json.dumps(stored))
    return path


@pytest.mark.parametrize("name", CASES)
def test_an_answer_against_its_plan_is_a_fault(name: str, honest: Path, tmp_path: Path) -> None:
    plan_a, made_a, plan_b, made_b, evidence = CASES[name]
    a, b = run(honest, tmp_path / "a", plan_a, made_a), run(honest, tmp_path / "b", plan_b, made_b)
    found = CliRunner().invoke(main.app, ["audit", f"{a}:ar", f"{b}:ar", "-o", str(tmp_path / "out")])
    assert not found.exception or isinstance(found.exception, SystemExit), found.exception
    record = json.loads((tmp_path / "out/audit.json").read_text())
    assert {finding["name"] for finding in record["findings"]} == {"stop/budget"}, record["sentence"]
    assert found.exit_code == bool(evidence), record["findings"][0]["evidence"]
    assert evidence in record["findings"][0]["evidence"]
    assert ("explained by: stop/budget" in found.output) != bool(evidence)

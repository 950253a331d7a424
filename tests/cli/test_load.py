"""`mtbench load` on the command line: the plan, files, mistakes in one line, `--resume`."""

import json
from pathlib import Path
from typing import Any

import pytest
from made_loads import FastClient, answering
from typer.testing import CliRunner, Result

from mtbench.cli import main
from mtbench.errors import UserError
from mtbench.experiments.load import experiment

URL = ["--url", "one=http://127.0.0.1:9/v1"]


def load(*words: Any) -> Result:
    return CliRunner().invoke(main.app, ["load", *map(str, words)])


def mistake(*words: Any) -> str:
    result = load(*words)
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    result = load(
        "--method", "ar", "--method", "mars:tau=0.7", "--request-rate", "1,4", "--dry-run", "-o", tmp_path / "load"
    )
    assert result.exit_code == 0, result.exception
    shown = " ".join(result.output.split())
    assert "20 points in 5 rounds. 1 per second: 30 requests, 4 per second: 120 requests." in shown
    assert "1,500 requests over 600 items of arithmetic. Sending alone takes 600 s." in shown
    assert not (tmp_path / "load").exists()


def test_a_load_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command runs out of time; the second one does the rest, and a third one only reports."""
    monkeypatch.setattr(experiment, "Client", FastClient)
    folder = tmp_path / "load"
    with answering(lambda prompt: (200, "The answer is 1.")) as server:
        options = ["--url", f"one={server.url}", "--request-rate", "8", "--requests", 2, "--rounds", 1, "-o", folder]
        first = load(*options, "--time-budget", "0s")
        assert first.exit_code == 3, first.exception
        assert "go on with --resume" in first.output
        assert "exists and is never overwritten" in mistake(*options)
        assert load("-o", folder, "--resume").exit_code == 0
        asked = len(server.asked)
        last = load("-o", folder, "--resume")
        assert len(server.asked) == asked
    assert last.exit_code == 0
    assert str(folder / "load.html") in last.output.replace("\n", "")
    stored = json.loads((folder / "load.json").read_text())
    assert stored["complete"]
    assert stored["cells"][0]["ok"] == 2


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([*URL, "--request-rate", "1", "--slo", "speed=3s"], "'speed' is not known; limits: ttft, tpot, e2e"),
        ([*URL, "--request-rate", "1", "--slo", "ttft=1s,ttft=2s"], "ttft is given twice"),
    ],
)
def test_mistakes(words: list[str], reason: str) -> None:
    assert reason in mistake(*words)

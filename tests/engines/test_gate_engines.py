"""`mtbench gate --engine NAME`: two releases of an engine, each decoded by servers of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import PLUGIN, Scripted, install
from typer.testing import CliRunner
from whole import forget_plugin_files

from mtbench.cli import main

pytestmark = pytest.mark.whole


def gate(directory: Path, *words: Any) -> tuple[int, dict[str, Any]]:
    """Return the exit code and gate.json of a gate."""
    result = CliRunner().invoke(main.app, ["gate", *map(str, words), "-o", str(directory)])
    forget_plugin_files()
    assert (directory / "gate.json").is_file(), f"{result.output} {result.exception!r}"
    return result.exit_code, json.loads((directory / "gate.json").read_text())


@pytest.mark.slow
def test_fewer_accepted_drafts_in_a_release_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are equal, and so is the work of plain decoding: only the arm that drafts fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    install(Scripted, "scripted==1", accepted=5)
    install(Scripted, "scripted==2", accepted=4)
    releases = ("--base", "pip:scripted==1", "--head", "pip:scripted==2", "--engine", "scripted", "--plugin", PLUGIN)
    arms = ("--method", "ar", "--method", "prompt-lookup:ahead=4", "--limit", 2, "--batch-size", 1)
    code, found = gate(tmp_path / "gate", *releases, *arms, "--counts-only", "--allow-dirty")
    assert (found["word"], code) == ("FAIL", 1), found
    [failed] = [finding for finding in found["findings"] if finding["level"] == "fail"]
    assert "prompt-lookup" in failed["cell"]
    assert "forward passes" in failed["text"]


@pytest.mark.slow
def test_two_releases_of_llamacpp_are_equal(tmp_path: Path) -> None:
    """Real releases: the same tokens and accepted drafts, and head is not slower."""
    releases = ("--base", "pip:xllamacpp==2026.9.11063", "--head", "pip:xllamacpp==2026.10.11549")
    arms = ("--method", "ar", "--method", "prompt-lookup:ahead=4", "--dtype", "float32", "--limit", 32)
    size = ("--batch-size", 1, "--blocks", 8, "--rounds", 3, "--pairs", 20, "--max-slowdown", 50, "--interleave")
    code, found = gate(tmp_path / "gate", *releases, "--engine", "llamacpp", *arms, *size, "--allow-dirty")
    assert (found["word"], code) == ("PASS", 0), found["reason"]
    assert len(found["timed"]) == 2

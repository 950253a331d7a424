"""`mtbench gate --engine NAME`: two releases of an engine, each decoded by servers of its own."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import PLUGIN, Scripted, install
from typer.testing import CliRunner
from whole import forget_plugin_files

from mtbench.cli import main

RELEASES = ("pip:xllamacpp==2026.9.11063", "pip:xllamacpp==2026.10.11549")
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


MINE = """
import os
from dataclasses import replace
from mtbench.clients.serving_engine import RELEASE
from mtbench.decoding.registry import SERVING_ENGINES

@SERVING_ENGINES.register("mine")
class Mine(SERVING_ENGINES["llamacpp"]):
    def launch(self, python, serving, port):
        threads = {threads} if os.environ[RELEASE].endswith({release!r}) else serving.threads
        return super().launch(python, replace(serving, threads=threads), port)
"""


def llamacpp(directory: Path, base: str, head: str, *words: Any) -> tuple[int, dict[str, Any]]:
    """Gate two releases of llama.cpp on small work."""
    arms = ("--method", "ar", "--method", "prompt-lookup:ahead=4", "--dtype", "float32", "--limit", 32)
    size = ("--batch-size", 1, "--blocks", 8, "--rounds", 3, "--pairs", 20, "--max-slowdown", 50, "--interleave")
    return gate(directory, "--base", base, "--head", head, *arms, *size, "--allow-dirty", *words)


@pytest.mark.slow
def test_two_releases_of_llamacpp_are_equal(tmp_path: Path) -> None:
    """Real releases: the same tokens and accepted drafts, and head is not slower."""
    code, found = llamacpp(tmp_path / "gate", *RELEASES, "--engine", "llamacpp")
    assert (found["word"], code) == ("PASS", 0), found["reason"]
    assert len(found["timed"]) == 2


@pytest.mark.slow
def test_more_threads_than_cores_fail(tmp_path: Path) -> None:
    """The threads that head's engine gives its server are planted; tokens and work are equal."""
    file, head = tmp_path / "mine.py", RELEASES[1].removeprefix("pip:")
    file.write_text(MINE.format(release=head, threads=2 * (os.cpu_count() or 1)))
    code, found = llamacpp(tmp_path / "gate", *RELEASES, "--engine", "mine", "--plugin", file)
    assert (found["word"], code) == ("FAIL", 1), found["reason"]
    assert "slower by" in found["reason"]

"""`mtbench gate` on the command line: words, exit codes, files, mistakes in one line, `--resume`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_build import build, calls
from fake_gate import MARS
from scripted_engine import install
from typer.testing import CliRunner, Result
from whole import forget_plugin_files

from mtbench import plugins
from mtbench.cli import main
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.experiments import experiment as frame
from mtbench.experiments.gate import builds
from mtbench.experiments.gate.experiment import EXPERIMENT
from mtbench.experiments.gate.request import GateSession

pytest_plugins = ["gate_fixtures"]
pytestmark = pytest.mark.usefixtures("forks")
OPTIONS = ["--method", "ar", "--method", "mars", "--seed", "3"]
MINE = """
from dataclasses import dataclass
from mtbench import METHODS, Method
@METHODS.register("mine")
@dataclass(frozen=True, kw_only=True)
class Mine(Method):
    roles = ("ar",)
    def window(self): ...
    def accept(self, state, rows, output): ...
"""


@pytest.fixture
def made(tmp_path: Path, plan: Path) -> Callable[..., list[str]]:
    """Options that name two builds, head with these faults."""

    def make(base: dict[str, Any] | None = None, **faults: Any) -> list[str]:
        envs = build(tmp_path / "base", plan, **base or {}), build(tmp_path / "head", plan, **faults)
        return ["--base", str(envs[0]), "--head", str(envs[1]), *OPTIONS]

    return make


def gate(*words: Any) -> Result:
    return CliRunner().invoke(main.app, ["gate", *map(str, words)])


def mistake(*words: Any) -> str:
    result = gate(*words)
    assert isinstance(result.exception, UserError), result.output
    assert "\n" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize(
    ("faults", "options", "word", "code"),
    [
        ({}, ["--counts-only"], "PASS", 0),
        ({"memory": 1.1}, [], "FAIL", 1),
        ({"noise": 0.1}, ["--pairs", "2"], "INCONCLUSIVE", 3),
    ],
)
def test_the_exit_code_is_the_word(
    made: Callable[..., list[str]], tmp_path: Path, faults: dict[str, Any], options: Sequence[str], word: str, code: int
) -> None:
    """The word stands in the terminal, in gate.json and in the page; the last line is the page's path."""
    result = gate(*made(**faults), *options, "-o", tmp_path / "gate")
    assert result.exit_code == code, result.output
    assert word in result.stdout
    assert result.stdout.splitlines()[-1] == str(tmp_path / "gate" / "gate.html")
    assert json.loads((tmp_path / "gate" / "gate.json").read_text())["word"] == word
    assert word in (tmp_path / "gate" / "gate.html").read_text()
    assert word in (tmp_path / "gate" / "gate.md").read_text()


def test_the_builds_get_the_options_of_the_plan(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """As they were given, and at most 100 items unless --limit says otherwise; options of the gate stay here."""
    more = ["--batch-size", "1,8", "--ignore-eos"]
    gate(*made(), *more, "--counts-only", "--time-budget", "1h", "-o", tmp_path / "gate")
    asked = calls(tmp_path / "head")[0][1:-2]
    assert sorted(asked) == sorted([*OPTIONS, *more, "--limit", "100"])
    assert "--time-budget" not in asked


def test_both_builds_import_the_plugin_file(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """Its SHA-256 is stored: with another text the gate does not resume."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    assert gate(*made(), "--counts-only", "--plugin", file, "-o", tmp_path / "gate").exit_code == 0
    for side in ("base", "head"):
        assert {tuple(call[-2:]) for call in calls(tmp_path / side)} == {("--plugin", str(file))}
    stored = json.loads((tmp_path / "gate" / "gate.json").read_text())
    assert stored["head"]["plugins"] == stored["base"]["plugins"] == {str(file): plugins.read_file(file).sha256}
    file.write_text(MINE + "# changed later")
    assert "began with another base" in mistake("-o", tmp_path / "gate", "--resume")
    forget_plugin_files()


@pytest.fixture
def releases(tmp_path: Path, plan: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Options that name two installed releases of an engine; in this environment, the second has these faults."""

    def make(**faults: Any) -> list[str]:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        for release in ("1", "2"):
            install(SERVING_ENGINES["llamacpp"], f"xllamacpp=={release}")
        env = build(tmp_path / "env", plan, releases={"llamacpp=xllamacpp==2": faults})
        monkeypatch.setattr(builds, "sys", SimpleNamespace(executable=str(env / "bin" / "python")))
        return ["--engine", "llamacpp", "--base", "pip:xllamacpp==1", "--head", "pip:xllamacpp==2", *OPTIONS]

    return make


def test_two_releases_of_an_engine(releases: Callable[..., list[str]], tmp_path: Path) -> None:
    """Both are decoded by this environment's mtbench. Fewer accepted drafts are more forward passes."""
    result = gate(*releases(forwards=[MARS]), "-o", tmp_path / "gate")
    stored = json.loads((tmp_path / "gate" / "gate.json").read_text())
    assert (stored["word"], result.exit_code) == ("FAIL", 1), result.output
    assert "forward passes 8 → 9" in stored["reason"]
    assert [stored[side]["label"] for side in ("base", "head")] == ["xllamacpp==1", "xllamacpp==2"]
    assert stored["head"]["engine"] == "llamacpp=xllamacpp==2"
    assert not stored["same_build"]
    assert "llamacpp=xllamacpp==1 → llamacpp=xllamacpp==2" in (tmp_path / "gate" / "gate.md").read_text()
    resumed = gate("-o", tmp_path / "gate", "--resume")
    assert resumed.exit_code == result.exit_code, "the releases are in the gate's request"


def test_a_release_is_asked_for_with_its_engine_and_version(tmp_path: Path) -> None:
    assert "name the engine by --engine: llamacpp," in mistake("--base", "pip:xllamacpp==1")
    asked = mistake("--base", "pip:xllamacpp", "--engine", "llamacpp")
    assert f"give pip:NAME==VERSION, such as pip:{SERVING_ENGINES['llamacpp'].package}" in asked


def test_a_time_budget_ends_a_gate_and_resume_goes_on(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """No pair begins after the budget; the gate is inconclusive until `--resume` has run the rest."""
    ended = gate(*made(), "--time-budget", "0s", "-o", tmp_path / "gate")
    assert ended.exit_code == 3, ended.output
    assert not (tmp_path / "gate" / "pairs").exists()
    resumed = gate("-o", tmp_path / "gate", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads((tmp_path / "gate" / "gate.json").read_text())["pairs"] == 6


def test_mistakes_cost_one_line(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """Each names what is wrong and what to do, and leaves nothing behind."""
    envs, out = made(), tmp_path / "gate"
    assert "--base is missing" in mistake()
    assert "has no bin/python, so it is no virtual environment; give" in mistake("--base", tmp_path / "none")
    assert "--max-slowdown 200 is not allowed" in mistake(*envs, "--max-slowdown", "200", "-o", out)
    assert not out.exists()
    assert "holds nothing of `mtbench gate`" in mistake("-o", out, "--resume")
    gate(*envs, "--counts-only", "-o", out)
    assert f"go on with `mtbench gate -o {out} --resume`" in mistake(*envs, "-o", out)
    assert gate(*envs, "--counts-only", "-o", out, "--resume", "--max-slowdown", 2).exit_code == 0
    assert "has max_slowdown=2.0, not 3.0; go on with" in mistake("-o", out, "--resume", "--max-slowdown", 3)
    plugged = GateSession(out=str(out), resume=True, plugin=("x.py",))
    with pytest.raises(UserError, match="a resumed gate keeps --plugin; go on with"):
        frame.begin(EXPERIMENT, {}, plugged, Terminal(quiet=True), print, [])
    (out / "request.json").write_text("{}")
    assert mistake("-o", out, "--resume", "--max-slowdown", 2) == (
        f"{out / 'request.json'} has no schema version; this mtbench reads 2; start another gate with `mtbench gate -o "
        "DIR`."
    )

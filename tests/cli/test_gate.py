"""`mtbench gate` on the command line: words, exit codes, files, mistakes in one line, `--resume`, `history`."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_build import build, calls
from typer.testing import CliRunner, Result
from whole import plan_of

from mtbench.cli import gating, main, session
from mtbench.errors import UserError
from mtbench.gate.stages import NOT_FINISHED
from mtbench.runs.planner import begin_run

OPTIONS = ["--method", "ar", "--method", "mars", "--seed", "3"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return begin_run(tmp_path_factory.mktemp("plan") / "run", plan_of(4), ["mtbench"]).path


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
    for name in ("gate.junit.xml", "bencher.json", "benchmark-smaller.json", "benchmark-bigger.json"):
        assert (tmp_path / "gate" / name).stat().st_size


def test_the_builds_get_the_options_of_the_plan(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """As they were given, and at most 100 items unless --limit says otherwise; options of the gate stay here."""
    more = ["--batch-size", "1,8", "--fixed-length"]
    gate(*made(), *more, "--counts-only", "--time-budget", "1h", "-o", tmp_path / "gate")
    asked = calls(tmp_path / "head")[0][1:-2]
    assert sorted(asked) == sorted([*OPTIONS, *more, "--limit", "100"])
    assert "--time-budget" not in asked


def test_a_seed_may_be_negative(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """As everywhere in mtbench."""
    result = gate(*made()[:4], "--method", "ar", "--seed", "-1", "--counts-only", "-o", tmp_path / "gate")
    assert result.exit_code == 0, result.output


def test_github_gets_a_summary_and_marks(
    made: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    result = gate(*made(memory=1.1), "-o", tmp_path / "gate")
    assert "FAIL" in summary.read_text()
    assert any(line.startswith("::error ") for line in result.stdout.splitlines())


def test_a_time_budget_ends_a_gate_and_resume_goes_on(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """No pair begins after the budget; the gate is inconclusive until `--resume` has run the rest."""
    ended = gate(*made(), "--time-budget", "0s", "-o", tmp_path / "gate")
    assert ended.exit_code == 3, ended.output
    assert not (tmp_path / "gate" / "pairs").exists()
    resumed = gate("-o", tmp_path / "gate", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert json.loads((tmp_path / "gate" / "gate.json").read_text())["pairs"] == 6


def test_calibrate_writes_the_floor_beside_the_folder(made: Callable[..., list[str]], tmp_path: Path) -> None:
    base = made(base={"noise": 0.01})[:2]
    result = gate("calibrate", *base, *OPTIONS, "--pairs", 4, "-o", tmp_path / "runs" / "calibration")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == str(tmp_path / "runs" / "floor.json")
    (entry,) = json.loads((tmp_path / "runs" / "floor.json").read_text())["floors"]
    assert entry["pairs"] == 4
    assert len(entry["cells"]) == 2


def test_history_tells_the_share_of_false_alarms(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """Two gates of a build with itself, one of which fails by its memory, and one of two builds."""
    envs = made(memory=1.1)
    same = ["--base", envs[1], "--head", envs[1], *OPTIONS]
    gate(*same, "--counts-only", "-o", tmp_path / "runs" / "a")
    gate(*same, "--counts-only", "-o", tmp_path / "runs" / "b")
    gate(*envs, "-o", tmp_path / "runs" / "c")
    result = gate("history", tmp_path / "runs")
    assert result.exit_code == 0, result.output
    assert "FAIL in 0.0%" in result.stdout
    assert "of the 2 gates" in result.stdout
    assert "no gate" in mistake("history", tmp_path / "base")


def test_history_leaves_out_gates_that_are_not_finished(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """They would make the share of false alarms smaller than it is."""
    envs = made()
    gate("--base", envs[1], "--head", envs[1], *OPTIONS, "--counts-only", "-o", tmp_path / "runs" / "a")
    killed = tmp_path / "runs" / "b" / "gate.json"
    killed.parent.mkdir()
    stored = json.loads((tmp_path / "runs" / "a" / "gate.json").read_text())
    killed.write_text(json.dumps({**stored, "word": "INCONCLUSIVE", "reason": NOT_FINISHED}))
    assert "of the 1 gates" in gate("history", tmp_path / "runs").stdout


def test_history_compares_times_of_one_machine_and_plan(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """A gate on another machine begins a history of its own."""
    gate(*made(base={"noise": 0.001}, noise=0.001), "-o", tmp_path / "runs" / "a")
    stored = json.loads((tmp_path / "runs" / "a" / "gate.json").read_text())
    for name, kernel, times in (("b", "another", 3.0), ("c", stored["key"]["kernel"], 2.0)):
        later = {**stored, "started": "2999-01-01T00:00:00Z", "key": {**stored["key"], "kernel": kernel}}
        later["timed"] = [{**cell, "base_s": [times * s for s in cell["base_s"]]} for cell in stored["timed"]]
        (tmp_path / "runs" / name).mkdir()
        (tmp_path / "runs" / name / "gate.json").write_text(json.dumps(later))
    shown = " ".join(gate("history", tmp_path / "runs").stdout.split())
    assert shown.count("base's time") == 2
    assert shown.count(f"+100.0 % since {stored['started']}, over 2 gates") == 2


def test_a_folder_that_another_command_fills_meanwhile_stays(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """Both began in the same folder, and one of them was faster."""
    envs = made()
    asked = {"base": envs[1], "head": envs[3], "plan_arguments": OPTIONS, "blocks": 4, "pairs": None, "seed": 0}
    asked |= dict.fromkeys(("live", "counts_only", "allow_changed", "allow_torch", "allow_dirty"), False)
    slow = gating.begin(tmp_path / "gate", margin=0.02, **asked)
    (tmp_path / "gate").mkdir()
    (tmp_path / "gate" / "request.json").write_text("of the other")
    with pytest.raises(UserError, match="never overwritten"):
        gating.run(slow, print, None)
    assert (tmp_path / "gate" / "request.json").read_text() == "of the other"


@pytest.mark.parametrize("words", [["gate"], ["gate", "calibrate"]])
def test_an_interrupted_gate_says_how_to_resume(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(**_: object) -> None:
        session.started.append(Path("runs/gate-1"))
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupted)
    monkeypatch.setattr("sys.argv", ["mtbench", *words, "--pairs", "3"])
    with pytest.raises(SystemExit):
        main.main()
    assert f"resume with `mtbench {' '.join(words)} -o runs/gate-1 --resume`" in capsys.readouterr().err


def test_mistakes_cost_one_line(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """Each names what is wrong and what to do, and leaves nothing behind."""
    envs, out = made(), tmp_path / "gate"
    assert "--base is missing" in mistake()
    assert "does not exist; give a virtual environment" in mistake("--base", tmp_path / "none")
    assert "--margin 2 is not allowed" in mistake(*envs, "--margin", "2", "-o", out)
    assert "--resume needs the folder" in mistake("--resume")
    assert "stands before `calibrate`" in mistake("--live", "calibrate")
    assert not out.exists()
    assert "holds no gate" in mistake("-o", out, "--resume")
    gate(*envs, "--counts-only", "-o", out)
    assert "never overwritten" in mistake(*envs, "-o", out)
    assert "--margin cannot change" in mistake("-o", out, "--resume", "--margin", "0.05")


def test_a_refused_gate_leaves_no_folder(made: Callable[..., list[str]], tmp_path: Path) -> None:
    """So that the mended command needs no other `-o`."""
    assert "--allow-torch" in mistake(*made(torch="3"), "-o", tmp_path / "gate")
    assert not (tmp_path / "gate").exists()

"""The frame of experiments: what a new one gets from its options, its plan and its lines (experiments/experiment.py).

helpers/timed_twice.py is the new one.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from timed_twice import TIMES
from typer.testing import CliRunner, Result

import mtbench
from mtbench import api
from mtbench.cli import experiments
from mtbench.errors import UserError
from mtbench.experiments import experiment as frame
from mtbench.experiments import registry
from mtbench.experiments.registry import Kind
from mtbench.plan.directory import DIRECTORIES


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Kind("timed_twice:TwiceRequest,Session", "timed_twice:EXPERIMENT", "Time one prompt twice.")
    monkeypatch.setitem(registry.KINDS, "twice", kind)
    TIMES[:] = [1.0, 3.0]


def twice(*words: Any) -> Result:
    return CliRunner().invoke(experiments.command("twice"), [str(word) for word in words])


def mistake(*words: Any) -> str:
    result = twice(*words)
    assert isinstance(result.exception, UserError), result.output
    return str(result.exception)


def test_a_command_with_help_results_and_a_page(tmp_path: Path) -> None:
    """Help has bounds' units and defaults as text; the last line is the page; JSON goes where it is asked for."""
    shown = " ".join(
        CliRunner().invoke(experiments.command("twice"), ["--help"], env={"COLUMNS": "200"}).output.split()
    )
    assert "Time one prompt twice." in shown
    assert "--time-limit" in shown
    assert "[default: 60s]" in shown
    result = twice("-o", tmp_path / "x", "--json", tmp_path / "x.json", "--time-limit", "1m")
    assert result.output.splitlines() == ["ratio 3.00", str(tmp_path / "x" / "twice.md")]
    assert json.loads((tmp_path / "x.json").read_text()) == {"ratio": 3.0}
    assert json.loads((tmp_path / "x" / "request.json").read_text())["limit_s"] == 60.0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--repeats", 10], "--repeats 10 is not allowed; it is a whole number from 1 to 9."),
        (["--prompt", " "], "--prompt is empty; give a text."),
        (["--resume"], "--resume needs the directory: `mtbench twice -o DIR --resume`."),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(words: list[Any], reason: str, tmp_path: Path) -> None:
    out = [] if "--resume" in words else ["-o", tmp_path / "x"]
    assert mistake(*words, *out) == reason
    assert not list(tmp_path.iterdir())


def test_a_killed_one_goes_on(tmp_path: Path) -> None:
    """With its own options and lines. Another value is refused; what `--resume` may change is changed."""
    out = tmp_path / "x"
    TIMES[1:] = [KeyboardInterrupt()]
    assert isinstance(twice("-o", out, "--repeats", 3).exception, BaseException | None)
    assert frame.started[-1] == out
    assert "never overwritten" in mistake("-o", out)
    assert "has repeats=3, not 4; go on with `mtbench twice -o" in mistake("-o", out, "--repeats", 4, "--resume")
    TIMES[:] = [2.0]
    assert "ratio 2.00" in twice("-o", out, "--repeats", 3, "--offline", "--resume").output
    assert "ratio 2.00" in twice("-o", out, "--resume").output


def test_one_that_stopped_before_it_had_begun_begins_again(tmp_path: Path) -> None:
    """Its command says what it was to be. A directory with anything else stays as it is."""
    out = tmp_path / "x"
    assert "holds nothing of `mtbench twice`: it has no request.json" in mistake("-o", out, "--resume")
    out.mkdir()
    for name in ("environment.json", ".request.json.abcdefgh.tmp", ".lock"):
        (out / name).touch()
    assert "Repeat the command that started it" in mistake("-o", out, "--resume")
    assert twice("-o", out, "--resume", "--repeats", 1).exception is None
    (out / "request.json").rename(out / "notes.txt")
    kept = {path.name for path in out.iterdir()}
    assert "holds nothing of" in mistake("-o", out, "--resume", "--repeats", 1)
    assert {path.name for path in out.iterdir()} == kept


@pytest.mark.parametrize("made_by", DIRECTORIES)
def test_a_directory_of_another_command_is_named(made_by: str, tmp_path: Path) -> None:
    """With the command that resumes it, also where a run is to be read."""
    what, name, key = DIRECTORIES[made_by]
    (tmp_path / name).write_text(json.dumps({key: 1}))
    says = f"{str(tmp_path)!r} is {what}; continue it with `mtbench {made_by} -o {tmp_path} --resume`."
    assert mistake("-o", tmp_path, "--resume") == says
    if what not in ("a run", "a race"):
        with pytest.raises(UserError) as refused:
            mtbench.read(tmp_path)
        assert str(refused.value) == says


def test_a_library_call_takes_the_same_options(tmp_path: Path) -> None:
    """Values, or texts as on the command line; the same mistakes."""
    job, found = api._carry_out("twice", {"time_limit": "2m", "out": tmp_path / "x"}, progress=False)
    assert (found.ratio, job.request.limit_s) == (3.0, 120.0)
    with pytest.raises(UserError, match=r"unknown option of mtbench.twice 'repeat' \(did you mean 'repeats'\?\)"):
        api._carry_out("twice", {"repeat": 3}, progress=False)

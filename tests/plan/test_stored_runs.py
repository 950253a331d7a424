"""A stored run: what its plan does not allow, damaged files, one command at a time, what a resumed command decodes."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stages
from service import Service, serving
from stages import assemble, due, generate, score
from stored import keep_lines, stored_json, stored_lines
from typer.testing import CliRunner
from whole import Quiet, finish, start

from mtbench.cli.run import app
from mtbench.errors import UserError
from mtbench.evaluation.suite import Source
from mtbench.lineup.engine_arms import servers_of
from mtbench.plan import prompts
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import RunRequest
from mtbench.plan.request import Execution
from mtbench.records import dump

REQUEST = RunRequest(method=("ar",), limit=2, batch_size=(1,), rounds=1, max_new_tokens=4)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return start(tmp_path / "run", REQUEST)


def edit(run: RunDirectory, change: Callable[[Any], None]) -> None:
    """Change the stored plan."""
    plan = stored_json(run, "plan.json")
    change(plan)
    run.write_json("plan.json", plan)


# --- What a plan allows -------------------------------------------------------------------------------------------


def test_a_plan_never_switches_the_sandbox_off(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the option of this command does, and results.json records how the answers were scored."""
    opened: list[bool] = []

    class Seen(Source):
        def __init__(self, **values: Any) -> None:
            opened.append(values["unsandboxed"])
            super().__init__(**values)

    generate(run, Quiet())
    edit(run, lambda plan: plan["request"].update(allow_unsandboxed_code=True))
    monkeypatch.setattr(prompts, "Source", Seen)
    score(run)
    score(run)
    assert opened == [False, False]
    score(run, unsandboxed=True)
    assert opened[2:] == [True]


def test_results_have_the_task_as_it_was_scored(run: RunDirectory) -> None:
    """A plan that claims a sandbox does not decide what results.json says about one."""
    generate(run, Quiet())
    edit(run, lambda plan: plan["suites"][0]["task"].update(sandbox=True))
    assert dump(assemble(run))["cells"][0]["task"]["sandbox"] is True
    score(run)
    results = dump(assemble(run))
    assert "sandbox" not in results["cells"][0]["task"]
    assert "scored_as" not in results["environment"]


@pytest.fixture
def listener() -> Iterator[Service]:
    with serving(Service(lambda _: ([5], "stop", None), lambda _: "x")) as service:
        yield service


def test_a_plan_sends_nothing_to_a_server_that_the_command_does_not_name(
    tmp_path: Path, listener: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to another address, nor with another environment variable as its key."""
    monkeypatch.setenv("MINE", "secret")
    arm = f"openai:url={listener.url},api_key_env=MINE"
    request = REQUEST.changed(method=("ar", arm))
    run = start(tmp_path / "run", request)
    named = f"{listener.url}=MINE"
    for servers in ((), {listener.url}, {f"{listener.url}=OTHER"}, {"http://127.0.0.1:9/v1=MINE"}):
        with pytest.raises(UserError, match=r"^the plan asks the server \S*=MINE', which .*`--server \S*=MINE`"):
            generate(run, Quiet(), Execution(servers=frozenset(servers)))
    assert listener.seen == []
    assert servers_of(request) == {named}  # `mtbench run` names those of its own --method
    generate(run, Quiet(), Execution(servers=frozenset({named})))
    assert {headers["authorization"] for _, headers, _ in listener.seen} == {"Bearer secret"}
    generate(run, Quiet())  # nothing is left to ask


# --- Locks --------------------------------------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from mtbench.plan.directory import RunDirectory
with RunDirectory(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    time.sleep(60)
"""


@pytest.mark.whole
@pytest.mark.usefixtures("forks")
def test_a_second_command_on_a_run_is_refused_until_the_first_has_ended_or_crashed(run: RunDirectory) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run.path)], stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        first.stdout.readline()
        before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
        for stage in (
            lambda: generate(run, Quiet()),
            lambda: score(run),
            lambda: stages.finish(run, Execution(), Quiet()),
            lambda: stages.report(run),
        ):
            with pytest.raises(UserError, match=r"^another mtbench command works on '[^\n]*run'; wait[^\n]*$"):
                stage()
        assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
        first.kill()
    generate(run, Quiet())
    [cell] = stored_json(run, "plan.json")["cells"]
    assert len(stored_lines(run, f"timings/{cell['cell']}.jsonl")) == 2


def test_a_file_system_without_locks_is_one_line(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(UserError, match=r"^cannot lock \S+\.lock \([^\n]+\); [^\n]*a file system with locks\.$"):
        generate(run, Quiet())


@pytest.mark.parametrize("name", ["failures.jsonl", ".lock"])
def test_nothing_is_written_through_a_link(run: RunDirectory, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_text("mine")
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(outside)
    with pytest.raises(UserError, match=rf"^cannot write [^\n]*{name}"), run.locked():
        run.append(name, [{"cell": "a", "error": "b"}])
    assert outside.read_text() == "mine"


# --- Damaged files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "damage", "says"),
    [
        ("plan.json", lambda text: text[:-9], r"plan\.json: not JSON"),
        ("plan.json", lambda text: text.replace('"method": "ar"', '"method": "as"', 1), r"plan\.json: .*method.*'as'"),
        ("environment.json", None, r"environment\.json is missing"),
        ("timings", lambda text: f"{text}{{}}\n", r"timings/\S+\.jsonl, line 3: \S+ is missing"),
        ("generations", lambda text: f"{text[:9]}\n{text}", r"generations/\S+\.jsonl, line 1: not JSON"),
        ("generations", lambda text: f'{text}{{"item', None),  # a torn last line was never complete
    ],
)
def test_a_damaged_file_is_one_line(
    run: RunDirectory, file: str, damage: Callable[[str], str] | None, says: str | None
) -> None:
    """It names the file, of JSONL the line, and what is wrong there."""
    finish(run)
    path = run.path / file
    [path] = [path] if path.suffix else path.iterdir()
    path.write_text(damage(path.read_text())) if damage else path.unlink()
    if says is None:
        assemble(run)
        return
    with pytest.raises(UserError, match=rf"^[^\n]*{says}[^\n]*$"):
        assemble(run)


@pytest.mark.parametrize(
    ("folder", "change", "says"),
    [
        ("generations", {"item": "another"}, r"the plan has no 'another' in block 0; "),
        ("generations", {"block": 1}, r"the plan has no '\S+' in block 1; "),
        ("timings", {"block": 9}, r"the plan has no block 9; "),
    ],
)
def test_a_line_that_is_not_in_the_plan_is_refused(
    run: RunDirectory, folder: str, change: dict[str, Any], says: str
) -> None:
    generate(run, Quiet())
    [path] = (run.path / folder).iterdir()
    file = f"{folder}/{path.name}"
    first, *others = stored_lines(run, file)
    keep_lines(run, file, [first | change, *others])
    with pytest.raises(UserError, match=rf"^[^\n]*{file}: {says}[^\n]*$"):
        assemble(run)


def test_a_timed_block_without_its_answers_is_not_resumed(run: RunDirectory) -> None:
    generate(run, Quiet())
    [answers] = (run.path / "generations").iterdir()
    answers.write_text("")
    with pytest.raises(UserError, match=r"^[^\n]*generations[^\n]*: block 0 was timed, and its answer to '"):
        generate(run, Quiet())


# --- Scores -------------------------------------------------------------------------------------------------------


def test_answers_without_a_score_are_scored_again_whatever_the_clock_says(run: RunDirectory) -> None:
    """Modification times decide nothing. Until then every cell says how many of its answers are scored."""
    results = finish(run)
    assert not due(run)
    [scored] = stored_json(run, "scores.json").values()
    scored.popitem()
    run.write_json("scores.json", {results["cells"][0]["cell"]: scored})  # newer than the answers
    assert due(run)
    [cell] = dump(assemble(run))["cells"]
    assert "1 of 2 answers are scored; score them all with `mtbench score`" in cell["flags"]
    file = f"generations/{cell['cell']}.jsonl"
    lines = stored_lines(run, file)
    keep_lines(run, file, [line for line in lines if line["item"] not in scored])
    [fewer] = dump(assemble(run))["cells"]
    assert {flag.partition(" answers are ")[0] for flag in fewer["flags"]} >= {"1 of 2 timed", "0 of 1"}
    keep_lines(run, file, lines)
    assert due(run)
    score(run)
    [cell] = dump(assemble(run))["cells"]
    assert not any("answers are scored" in flag for flag in cell["flags"])


# --- A changed plan ---------------------------------------------------------------------------------------------


def test_a_cell_does_not_go_on_with_an_option_that_its_method_did_not_have(tmp_path: Path) -> None:
    """Its earlier blocks may be those of another default. Nothing is refused before a session, or if all is there."""
    run = start(tmp_path / "run", REQUEST.changed(method=("ar", "prompt-lookup")))
    edit(run, lambda plan: plan["cells"][1]["options"].pop("match"))
    generate(run, Quiet(), Execution(time_budget_s=0.0))
    with pytest.raises(UserError, match=r"prompt-lookup\S* began before prompt-lookup had the option 'match', so "):
        generate(run, Quiet())
    edit(run, lambda plan: plan["cells"][1]["options"].update(match="latest"))
    generate(run, Quiet())
    edit(run, lambda plan: plan["cells"][1]["options"].pop("match"))
    generate(run, Quiet())


def test_generate_ends_with_1_if_a_cell_failed(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script made of stages sees it; a failed scoring is not its business."""
    monkeypatch.setattr("mtbench.measure.executor.generate", lambda *_: None)
    [cell] = (cell["cell"] for cell in stored_json(run, "plan.json")["cells"])
    run.append("failures.jsonl", [{"cell": cell, "error": "no", "stage": "score"}])
    assert CliRunner().invoke(app, ["generate", str(run.path)]).exit_code == 0
    run.append("failures.jsonl", [{"cell": cell, "error": "no"}])
    assert CliRunner().invoke(app, ["generate", str(run.path)]).exit_code == 1

"""`mtbench choose`: a race on the embedded checkpoints, its decision, and what a kill does to it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from whole import Quiet

from mtbench.choose.candidates import candidates
from mtbench.choose.decide import decide
from mtbench.choose.format import Decision
from mtbench.choose.runner import Racing, begin, plan_race, race_of
from mtbench.choose.terminal import decision_tables
from mtbench.cli import choose as command
from mtbench.cli import ls
from mtbench.errors import UserError
from mtbench.records import dump
from mtbench.report import pipeline
from mtbench.runs import lifecycle
from mtbench.runs.directory import RunDirectory
from mtbench.runs.executor import generate
from mtbench.runs.formats import LeftLine, Race
from mtbench.runs.plan_checks import read_plan
from mtbench.runs.run_request import Execution, RunRequest

LOSS = 0.02
ARMS = ("speculative", "mars:tau=0.5", "jacobi:ahead=30")


def begun(path: Path, objective: str = "speed") -> Racing:
    """A race of a few arms on 64 items: eight blocks of eight, 24 of one."""
    request = RunRequest(family="tiny", method=ARMS, batch_size=(1, 8), limit=64)
    found = candidates(request)
    plan = plan_race(request, found, LOSS)
    race = race_of(plan, found, objective, LOSS, {})  # type: ignore[arg-type]
    return again(begin(path, plan, race, ["mtbench", "choose"]))


def again(run: RunDirectory) -> Racing:
    """What another process makes of the run."""
    return Racing(run, read_plan(run), run.read("race.json", Race), Execution())


def left(racing: Racing) -> dict[str, LeftLine]:
    return {line.cell: line for line in racing.run.read_lines("left.jsonl", LeftLine)}


def finish(racing: Racing) -> Decision:
    return decide(racing, pipeline.finish(racing.run, racing.executing(), Quiet(), pages=False))


def test_the_largest_batch_size_comes_first_and_has_all_items(tmp_path: Path) -> None:
    racing = begun(tmp_path / "race")
    assert [group.batch_size for group in racing.plan.groups] == [8, 1]
    with pytest.raises(UserError, match="is a race; go on with `mtbench choose"):
        lifecycle.reopen(racing.run.path, racing.plan.request, ())
    assert racing.race.looks == {"arithmetic b8": [6, 8], "arithmetic b1": [6, 8, 11, 16, 24]}


@pytest.mark.whole
def test_a_killed_race_decides_what_its_stored_lines_say(tmp_path: Path) -> None:
    """Killed in a block, and again between a look and the line of who left: the lines are those of one replay."""
    racing = begun(tmp_path / "race")
    with pytest.raises(KeyboardInterrupt):
        generate(racing.run, Quiet(until=14), racing.executing())
    second = again(racing.run)
    with pytest.raises(KeyboardInterrupt):
        generate(second.run, Quiet(until=16), second.executing())
    lines = racing.run.lines("left.jsonl")
    racing.run.keep_lines("left.jsonl", lines[:-1])
    third = again(racing.run)
    decision = finish(third)
    stored = left(third)

    assert racing.run.lines("left.jsonl")[: len(lines)] == lines
    replayed = {gone.name: gone for group in third.plan.groups for gone in again(third.run).outcome(group).left}
    assert {name: (line.block, line.lost) for name, line in stored.items()} == {
        name: (gone.block, gone.lost) for name, gone in replayed.items()
    }
    wrong = "arithmetic.mars-tau0.5.mars.graph.b8"
    assert (stored[wrong].block, stored[wrong].lost) == (6, True)
    assert stored[wrong.replace("b8", "b1")].block == 0
    assert decision.complete
    assert dump(decide(again(third.run), pipeline.finish(third.run, Execution(), Quiet(), pages=False))) == dump(
        decision
    )


@pytest.mark.whole
def test_a_decision_names_the_arm_the_looks_and_what_was_saved(tmp_path: Path) -> None:
    racing = begun(tmp_path / "race")
    results = pipeline.finish(racing.run, racing.executing(), Quiet(), pages=False)
    decision = decide(racing, results)
    assert json.loads((racing.run.path / "decision.json").read_text()) == dump(decision)
    assert decision.headline.startswith("On this demonstration: ")
    assert [rec.batch_size for rec in decision.recommendations] == [8, 1]
    assert decision.looks[0].made[0] == 6
    assert 0 < decision.spent.forwards < decision.spent.forwards_full
    gone = next(g for g in decision.left if g.arm.startswith("mars") and g.batch_size == 8)
    assert gone.reason == "loses more accuracy than accepted"
    assert len(decision_tables(results, decision)) == 2
    assert {cell.status for cell in results.cells} <= {"ok", "left"}


@pytest.mark.slow
def test_the_least_memory_is_one_measurement(tmp_path: Path) -> None:
    """No arm leaves for its speed; the allowed arm with the least is chosen."""
    decision = finish(begun(tmp_path / "race", "memory"))
    assert [least.batch_size for least in decision.least] == [8, 1]
    assert all("one measurement" in least.text for least in decision.least)
    assert not any("slower" in gone.reason for gone in decision.left)
    assert decision.headline.startswith("At batch size 8: ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--objective", "size"], "objective 'size'"),
        (["--max-loss", "0"], "--max-loss 0 is not allowed"),
        (["--slo", "e2e=5s"], "--slo 'e2e=5s' is not allowed"),
        (["--resume"], "--resume needs the directory: `mtbench choose -o DIR --resume`"),
        (["--resume", "-o", "x", "--suite", "gsm8k"], "--suite cannot change"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], message: str) -> None:
    result = CliRunner().invoke(command.app, words)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)


def test_the_arms_that_can_be_raced_are_listed() -> None:
    result = CliRunner().invoke(ls.app, ["arms", "--family", "tiny"])
    assert result.exception is None
    assert "mars:tau=0.95@mars/graph" in result.stdout
    assert "hf-generate" in result.stdout.partition("Cannot be raced")[2]

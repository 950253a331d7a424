"""`mtbench choose`: a race on the embedded checkpoints, its decision, and what a kill does to it."""

import html
import importlib.util
import io
import shutil
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from stored import keep_lines, stored_json, stored_lines
from typer.testing import CliRunner, Result
from whole import Quiet, forget_plugin_files

import mtbench
from mtbench import Chosen, plugins
from mtbench.cli import ls, main
from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.experiments import experiment as frame
from mtbench.experiments import pipeline
from mtbench.experiments.choose import experiment as choosing
from mtbench.experiments.choose.decide import decide
from mtbench.experiments.choose.plan import plan_of
from mtbench.experiments.choose.request import RaceRequest, RaceSession
from mtbench.experiments.choose.runner import Racing
from mtbench.lineup import planner
from mtbench.lineup.planner import write_plan
from mtbench.measure.executor import generate
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Elimination, Race
from mtbench.plan.plan import Plan
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.report.arm_names import arm_names, in_words
from mtbench.results.decision_format import Decision
from mtbench.results.format import Results

ROOT = Path(__file__).parents[2]
PLUGIN = ROOT / "examples" / "mtbench-example" / "mtbench_example" / "bigram.py"
ARMS = ("prompt-lookup", "mars:tau=0.5")
RACED = RaceRequest(max_loss=2)


def invoke(words: Sequence[str]) -> Result:
    return CliRunner().invoke(main.app, ["choose", *words])


def begin(path: Path, plan: Plan, race: Race) -> RunDirectory:
    run = RunDirectory.create(path)
    write_plan(run, plan, ["mtbench", "choose"], race)
    return run


def begun(path: Path, *sizes: int) -> Racing:
    """A race of a few arms on 24 items: six blocks of four, twelve of two."""
    planned = plan_of(RACED.changed(family="tiny", method=ARMS, batch_size=sizes, limit=24))
    return again(begin(path, planned.plan, planned.race))


def again(run: RunDirectory) -> Racing:
    """What another process makes of the run."""
    return Racing(Run.open(run), Execution())


def left(racing: Racing) -> dict[str, Elimination]:
    return {line.cell: line for line in racing.run.left}


def finish(racing: Racing) -> Decision:
    return decide(racing, pipeline.finish(racing.run, racing.executing(), Quiet()))


def test_the_largest_batch_size_comes_first_and_has_all_items(tmp_path: Path) -> None:
    racing = begun(tmp_path / "race", 2, 4)
    assert [group.batch_size for group in racing.plan.groups] == [4, 2]
    assert racing.race.looks == {"arithmetic b4": [6], "arithmetic b2": [6, 8, 11, 12]}


@pytest.mark.whole
def test_a_killed_race_decides_what_its_stored_lines_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in a block, and again between a look and the line of who left: the lines are those of one replay."""
    racing, run = begun(tmp_path / "race", 2, 4), RunDirectory(tmp_path / "race")
    with pytest.raises(KeyboardInterrupt):
        generate(racing.run, Quiet(until=14), racing.executing())
    second = again(run)
    with pytest.raises(KeyboardInterrupt):
        generate(second.run, Quiet(until=8), second.executing())
    lines = stored_lines(run, "eliminated.jsonl")
    keep_lines(run, "eliminated.jsonl", lines[:-1])
    third = again(run)
    decision = finish(third)
    stored = left(third)

    assert lines
    assert stored_lines(run, "eliminated.jsonl")[: len(lines)] == lines
    replayed = {gone.cell: gone for group in third.plan.groups for gone in again(run).outcome(group).left}
    assert {name: (line.block, line.lost) for name, line in stored.items()} == {
        name: (gone.block, gone.lost) for name, gone in replayed.items()
    }
    wrong = "arithmetic.mars-tau0.5.mars.graph.b4"
    assert (stored[wrong].block, stored[wrong].lost) == (6, True)
    assert stored[wrong.replace("b4", "b2")].block == 0
    assert decision.complete


@pytest.fixture(scope="module")
def chosen(tmp_path_factory: pytest.TempPathFactory) -> Chosen:
    """The race of examples/choose.py, in which the method of a file takes part. Nothing but the example prints."""
    spec = importlib.util.spec_from_file_location("choose", ROOT / "examples" / "choose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with redirect_stdout(io.StringIO()) as printed, redirect_stderr(io.StringIO()) as errors:
        found: Chosen = module.main(str(tmp_path_factory.mktemp("example") / "race"))
    assert printed.getvalue().startswith(found.decision["headline"])
    assert errors.getvalue() == ""
    return found


def test_a_race_without_plain_decoding_fails(tmp_path: Path) -> None:
    """Nothing can be decided: the exit code is 1. Until its end, the library says how to go on."""
    _, plan, race, *_ = plan_of(RACED.changed(family="tiny", method=("speculative",), batch_size=(8,), limit=8))
    run = begin(tmp_path / "race", plan, race)
    with pytest.raises(UserError, match=r"finish it with `mtbench choose -o .* --resume`"):
        mtbench.read(run.path)
    run.append("failures.jsonl", [{"cell": plan.cells[0].cell, "error": "it failed"}])
    result = invoke(["-o", str(run.path), "--resume"])
    assert result.exit_code == 1
    assert "no arm could be compared with plain decoding" in run.read("decision.json", Decision).headline


@pytest.mark.parametrize(
    ("change", "words", "reason"),
    [
        ({"looks": {}}, [], "race.json: looks has none of group 'arithmetic b4'; restore it, or start another race"),
        ({}, ["--max-loss", "1"], "has max_loss=2.0, not 1.0; go on with `mtbench choose -o"),
        ({}, ["--max-loss", "2"], None),
    ],
)
def test_a_race_goes_on_with_its_own_looks_and_options(
    change: dict[str, Any], words: list[str], reason: str | None, tmp_path: Path
) -> None:
    run = begun(tmp_path / "race", 4).run.directory
    run.write_json("race.json", stored_json(run, "race.json") | change)
    session = RaceSession(out=str(run.path), resume=True)
    given = {"max_loss": float(words[1])} if words else {}

    def resume() -> RaceRequest:
        return frame.begin(choosing.EXPERIMENT, given, session, Terminal(quiet=True), print, []).request

    if reason is None:
        assert resume().max_loss == 2
        return
    with pytest.raises(UserError) as refused:
        resume()
    assert reason in str(refused.value)


def test_a_race_is_decoded_by_its_own_command_only(tmp_path: Path) -> None:
    """`mtbench generate` makes no looks: it would decode what has left."""
    RunDirectory(tmp_path).write_json("plan.json", {})
    RunDirectory(tmp_path).write_json("race.json", {"looks": {}})
    error = CliRunner().invoke(main.app, ["generate", str(tmp_path)]).exception
    assert "is a race; continue it with `mtbench choose" in str(error)


@pytest.mark.whole
@pytest.mark.parametrize("blocks", [None, "fewer"])
def test_a_report_decides_a_race_from_its_stored_blocks(race: RunDirectory, tmp_path: Path, blocks: str | None) -> None:
    """Killed before its decision, or resumed after one and killed.

    Its table and its decision are of the same blocks and rules. It is not judged by the rule of other runs.
    """
    run, made = RunDirectory(Path(shutil.copytree(race.path, tmp_path / "race"))), stored_json(race, "decision.json")
    (run.path / "decision.json").unlink()
    if blocks is not None:
        spent = made["spent"] | {"decoding_s": 1.0}
        run.write_json("decision.json", made | {"headline": "that of before", "spent": spent})
    choosing.report(Run.open(run))
    assert stored_json(run, "decision.json") == made
    assert in_words(made["headline"], arm_names(run.read("results.json", Results).cells)) in html.unescape(
        (run.path / "report.html").read_text()
    )


def test_a_race_takes_the_items_of_64_blocks() -> None:
    assert RaceRequest().run_request().limit == 512
    assert RaceRequest(limit=None).run_request().limit is None


def test_too_few_tokens_for_a_grade_are_told_of_beforehand() -> None:
    request = RaceRequest(method=["suffix"], batch_size=(2,), limit=12, max_new_tokens=64, dtype="bfloat16")
    assert any("at most 768 tokens of plain decoding; 2,000 are needed" in w for w in warnings_of(request))
    assert not any("rounding" in w for w in warnings_of(request.changed(limit=40)))


def test_a_race_with_too_few_tokens_for_a_grade_runs_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU whose fastest type is bfloat16, unless a type is named: there other tokens rule out an arm."""
    monkeypatch.setattr(planner, "fastest_dtype", lambda *_, **__: "bfloat16")
    request = RaceRequest(method=["suffix"], batch_size=(2,), limit=12, max_new_tokens=64, device="cpu")
    few, enough, named = (request, request.changed(limit=40), request.changed(dtype="bfloat16"))
    assert [plan_of(r).plan.request.dtype for r in (few, enough, named)] == ["float32", "bfloat16", "bfloat16"]
    assert any("so it runs in float32" in warning for warning in warnings_of(few))
    within = plan_of(enough, time_budget_s=60)
    assert within.plan.request.dtype == "float32", "only six blocks are certain"
    assert any("in 6 blocks 768 tokens of plain decoding" in warning for warning in within.warnings)


def warnings_of(request: RaceRequest) -> list[str]:
    return plan_of(request).warnings


@pytest.fixture
def race(chosen: Chosen) -> RunDirectory:
    """The race with its plugin imported, which another test may have forgotten."""
    plugins.load_file(PLUGIN)
    return RunDirectory(chosen.results.directory)


@pytest.mark.whole
def test_a_decision_names_the_arm_the_looks_and_what_was_saved(chosen: Chosen, race: RunDirectory) -> None:
    assert stored_json(race, "decision.json") == chosen.decision
    assert stored_json(race, "results.json") == chosen.results.record
    decision, results = race.read("decision.json", Decision), race.read("results.json", Results)
    assert decision.headline.startswith("On this demonstration, ")
    assert [rec.batch_size for rec in decision.recommendations] == [4]
    assert decision.looks[0].made[0] == 6
    assert 0 < (decision.spent.forwards or 0) < (decision.spent.forwards_full or 0)
    wrong = next(cell for cell in results.cells if cell.method == "mars" and cell.batch_size == 4)
    assert wrong.left is not None
    assert wrong.left.reason == "loses more accuracy than accepted"
    assert {cell.status for cell in results.cells} <= {"ok", "left"}


@pytest.mark.whole
def test_a_method_of_a_file_is_raced(chosen: Chosen, race: RunDirectory, tmp_path: Path) -> None:
    """The plan has its hash; whoever goes on with the race must name it, and decides the same."""
    assert [*stored_json(race, "plan.json")["plugins"]] == [str(PLUGIN)]
    assert {c["batch_size"] for c in chosen.results.record["cells"] if c["method"] == "bigram"} == {4}
    forget_plugin_files()
    named = ["-o", str(race.path), "--resume"]
    refused = invoke(named).exception
    assert isinstance(refused, UserError)
    assert f"add `--plugin {PLUGIN}`" in str(refused)
    copied = tmp_path / "decision.json"
    again = invoke([*named, "--plugin", str(PLUGIN), "--json", str(copied)])
    assert again.exception is None
    assert stored_json(race, "decision.json") == chosen.decision
    assert copied.read_bytes() == (race.path / "decision.json").read_bytes()


MISTAKES = [
    ({"method": ["auto", "mars"]}, "--method auto names all arms that can run"),
    ({"slo": "e2e=5s"}, "'e2e' is not known; limits: ttft, itl"),
    ({"suite": ["arithmetic", "gsm8k"]}, "one race has one suite, not arithmetic, gsm8k; race each by itself"),
    ({"family": "tiny", "method": "suffix", "limit": 1, "metric": "best"}, "metric 'best'"),
    ({"family": "tiny", "method": "suffix:engine=eager"}, "the engine of plain decoding; give `--engine eager`"),
]


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_a_mistake_is_one_line(options: dict[str, Any], message: str) -> None:
    """The same for the command and the library."""
    several = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    words = [
        word for name, values in several.items() for one in values for word in (f"--{name.replace('_', '-')}", one)
    ]
    result = invoke([str(word) for word in words if word is not True])
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    with pytest.raises(UserError) as error:
        mtbench.choose(**options)
    assert str(error.value) == str(result.exception)


def test_the_arms_that_can_be_raced_are_listed() -> None:
    """Those of a file, too."""
    result = CliRunner().invoke(ls.app, ["arms", "--family", "tiny", "--plugin", str(PLUGIN)])
    assert result.exception is None
    assert "mars:tau=0.95@mars/graph" in result.stdout
    assert "bigram@ar/graph" in result.stdout.partition("Cannot be raced")[0]
    assert "hf-generate" in result.stdout.partition("Cannot be raced")[2]

"""`mtbench reproduce`: a published table as a run, and which of its figures are inside our intervals."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stages import read_stored
from stored import stored_json
from whole import whole_run

import mtbench
from mtbench.cli import main
from mtbench.decoding.arms import parse_arms
from mtbench.errors import UserError
from mtbench.experiments.reproduce import EXPERIMENT
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan
from mtbench.plan.request import ReproduceRequest, RunRequest, RunSession
from mtbench.records import dump
from mtbench.results.figure_formats import Publication, PublishedFigure
from mtbench.results.format import Results
from mtbench.results.publication import Benchmark, Published, PublishedRow, Ran, compare, names, published

MINIATURE: dict[str, Any] = {"family": "tiny", "suite": ("arithmetic",), "limit": 2, "rounds": 1, "max_new_tokens": 3}
MINIATURE |= {"batch_size": (2,), "device": "cpu"}
TOKENS = 24


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def planned(name: str, **given: Any) -> Plan:
    return EXPERIMENT.plan(ReproduceRequest(name=name, **given), RunSession())


@pytest.mark.parametrize("name", names())
def test_every_table_is_planned(name: str) -> None:
    """Every row has its arm in the plan, or a reason; the settings are the table's where none are given."""
    table, plan = published(name), planned(name, **MINIATURE)
    arms, said = {cell.arm for cell in plan.cells}, "\n".join(EXPERIMENT.warnings(plan))
    for row in table.rows:
        [arm] = parse_arms([row.arm], [table.plan.engine])
        assert str(arm) in arms or f"not run: {row.arm}: family 'tiny' has no" in said
    asked = plan.request
    assert plan.publication == name
    assert (asked.protocol, asked.temperature) == ("paper", table.plan.temperature)
    assert asked.engine == (table.plan.engine,)
    assert asked.chat_template_kwargs == table.plan.chat_template_kwargs
    assert {str(parse_arms([spec], asked.engine)[0]) for spec in table.plan.beside} <= arms


def test_what_cannot_be_planned_is_refused_in_a_line() -> None:
    with pytest.raises(UserError, match=r"unknown published table 'mars-table-7' \(did you mean"):
        planned("mars-table-7")
    with pytest.raises(UserError, match=r"several families; give `--family` qwen2.5-0.5b or qwen2.5-7b"):
        planned("mars-table-2")
    with pytest.raises(UserError, match="nothing of mars-table-9 can be run here: "):
        planned("mars-table-9", offline=True)


def test_random_weights_fill_the_roles_of_every_row() -> None:
    """As in a run, which needs a suite without a metric, and an acceptance."""
    random = {name: value for name, value in MINIATURE.items() if name != "family"}
    random |= {"weights": "random:qwen2.5-0.5b", "suite": ("synthetic:8x20",), "simulate_acceptance": "length=2"}
    plan = planned("mars-table-9", **random)
    arms, table = {cell.arm for cell in plan.cells}, published("mars-table-9")
    assert {str(parse_arms([row.arm], plan.request.engine)[0]) for row in table.rows} <= arms
    with pytest.raises(UserError, match="'arithmetic' scores accuracy"):
        planned("mars-table-9", **random | {"suite": ("arithmetic",)})


def test_a_cluster_decides_what_its_dtype_is() -> None:
    plans = [
        EXPERIMENT.plan(ReproduceRequest(name="mars-table-9", **MINIATURE), RunSession(ray=ray))
        for ray in (None, "local")
    ]
    assert [plan.request.dtype == "auto" for plan in plans] == [False, True]


def own_table(**row: Any) -> Published:
    """A table of the embedded family with one row: its figures measure the same as ours."""
    table = published("mars-table-9")
    return table.changed(
        setup=table.setup.changed(max_new_tokens=TOKENS),
        benchmarks={"sums": Benchmark(suite="arithmetic", items=12)},
        families={"tiny": {}},
        rows=[PublishedRow(**{"row": "r", "family": "tiny"} | row)],
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run of two blocks of six, by the protocol of papers."""
    torch.set_num_threads(1)
    asked = RunRequest(
        family="tiny",
        method=("ar:on=mars", "mars:tau=0.5", "speculative:ahead=7,verify=rejection"),
        batch_size=(2,),
        limit=12,
        rounds=1,
        max_new_tokens=TOKENS,
        protocol="paper",
        device="cpu",
    )
    return whole_run(tmp_path_factory.mktemp("own"), asked)


def compared(run: RunDirectory, table: Published, **asked: Any) -> list[PublishedFigure]:
    stored, results = read_stored(run), run.read("results.json", Results)
    plan = stored.plan.changed(request=stored.plan.request.changed(**asked)) if asked else stored.plan
    return compare(table, plan, [Ran(stored.cells[cell.cell], cell) for cell in results.cells])


def one(run: RunDirectory, arm: str, quantity: str, printed: str = "1.00", **given: Any) -> PublishedFigure:
    table = own_table(arm=arm, figures={quantity: {"sums": printed}}, **given)
    [figure] = compared(run, table)
    return figure


def test_a_figure_is_inside_our_interval_or_not(own: RunDirectory) -> None:
    """Rounded figures reach half a unit of their last digit further."""
    result = next(cell for cell in own.read("results.json", Results).cells if cell.method == "mars")
    assert result.accuracy is not None
    assert result.accuracy.ci_high is not None
    high = 100 * result.accuracy.ci_high
    for printed, inside in ((f"{high:.1f}", True), (f"{high + 0.2:.1f}", False), (f"{high:.0f}", True)):
        found = one(own, "mars:tau=0.5", "accuracy", printed)
        assert (found.inside, found.why) == (inside, "")
        assert found.ours.value == pytest.approx(100 * (result.accuracy.value or 0))


def test_figures_are_counted_as_the_papers_count(own: RunDirectory) -> None:
    """What the last forward accepted after the end; of DeepSpec only beyond the budget. Changes are paired."""
    cells = {data.cell.method: data for data in read_stored(own).cells.values()}
    lines = cells["mars"].lines.values()
    beyond = sum(line.surplus or 0 for line in lines)
    tokens, forwards = sum(len(line.token_ids) for line in lines), sum(line.forwards or 0 for line in lines)
    assert beyond
    assert one(own, "mars:tau=0.5", "tokens_per_forward").ours.value == pytest.approx((tokens + beyond) / forwards)

    lines = cells["speculative"].lines.values()
    steps = [step for line in lines for step in line.commits or () if step]
    cut = sum(line.surplus or 0 for line in lines if line.finish_reason == "length")
    found = one(own, "speculative:ahead=7,verify=rejection", "acceptance_length")
    assert found.ours.value == pytest.approx((sum(steps) + cut) / len(steps))

    found = one(own, "mars:tau=0.5", "accuracy_change", "-5.8", against={"accuracy_change": "ar:on=mars"})
    scores = [cells[name].scores for name in ("mars", "ar")]
    assert found.ours.value == pytest.approx(100 * (sum(scores[0].values()) - sum(scores[1].values())) / 12)
    found = one(own, "mars:tau=0.5", "speedup", against={"speedup": "ar:on=mars"})
    assert found.why == "cpu, theirs cuda, graph, theirs eager, float32, theirs bfloat16"


def test_a_mean_has_the_interval_of_independent_parts(own: RunDirectory) -> None:
    """Two benchmarks of one suite count once."""
    table = own_table(arm="mars:tau=0.5", figures={"accuracy": {"sums": "1.0", "average": "1.0"}})
    single, average = compared(own, table)
    assert average.ours == single.ours
    twice = table.changed(benchmarks={**table.benchmarks, "again": Benchmark(suite="arithmetic", items=12)})
    assert compared(own, twice)[1].ours == single.ours
    other = table.changed(benchmarks={**table.benchmarks, "gsm8k": Benchmark(suite="gsm8k", items=12)})
    assert [figure.why for figure in compared(own, other)] == ["", "not run"]


def test_a_figure_over_itself_is_not_compared(own: RunDirectory) -> None:
    """It would be 0, or 1.00, whatever was measured."""
    found = one(own, "mars:tau=0.5", "accuracy_change", "+0.0", against={"accuracy_change": "mars:tau=0.5"})
    assert (found.inside, found.why) == (None, "it is its own baseline")


@pytest.mark.parametrize(
    ("changes", "asked", "why"),
    [
        ({"families": {"mine": {}}, "row": {"family": "mine"}}, {}, "family tiny"),
        ({"benchmarks": {"sums": Benchmark(suite="gsm8k", items=12)}}, {}, "suite arithmetic"),
        ({"benchmarks": {"sums": Benchmark(suite="arithmetic", items=8)}}, {}, "12 items, theirs 8"),
        ({"benchmarks": {"sums": Benchmark(suite="arithmetic", items=800)}}, {}, ""),
        ({"setup": {"max_new_tokens": 8}}, {}, "24 new tokens, theirs 8"),
        ({}, {"protocol": "own"}, "stop strings end an answer, theirs do not"),
        ({"not_comparable": {"tokens_per_forward": "another count"}}, {}, "another count"),
        ({"row": {"batch_size": 8}}, {}, "not run"),
    ],
)
def test_other_settings_are_not_compared(
    changes: dict[str, Any], asked: dict[str, Any], why: str, own: RunDirectory
) -> None:
    """Fewer questions of the same benchmark measure the same."""
    row, setup = changes.get("row", {}), changes.get("setup", {})
    changes = {name: value for name, value in changes.items() if name not in ("row", "setup")}
    table = own_table(**{"arm": "mars:tau=0.5", "figures": {"tokens_per_forward": {"sums": "1.00"}}} | row)
    [found] = compared(own, table.changed(setup=table.setup.changed(**setup), **changes), **asked)
    assert found.why == why
    assert (found.inside is None) == bool(why)


def reproduce(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["mtbench", "reproduce", *words])
    with pytest.raises(SystemExit) as left:
        main.main()
    return int(left.value.code or 0)


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list of tables; a run with the table on its page; `run` goes on with it, `reproduce` says so."""
    out = str(tmp_path / "run")
    words = "--family tiny --suite arithmetic --limit 2 --rounds 1 --max-new-tokens 3 --batch-size 2 --device cpu"
    assert reproduce(monkeypatch=monkeypatch) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*names(), "qwen2.5-7b"))
    assert reproduce("mars-table-9", *words.split(), "-o", out, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "Published figures and ours" in said
    assert said.splitlines()[-1] == f"{out}/report.html"
    assert "MARS, table 9: Jacobi decoding" in (tmp_path / "run" / "report.html").read_text()
    stored = stored_json(RunDirectory(tmp_path / "run"), "results.json")["publication"]
    assert stored["name"] == "mars-table-9"
    assert {figure["why"].partition(",")[0] for figure in stored["figures"]} == {"family tiny"}
    assert dump(Publication.model_validate(stored)) == stored
    assert mtbench.run(out=out, resume=True).record["publication"] == stored
    assert reproduce("-o", out, "--resume", monkeypatch=monkeypatch) == 2
    assert "is a run; continue it with `mtbench run -o" in capsys.readouterr().err

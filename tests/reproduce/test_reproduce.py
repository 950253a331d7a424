"""`mtbench reproduce`: every published table in miniature, what is compared and what is not, and going on."""

import html
import json
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from schemas import validator
from stages import read_stored
from stored import stored_lines
from whole import Quiet

from mtbench.cli import main
from mtbench.document.html_page import html as page_of
from mtbench.document.markdown_text import markdown
from mtbench.errors import UserError
from mtbench.experiments.reproduce import rerun as reproduction
from mtbench.experiments.reproduce.agreement import WORDS
from mtbench.experiments.reproduce.compare import compare
from mtbench.experiments.reproduce.document import document
from mtbench.experiments.reproduce.format import (
    Benchmark,
    Published,
    PublishedRow,
    ReproduceRequest,
    Reproduction,
    TablePlan,
)
from mtbench.experiments.reproduce.rerun import Part, lay_out, names, published
from mtbench.models.families import FAMILIES
from mtbench.plan.directory import JsonObject, RunDirectory
from mtbench.records import dump
from mtbench.report.phrases import DEMONSTRATION

pytestmark = pytest.mark.whole

MINIATURE: dict[str, Any] = {
    "family": "tiny",
    "suite": ("arithmetic",),
    "limit": 1,
    "rounds": 1,
    "max_new_tokens": 3,
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def begun(table: Published, asked: ReproduceRequest, folder: Path) -> list[Part]:
    """A reproduction laid out and written, without its pass for peak memory (a process for each cell)."""
    parts = lay_out(table, asked)
    reproduction.begin(RunDirectory(folder), asked, parts, ["mtbench", "reproduce"])
    for part in parts:
        if part.plan is not None:
            skipped = {cell.cell: None for cell in part.plan.cells}
            RunDirectory(folder / part.folder).write_json("memory.json", skipped)
    return parts


def carried_out(table: Published, asked: ReproduceRequest, folder: Path) -> JsonObject:
    """The reproduction as its file has it and its schema says, read by a parser that knows no NaN."""
    parts = begun(table, asked, folder)
    for part in parts:
        if part.plan is not None:
            reproduction.run(folder, part, asked, Quiet(), report=False)
    result = dump(compare(table, asked, parts, folder))
    validator("reproduction").validate(json.loads(json.dumps(result, allow_nan=False)))
    return result


WHOLE = ("mars-table-2", "mars-table-5")  # accuracies and a missing role; times and batch sizes


@pytest.mark.parametrize("name", [n if n in WHOLE else pytest.param(n, marks=pytest.mark.slow) for n in names()])
def test_every_table_runs_in_miniature(name: str, tmp_path: Path) -> None:
    """Whatever has a checkpoint is run and printed beside the paper's figure, and called no more than it is."""
    table = published(name)
    sizes = None if any(row.batch_size for row in table.rows) else (1,)
    result = carried_out(table, ReproduceRequest(name=name, batch_size=sizes, **MINIATURE), tmp_path / "all")
    assert sum(result["verdicts"].values()) == len(result["figures"])
    lacking = {"base", "eagle", "dflash", "dspark"} - set(FAMILIES["tiny"].roles)
    for figure in result["figures"]:
        absent = not lacking.isdisjoint(reproduction.arm_of(figure["arm"], ["eager"]).roles)
        assert figure["word"] == ("not run" if absent else "not comparable"), figure
        assert (figure["ours"] is None) == absent, figure
        assert figure["why"].startswith("family 'tiny' has no" if absent else "a miniature: family tiny, suite arith")
    made = document(Reproduction(**result))
    shown, text = page_of(made), markdown(made)
    assert DEMONSTRATION in shown
    assert DEMONSTRATION in text
    assert not re.search(r"https?://|//[a-z]+\.[a-z]", shown)
    words = re.sub("</?code>", "`", html.unescape(shown))
    assert all(figure["why"] in words for figure in result["figures"])
    assert all(row.row in shown and row.row in text for row in table.rows)


@pytest.mark.parametrize("name", names())
def test_every_table_is_laid_out(name: str, tmp_path: Path) -> None:
    """Every row has its arm in a plan, or a reason. Without results every figure is `not run`, with a reason."""
    table = published(name)
    sizes = None if any(row.batch_size for row in table.rows) else (1,)
    asked = ReproduceRequest(name=name, batch_size=sizes, **MINIATURE)
    parts = lay_out(table, asked)
    for part in parts:
        arms = {cell.arm for cell in part.plan.cells} if part.plan else set()
        for row in table.rows:
            assert row.arm in part.missing or str(reproduction.arm_of(row.arm, [table.plan.engine])) in arms
    result = dump(compare(table, asked, parts, tmp_path))
    assert len(result["figures"]) == sum(len(f) for row in table.rows for f in row.figures.values())
    assert {figure["word"] for figure in result["figures"]} == {"not run"}
    assert all(figure["why"] for figure in result["figures"])


OWN = ReproduceRequest(name="own", protocol="paper", device="cpu", batch_size=(1,))


def own_table(tokens: int, kept: Collection[str] = ("plain", "fast", "steady", "absent")) -> Published:
    """A table that is published of the embedded family: its figures are the same thing as ours."""
    rows: list[dict[str, Any]] = [
        {"row": "plain", "arm": "ar:on=mars", "figures": {"accuracy": {"sums": "80.0"}}},
        {
            "row": "fast",
            "arm": "mars:tau=0.5",
            "figures": {
                "accuracy": {"sums": "99.0", "average": "99.0"},
                "accuracy_change": {"sums": "-80.0"},
                "tokens_per_forward": {"sums": "1.00", "average": "1.00"},
                "speedup": {"sums": "1.00"},
                "tokens_per_s": {"sums": "1,000"},
            },
            "against": {"accuracy_change": "ar:on=mars", "speedup": "ar:on=mars"},
        },
        {"row": "steady", "arm": "mars:tau=1", "figures": {"tokens_per_forward": {"sums": "1.00"}}},
        {
            "row": "drafted",
            "arm": "speculative:ahead=7,verify=rejection",
            "figures": {"acceptance_length": {"sums": "1.00", "average": "8.00"}},
        },
        {"row": "absent", "arm": "ar:on=base", "figures": {"accuracy": {"sums": "50.0"}}},
    ]
    table = published("mars-table-9")
    return table.changed(
        name="own",
        setup=table.setup.changed(max_new_tokens=tokens),
        benchmarks={"sums": Benchmark(suite="arithmetic", items=8)},
        plan=TablePlan(batch_sizes=[4], rounds=1, limit=8, engine="graph"),
        families={"tiny": {}},
        not_comparable={"tokens_per_s": "their GPU is not stated"},
        rows=[PublishedRow(**{"family": "tiny", **row}) for row in rows if row["row"] in kept],
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> tuple[JsonObject, Path]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("own") / "it"
    return carried_out(own_table(80), OWN, folder), folder


def figure(result: JsonObject, row: str, quantity: str, benchmark: str = "sums") -> JsonObject:
    found: list[JsonObject] = [
        f for f in result["figures"] if (f["row"], f["quantity"], f["benchmark"]) == (row, quantity, benchmark)
    ]
    assert len(found) == 1
    return found[0]


def test_the_same_thing_is_compared(own: tuple[JsonObject, Path]) -> None:
    """Accuracy and tokens per forward of a table's own family, suite and budget get a verdict with its difference.

    Times do not: a CPU is no GPU, and a GPU that is not stated is none that can be had.
    """
    result, _ = own
    accuracy, per_forward = figure(result, "fast", "accuracy"), figure(result, "fast", "tokens_per_forward")
    assert accuracy["word"] == "differs", "far fewer are right where half sure is enough"
    assert accuracy["difference"]["value"] == pytest.approx(accuracy["ours"]["value"] - 99)
    assert per_forward["word"] == "differs"
    assert per_forward["difference"] == pytest.approx(per_forward["ours"], abs=0.02), "over 1.00, which is rounded"
    assert figure(result, "steady", "tokens_per_forward")["word"] == "agrees"
    assert figure(result, "fast", "accuracy_change")["word"] == "differs"
    plain = figure(result, "plain", "accuracy")
    assert plain["n"] == 8
    assert plain["word"] in WORDS[:3]
    assert figure(result, "fast", "speedup")["why"] == "measured on cpu, theirs on a GPU"
    assert figure(result, "fast", "tokens_per_s")["why"] == "their GPU is not stated"
    assert figure(result, "fast", "speedup")["ours"]["value"] > 0


def test_an_accepted_length_is_counted_as_deepspec_does(tmp_path: Path) -> None:
    """Pooled over forwards: that of results.json, with an interval over blocks."""
    table = own_table(24, ["drafted"])
    table = table.changed(plan=table.plan.changed(batch_sizes=[1], temperature=1.0, beside=["ar"]))
    result = carried_out(table, OWN, tmp_path / "it")
    cells = json.loads((tmp_path / "it" / "tiny" / "results.json").read_text())["cells"]
    lines = [*stored_lines(RunDirectory(tmp_path / "it" / "tiny"), f"generations/{cells[1]['cell']}.jsonl")]
    steps = [step for line in lines for step in line["commits"] if step]
    beyond = sum(line["surplus"] for line in lines if line["finish_reason"] == "length")
    ours = (found := figure(result, "drafted", "acceptance_length"))["ours"]

    assert [cell["method"] for cell in cells] == ["ar", "speculative"]
    assert beyond, "some answers are cut at the budget"
    assert ours["value"] == pytest.approx((sum(steps) + beyond) / len(steps))
    assert ours["value"] == pytest.approx(cells[1]["acceptance"]["derived"]["deepspec"])
    assert ours["ci_low"] < ours["value"] < ours["ci_high"]
    assert (found["n"], found["word"]) == (8, "differs")
    assert "accepted length" in markdown(document(Reproduction(**result)))


def test_a_table_says_how_tokens_are_chosen_and_what_runs_beside() -> None:
    """Temperature, variables of the chat template and baselines are part of every plan of the table."""
    table = own_table(3, ["drafted"])
    how = {"temperature": 0.5, "chat_template_kwargs": {"enable_thinking": False}, "beside": ["ar", "ar:on=mars"]}
    (part,) = lay_out(table.changed(plan=table.plan.changed(**how)), OWN)

    assert part.plan is not None
    assert (part.plan.request.temperature, part.plan.request.chat_template_kwargs) == (0.5, {"enable_thinking": False})
    assert [cell.arm for cell in part.plan.cells] == [
        "ar@ar/graph",
        "ar@mars/graph",
        "speculative:ahead=7,verify=rejection@ar/graph",
    ]


def test_a_speedup_is_compared_on_a_gpu_by_the_eager_engine(tmp_path: Path) -> None:
    """As far as the run's own record says so; with the blocks it has, and the blocks it takes."""
    table = own_table(4, ["plain", "fast"])
    carried_out(table, OWN.changed(engine="eager", batch_size=(4,)), tmp_path / "eager")
    results = tmp_path / "eager" / "tiny" / "results.json"
    measured = results.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"')
    results.write_text(measured.replace('"device": "cpu"', '"device": "cuda"'))
    asked, parts = reproduction.reopen(tmp_path / "eager")
    same = table.changed(rows=[table.rows[1].changed(against={**table.rows[1].against, "speedup": "mars:tau=0.5"})])
    for compared, word, why in (
        (table, "cannot tell", "n = 2 blocks, 6 needed"),
        (same, "not comparable", "it is its own baseline"),
    ):
        speedup = figure(dump(compare(compared, asked, parts, tmp_path / "eager")), "fast", "speedup")
        assert (speedup["word"], speedup["why"]) == (word, why)


def test_the_papers_accounting_counts_what_is_behind_the_end(own: tuple[JsonObject, Path]) -> None:
    """Its tokens per forward are all tokens that were accepted over the same forwards; recounted from the lines."""
    result, folder = own
    cells = read_stored(RunDirectory(folder / "tiny")).cells.values()
    lines = next(data.lines.values() for data in cells if "0.5" in data.cell.arm)
    forwards = sum(len(line.commits or ()) for line in lines)
    after = sum(line.surplus or 0 for line in lines)
    tokens = sum(len(line.token_ids) for line in lines)
    assert after
    assert figure(result, "fast", "tokens_per_forward")["ours"]["value"] == pytest.approx((tokens + after) / forwards)


@pytest.mark.parametrize(
    ("changes", "word", "why"),
    [
        ({"protocol": "own"}, "not comparable", "--protocol own stops at stop strings, theirs does not"),
        ({"max_new_tokens": 7}, "not comparable", "a miniature: 7 new tokens, theirs 8"),
        ({"limit": 9}, "not comparable", "a miniature: 9 items, theirs 8"),
        ({"limit": 3}, "cannot tell", "n = 3 blocks, 6 needed"),
    ],
)
def test_another_thing_is_not_compared(changes: dict[str, Any], word: str, why: str, tmp_path: Path) -> None:
    """Another protocol, budget or set of questions. Fewer questions are the same thing, told less surely."""
    table = own_table(8, ["steady"])
    result = carried_out(table, OWN.changed(**changes), tmp_path / "it")
    assert [(f["word"], f["why"]) for f in result["figures"]] == [(word, why)]


def test_what_has_no_checkpoint_says_how_to_get_one() -> None:
    """By an option; the rest of the table is planned."""
    part = lay_out(published("mars-table-2"), ReproduceRequest(name="", **MINIATURE))[0]
    assert part.plan is not None
    assert list(part.missing) == ["ar:on=base"]
    assert "Add one with `--checkpoint base=PATH_OR_ID`" in part.missing["ar:on=base"]
    small = ReproduceRequest(name="", family="qwen2.5-0.5b", offline=True)
    with pytest.raises(UserError, match=r"nothing of mars-table-2 can be run here: "):
        lay_out(published("mars-table-2"), small)


def test_a_suite_that_cannot_be_opened_costs_its_own_figures(tmp_path: Path) -> None:
    """One benchmark without its data is not run, with the reason; the other is."""
    table = own_table(8)
    suite = f"prompts:{tmp_path}/nowhere.jsonl"
    lost = Benchmark(suite=suite, items=5)
    row = PublishedRow(
        row="r", family="tiny", arm="ar", figures={"accuracy": {"sums": "1.0", "lost": "1.0", "average": "1.0"}}
    )
    table = table.changed(benchmarks={**table.benchmarks, "lost": lost}, rows=[row])
    result = carried_out(table, OWN.changed(max_new_tokens=3), tmp_path / "it")
    words = {f["benchmark"]: f["word"] for f in result["figures"]}
    assert words == {"sums": "not comparable", "lost": "not run", "average": "not run"}
    assert "nowhere.jsonl" in figure(result, "r", "accuracy", "lost")["why"]
    assert "nowhere.jsonl" in figure(result, "r", "accuracy", "average")["why"]
    assert [*result["runs"][0]["closed"]] == [suite]
    with pytest.raises(UserError, match=r"nowhere\.jsonl"):
        lay_out(table, OWN.changed(suite=(suite,)))


def test_a_family_or_a_suite_of_the_table_is_a_choice() -> None:
    """What is left out is not run; what is not the table's takes the place of all."""
    table = published("mars-table-2")
    asked = ReproduceRequest(name=table.name, suite=("gsm8k-paper",))
    assert reproduction.suites_of(table, asked) == {"gsm8k": "gsm8k-paper"}
    stand_in = reproduction.suites_of(table, asked.changed(suite=("arithmetic",)))
    assert stand_in == dict.fromkeys(table.benchmarks, "arithmetic")
    assert reproduction._families(table, asked) == ["qwen2.5-0.5b", "qwen2.5-7b"]
    assert reproduction._families(table, asked.changed(family="qwen2.5-7b")) == ["qwen2.5-7b"]
    with pytest.raises(UserError, match="does not say of which family; add `--family` with one of qwen"):
        reproduction._families(table, asked.changed(checkpoint={"base": "./mine"}))


def test_an_interrupted_reproduction_goes_on(tmp_path: Path) -> None:
    """What was asked is read back, and what was decoded is not decoded again."""
    table, asked = own_table(5, ["plain", "fast"]), OWN.changed(batch_size=(4,))
    parts = begun(table, asked, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        reproduction.run(tmp_path, parts[0], asked, Quiet(until=3), report=False)
    kept, reopened = reproduction.reopen(tmp_path)
    assert json.dumps(dump(kept)) == json.dumps(dump(asked))
    for left in (4 - 2, 0):  # of 2 blocks of 2 arms, the first was whole
        progress = Quiet()
        reproduction.run(tmp_path, reopened[0], kept, progress, report=False)
        assert progress.batches == left
    words = {f["word"] for f in dump(compare(table, kept, reopened, tmp_path))["figures"]}
    assert words.isdisjoint({"not run"})


def mtbench(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["mtbench", "reproduce", *words])
    with pytest.raises(SystemExit) as left:
        main.main()
    return int(left.value.code or 0)


SMALL = ["--family", "tiny", "--suite", "arithmetic", "--limit", "2", "--rounds", "1", "--max-new-tokens", "3"]
SMALL += ["--batch-size", "2", "--device", "cpu"]


def test_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The list of tables, a table's dry run, its page as the last line, and going on, which does nothing twice."""
    out = str(tmp_path / "run")
    command = ["mars-table-9", *SMALL, "-o", out]
    assert mtbench(monkeypatch=monkeypatch) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in (*names(), "qwen2.5-7b"))
    assert mtbench(*command, "--dry-run", monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert "jacobi:ahead=256" in said
    assert re.search(r"tiny: about \d", said)
    assert not (tmp_path / "run").exists()
    assert mtbench(*command, monkeypatch=monkeypatch) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[-1] == f"{out}/reproduction.html"
    pages = {f"reproduction.{kind}" for kind in ("json", "md", "html")}
    assert {p.name for p in (tmp_path / "run").iterdir()} == {"asked.json", *pages, "tiny", ".lock"}
    assert (tmp_path / "run" / "tiny" / "report.html").is_file()
    before = (tmp_path / "run" / "reproduction.json").read_text()
    assert mtbench("-o", out, "--resume", monkeypatch=monkeypatch) == 0
    assert (tmp_path / "run" / "reproduction.json").read_text() == before
    for words, said in (
        (command, "go on with `mtbench reproduce -o"),
        (["-o", out, "--resume", "--limit", "3"], "has limit=2, not 3; go on with"),
        (["mars-table-2", "-o", out, "--resume"], "has name='mars-table-9'"),
    ):
        assert mtbench(*words, monkeypatch=monkeypatch) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mars-table-7"], "unknown reproduction 'mars-table-7' (did you mean"),
        (["mars-table-9", *SMALL, "--suite", "nowhere"], "unknown suite 'nowhere'"),
        (["--resume", "-o", "nowhere"], "it has no asked.json"),
    ],
)
def test_a_mistake_is_one_line(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With the value, and what to do; nothing is begun."""
    monkeypatch.chdir(tmp_path)
    assert mtbench(*words, monkeypatch=monkeypatch) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]
    assert not list(tmp_path.iterdir())

"""What a reader of a run sees first: the question, the decision, and one line an arm, on a page and in a terminal."""

import html
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from browsers import BROWSER, opened
from made_records import (
    cell_data,
    doubted,
    generation_line,
    made_decision,
    made_results,
    result_cell,
    speedup,
    timing_line,
)
from rich.console import Console
from rich.text import Text
from stages import assemble, write_report
from stored import stored_json

from mtbench.document.console import Terminal
from mtbench.document.latex_table import latex
from mtbench.document.model import Entry, Row, Table
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Elimination
from mtbench.records import dump
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.arm_table import said_once
from mtbench.report.main_table import main_table
from mtbench.report.phrases import speed_entry
from mtbench.report.terminal import results_tables, show_results
from mtbench.report.text import environment, not_begun
from mtbench.results.aggregate import _request_latency
from mtbench.results.comparisons import OwnSpeedups, own_speedups
from mtbench.results.figure_formats import Speedup
from mtbench.results.format import Results

AXE = "axe-core@4.10.3"
AR, ARM = "ar@ar/graph", "mars:tau=0.95@mars/graph"
REASON = "it needs a checkpoint in the role 'eagle': add `--checkpoint eagle=PATH_OR_ID`"


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ((ARM,), ("MARS τ=0.95",)),
        (("mars:tau=0.5,cache=block@mars/graph",), ("MARS τ=0.5 cache=block",)),
        (("mars:extra=true@mars/graph",), ("MARS extra",)),
        ((AR, "ar@mars/graph"), ("Plain decoding (ar)", "Plain decoding (mars)")),
        ((AR, "ar@ar/eager"), ("Plain decoding (graph)", "Plain decoding (eager)")),
        ((AR, f"{AR}#2"), ("Plain decoding (1)", "Plain decoding (2)")),
        (("hf-generate@ar",), ("transformers generate",)),
        (("openai:url=http://127.0.0.1:8000/v1@ar",), ("OpenAI server url=http://127.0.0.1:8000/v1",)),
        (("of-a-plugin:k=1@ar/graph",), ("of-a-plugin k=1",)),
        (("no arm at all",), ("no arm at all",)),
    ],
)
def test_an_arm_in_words_says_what_tells_it_from_the_others(arms: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Its method and options; checkpoint, engine and copy only where they differ."""
    assert tuple(arm_names(result_cell(arm=arm) for arm in arms).values()) == words


def test_an_option_of_an_engine_is_in_the_words_if_it_tells_two_arms_apart() -> None:
    """Its id has them all."""
    given = [("ar", "f32"), ("ar", "q8_0"), ("prompt-lookup", "q8_0")]
    cells = [
        result_cell(
            arm=f"{method}@ar/llamacpp+cache-type-k={kind}+threads=1",
            method=method,
            options={},
            engine="llamacpp",
            engine_options=[f"cache-type-k={kind}", "threads=1"],
        )
        for method, kind in given
    ]
    assert list(arm_names(cells).values()) == [
        "Plain decoding (llama.cpp, cache-type-k=f32)",
        "Plain decoding (llama.cpp, cache-type-k=q8_0)",
        "Prompt lookup (llama.cpp ngram-simple, cache-type-k=q8_0)",
    ]


RULES = ("\\toprule", "\\midrule", "\\bottomrule")


def test_a_sentence_names_whole_arms_only() -> None:
    """An id that is a part of another one is not replaced inside it."""
    names = {AR: "Plain decoding", f"{AR}#2": "Plain decoding (2)", "ar@ar": "another"}
    said = f"faster than {AR}: 1.2; {AR}#2 and ar@ar are not, nor is mars-{AR}"
    assert (
        in_words(said, names)
        == f"faster than Plain decoding: 1.2; Plain decoding (2) and another are not, nor is mars-{AR}"
    )


@pytest.fixture(scope="module")
def many_arms(small_run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The report of a run with ten arms in a group, one of them twice as fast with the same tokens, and a price."""
    run = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path_factory.mktemp("many") / "run")))
    results = stored_json(run, "results.json")
    group = [c for c in results["cells"] if (c["suite"], c["batch_size"]) == ("arithmetic", 2)]
    pattern = group[-1]
    for i in range(10 - len(group)):
        arm = f"mars:tau=0.9{i},cache=block@mars/graph"
        flags = ["83% cut by the token budget", "shared processor: computed in 60% of the time"]
        results["cells"].append(pattern | {"arm": arm, "cell": f"{pattern['cell']}.{i}", "flags": flags})
    for cell in results["cells"]:  # whatever else the machine did while they ran
        cell["speedup"] = [s | {"value": 1.0, "ci_low": 0.9, "ci_high": 1.1} for s in cell["speedup"]]
    limits = {"value": 2.0, "ci_low": 1.9, "ci_high": 2.1, "verdict": {"word": "faster"}}
    pattern["speedup"] = [s | limits for s in pattern["speedup"]]
    pattern |= {
        "claims": "lossless",
        "agreement": [a | {"items": 7, "identical": 7} for a in pattern["agreement"]],
    }
    results["price_per_hour"] = 3.6
    for cell in results["cells"]:
        cell["cost_per_million"] = 1.5
    settings = {ARM: {"vLLM": f"--speculative-config '{'x' * 200}'"}}
    decision = made_decision(Results.model_validate(results), refused={"eagle": REASON}, serving=settings)
    run.write_json("decision.json", dump(decision))
    write_report(run, Results.model_validate(results))
    run.write_json("results.json", results)
    return run


def test_an_arm_that_ran_slower_code_is_marked_everywhere(small_run: RunDirectory, tmp_path: Path) -> None:
    """All are where mtbench's kernels did not run."""
    run = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path / "run")))
    cell = assemble(run).cells[1]
    assert not any("kernels" in flag for flag in cell.flags)
    stored = stored_json(run, "environment.json")
    stored["sessions"][-1] |= {"kernels_off": "logits are wrong", "layers": {"ar by graph": "mtbench's decoder"}}
    stored["sessions"][-1] |= {"device": "cuda"}
    run.write_json("environment.json", stored)
    results = assemble(run)
    write_report(run, results)
    off = "PyTorch's kernels ran, not mtbench's"
    assert all(f"{off}: logits are wrong" in cell.flags for cell in results.cells)
    written = io.StringIO()
    console = Console(width=200, file=written)
    tables, notes = results_tables(results, 200)
    console.print(*tables, *map(Text, notes))
    shown = [written.getvalue(), *((run.path / name).read_text() for name in ("report.html", "report.md"))]
    assert all(off in html.unescape(text) for text in shown)
    said = {"Layers": "mtbench's decoder", "mtbench's kernels": "off: logits are wrong"}
    assert dict(environment(results)).items() >= said.items()


def test_a_terminal_of_80_columns_has_one_line_an_arm(many_arms: RunDirectory) -> None:
    """None is wider, and no name is cut."""
    results = many_arms.read("results.json", Results)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(*results_tables(results, 80)[0])
    text = captured.get()
    assert max(map(len, text.splitlines())) <= 80
    table = re.split(r"\n[▲▼•] ", text.partition("arithmetic, batch size 2")[2])[0]
    lines = [line for line in table.splitlines() if re.match(" ?(MARS|Plain)", line)]
    assert len(lines) == 10
    assert (
        len([line for line in table.splitlines() if line.strip(" ─")]) - len(lines) <= 6
    )  # title, headings, and what the signs stand for


def test_the_terminal_begins_with_the_decision_and_its_command(many_arms: RunDirectory) -> None:
    """Then come the tables, and three notes; the others are counted."""
    written = io.StringIO()
    show_results(many_arms, many_arms.read("results.json", Results), Terminal(width=80, file=written))
    lines = written.getvalue().splitlines()
    assert lines[0].startswith("Arithmetic: At batch size 2: use MARS")
    command = lines.index(f"--speculative-config '{'x' * 200}'")
    assert lines[command - 1] == f"Deploy {ARM}:"
    assert command < next(n for n, line in enumerate(lines) if line.startswith("arithmetic, batch size"))
    assert re.fullmatch(r"\d+ more notes are on the page", lines[-1])


def test_what_several_rows_share_is_said_once() -> None:
    """The rows keep the notes that are theirs alone."""
    shared, own = ("flag", "The machine was shared."), ("void", "Its tokens differ.")
    table, said = said_once(Table([], [Row("a", [], notes=[shared, own]), Row("b", [], notes=[shared])]))
    assert said == ["a, b: The machine was shared."]
    assert [row.notes for row in table.rows] == [[own], []]


def test_arms_that_did_not_begin_are_one_line_and_no_rows() -> None:
    """Of a long list the first names are given."""
    gone = Elimination(cell="x", block=0, lost=False, reason="no time is left", rival=None, unraced=True)
    cells = [result_cell(arm=AR), *(result_cell(arm=f"{name}@ar", status="left", left=gone) for name in "abcdefg")]
    assert not_begun(cells) == ["Not run: a@ar, b@ar, c@ar, d@ar, e@ar and 2 more: no time is left."]
    tables, _ = results_tables(made_results(cells), 80)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(*tables)
    assert [line[:8] for line in captured.get().splitlines() if line.startswith(("Plain", "a@ar", "Not run"))] == [
        "Plain de",
        "Not run:",
    ]


@pytest.mark.parametrize(
    ("found", "value", "text"),
    [
        (speedup(value=1.5, verdict=doubted("3 of 6 blocks")), "3 of 6 blocks", None),
        (speedup(value=1.5, ci_low=1.1, ci_high=2.0), "×1.50", "not clear once adjusted for all comparisons"),
        (speedup(value=1.5, ci_low=0.9, ci_high=2.0), "×1.50", "too close to tell here"),
    ],
)
def test_a_factor_has_an_interval_and_an_open_verdict_a_reason(found: Speedup, value: str, text: str | None) -> None:
    """Without an interval there is no factor. A clear interval beside an open verdict is explained."""
    entry = speed_entry(found, brief=True)
    assert (entry.value, entry.verdict and entry.verdict.reason) == (value, text)


def test_an_interval_on_its_own_line_is_no_argument_of_the_line_break() -> None:
    entry = Entry(value="12,345,678,901.25", interval="[1.25, 2.50]")
    text = latex(Table([("rate", "tokens a second")], [Row("ar", [entry], 1)]), "a label", [])
    assert r"12,345,678,901.25 \\{} [1.25," in text


def test_a_table_for_a_paper_is_one_table(many_arms: RunDirectory) -> None:
    """All rows have all columns; environments are balanced."""
    text = (many_arms.path / "tables/arithmetic.b2.tex").read_text()
    [(columns, body)] = re.findall(
        r"^\\begin\{tabular\}\{(l(?:r+))\}\n(.*?)^\\end\{tabular\}$", text, re.DOTALL | re.MULTILINE
    )
    assert [line for line in body.splitlines() if line in RULES] == list(RULES)
    rows = [line for line in body.splitlines() if line not in RULES]
    assert len(rows) > 2
    assert {len(row.split(" & ")) for row in rows} == {len(columns)}
    assert re.findall(r"\\begin\{(\w+)", text).count("tabular") == re.findall(r"\\end\{(\w+)", text).count("tabular")


def test_a_price_has_a_column_and_no_price_has_none(small_run: RunDirectory, tmp_path: Path) -> None:
    """The price of the rebuilt report is stored in results.json, and so is what a million tokens cost."""
    run = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path / "run")))
    for price in (None, 2.5):
        results = assemble(run, price_per_hour=price)
        assert run.read("results.json", Results).price_per_hour == price
        assert [c.cost_per_million for c in results.cells] == [
            price and pytest.approx(price / 3600 / (c.tokens_per_s.value or 0) * 1e6) for c in results.cells
        ]
        cells = [c for c in results.cells if c.batch_size == 2 and c.suite == "arithmetic"]
        numbers = {c.arm: n for n, c in enumerate(cells)}
        headings = [h for h, _ in main_table(cells, numbers, own_speedups(cells)).columns]
        assert ("cost per 1M tokens" in headings) is (price is not None)


def test_an_arm_that_lost_a_race_is_not_called_inconclusive_beside_its_reason() -> None:
    """Its note says by the race's own bound that it takes longer. A word stays, as does a lack of measurements."""
    gone = Elimination(cell="b", block=6, lost=True, reason="takes longer than ar@ar/graph", rival="ar.b1")
    open_, slower = (speedup(value=0.8, ci_low=0.7, ci_high=1.1, verdict=word) for word in ("inconclusive", "slower"))
    short = open_.changed(verdict=doubted("0.3 s timed, 1 s needed"))
    for left, found, text in (
        (gone, open_, None),
        (gone, slower, "slower"),
        (gone.changed(lost=False, rival=None), open_, "inconclusive: too close to tell here"),
        (None, open_, "inconclusive: too close to tell here"),
        (gone, short, "inconclusive: 0.3 s timed, 1 s needed"),
    ):
        cell = result_cell(left=left)
        table = main_table([cell], {cell.arm: 1}, OwnSpeedups({}, {cell.arm: found}))
        place = [heading for heading, _ in table.columns].index("speedup over ar@ar/graph")
        verdict = table.rows[0].entries[place].verdict
        assert (verdict and verdict.text) == text


def test_the_time_of_a_request_ends_with_its_answer() -> None:
    """Prefill and the steps up to its last forward; a batch of one takes its wall time; hidden steps hide it."""
    lines = [generation_line(item=f"a/{n}/0", forwards=n, commits=[1] * n) for n in (1, 3)]
    timing = timing_line(rows=2, items=2, prefill_s=1.0, step_s=[0.5, 0.25, 0.25], wall_s=9.0)
    found = _request_latency(cell_data(lines, [timing], batch_size=2))
    assert found is not None
    assert found.p50 == pytest.approx(1.75)
    assert found.requests == 2
    alone = _request_latency(cell_data(lines[:1], [timing_line(wall_s=9.0)]))
    assert alone is not None
    assert alone.p99 == 9.0
    assert _request_latency(cell_data(lines, [timing.changed(step_s=None)])) is None
    assert _request_latency(cell_data(lines, [timing], batching="refill")) is None


UNFOLD = "document.querySelectorAll('details').forEach(d => { d.open = true; })"


@BROWSER
@pytest.mark.parametrize("width", [400, 1280, 1920])
def test_nothing_is_wider_than_the_screen(many_arms: RunDirectory, width: int) -> None:
    """Ten arms fit the main table without a scroll bar; on a phone each arm is a card. Nothing is cut."""
    with opened((many_arms.path / "report.html").resolve().as_uri(), width) as (page, wrong):
        for state in ("folded", "open"):
            if state == "open":
                page.evaluate(UNFOLD)
            assert page.evaluate("document.documentElement.scrollWidth") == width
            cut = """() => [...document.querySelectorAll('.main, .main td, .main th, .first *')]
                .filter(e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest('.hidden, thead'))
                .map(e => e.outerHTML.slice(0, 80))"""
            assert page.evaluate(cut) == []
        rows = page.evaluate("[...document.querySelectorAll('.main')].map(t => getComputedStyle(t).display)")
        assert set(rows) == {"block" if width == 400 else "table"}
        assert wrong == []


@BROWSER
def test_axe_finds_no_serious_fault(many_arms: RunDirectory, axe: str) -> None:
    """By axe-core, with everything unfolded. In the dark only colours differ."""
    with opened((many_arms.path / "report.html").resolve().as_uri(), color_scheme="light") as (page, _):
        page.evaluate(UNFOLD)
        page.evaluate(axe)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        page.emulate_media(color_scheme="dark")
        colours = "axe.run(document, {resultTypes: ['violations'], runOnly: ['color-contrast']})"
        found += page.evaluate(colours)["violations"]
    serious = [
        (v["id"], v["help"], v["nodes"][0]["html"][:200]) for v in found if v["impact"] in ("serious", "critical")
    ]
    assert serious == []


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, installed by npm into a temporary folder. Skips if npm cannot install it."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not on the path, so axe-core cannot be installed")
    folder = tmp_path_factory.mktemp("axe")
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", AXE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip("npm did not install axe-core in two minutes")
    if done.returncode:
        pytest.skip(f"npm cannot install {AXE}: {done.stderr.strip().splitlines()[-1:]}")
    package = folder / "node_modules/axe-core"
    assert json.loads((package / "package.json").read_text())["version"] == AXE.partition("@")[2]
    return (package / "axe.min.js").read_text()

"""The report: it is complete and escaped, the same every time, and loads nothing from the network."""

import itertools
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browsers import BROWSER, opened
from rich.console import Console
from stages import assemble, write_report
from stored import keep_lines, stored_json, stored_lines

from mtbench.document.model import Figure
from mtbench.document.plots import MOST_TICKS, log_ticks
from mtbench.errors import printable
from mtbench.report import figures
from mtbench.report.generation_viewer import split
from mtbench.report.phrases import DEMONSTRATION, SMALL_MODEL, checkpoint_names, disclaimers, simulations
from mtbench.report.summary import summary, warnings
from mtbench.report.terminal import results_tables
from mtbench.report.text import facts
from mtbench.results.figure_formats import OWNERS, DerivedAcceptance, Speedup
from mtbench.results.format import ResultCell, Results
from mtbench.runs.directory import RunDirectory


@pytest.fixture
def run(small_run: RunDirectory, tmp_path: Path) -> RunDirectory:
    """A copy of the run that a test may change."""
    return RunDirectory(Path(shutil.copytree(small_run.path, tmp_path / "run")))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report without figures, which take most of its time, for tests of its words and tables."""
    monkeypatch.setattr(figures, "draw", lambda scene: [])


@pytest.fixture
def one_group_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report with the figures of its first group only."""
    draw, scenes = figures.draw, list[figures.Scene]()

    def first(scene: figures.Scene) -> list[Figure]:
        scenes.append(scene)
        return draw(scene) if len(scenes) == 1 else []

    monkeypatch.setattr(figures, "draw", first)


def write(run: RunDirectory, results: Any) -> None:
    """Write the report of changed results, which must still be valid."""
    write_report(run, Results.model_validate(results))


@pytest.fixture(scope="module")
def reported(small_run: RunDirectory, tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run with its report."""
    copied = RunDirectory(Path(shutil.copytree(small_run.path, tmp_path_factory.mktemp("reported") / "run")))
    write(copied, stored_json(copied, "results.json"))
    return copied


class Page(HTMLParser):
    """A page taken apart: its elements, its text, its embedded data."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.data = ""
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "wbr":
            self.texts.append("\0")
        self._open = "data" if dict(attrs).get("type") == "application/json" else tag

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "data":
            self.data += data
        elif self._open not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return re.sub(" *\0 *", "", " ".join(" ".join(self.texts).split()))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(run: RunDirectory) -> Page:
    return Page((run.path / "report.html").read_text())


def files_of(run: RunDirectory) -> dict[str, bytes]:
    made = [run.path / "report.md", run.path / "report.html", *run.path.glob("tables/*"), *run.path.glob("figures/*")]
    return {str(file.relative_to(run.path)): file.read_bytes() for file in made}


def test_every_arm_of_every_group_is_in_the_page_and_in_the_markdown(reported: RunDirectory) -> None:
    """One row per cell in the main tables of both, and every section once."""
    page, markdown = page_of(reported), (reported.path / "report.md").read_text()
    cells = stored_json(reported, "results.json")["cells"]
    for arm in {cell["arm"] for cell in cells}:
        assert page.text.count(arm) >= 4
    first_tables = [part.split("###")[0] for part in markdown.split("\n## ")[1:] if ", batch size " in part]
    rows = [line for part in first_tables for line in part.splitlines() if re.match(r"\| \d+ \|", line)]
    assert len(rows) == len(cells)
    assert len(first_tables) == 4


def test_a_demonstration_is_titled_as_one(reported: RunDirectory) -> None:
    """Page, Markdown, tables and figures of the embedded family say that they are a demonstration."""
    html = (reported.path / "report.html").read_text()
    assert f"<title>{DEMONSTRATION}</title>" in html
    assert f'<p class="mark">{DEMONSTRATION}.</p>' in html
    assert (reported.path / "report.md").read_text().startswith(f"# {DEMONSTRATION}\n")
    assert DEMONSTRATION in (reported.path / "tables/arithmetic.b1.tex").read_text()
    for figure in ("speedups", "frontier"):
        assert DEMONSTRATION in (reported.path / f"figures/arithmetic.b1.{figure}.svg").read_text()


@pytest.mark.usefixtures("one_group_drawn")
def test_what_is_simulated_is_marked_everywhere(run: RunDirectory) -> None:
    """Page, row, table and figure of a simulated cell mark it."""
    results = stored_json(run, "results.json")
    for cell in results["cells"]:
        simulated = {"weights": "random:qwen2.5-7b", "accept": "0.8,0.6", "note": "independent draws: optimistic"}
        cell |= {"demonstration": False, "simulated": simulated}
    write(run, results)
    page = page_of(run)
    mark = "Simulated acceptance and weights"
    notes = [
        "Simulated weights: random:qwen2.5-7b.",
        "Simulated acceptance: 0.8,0.6 (independent draws: optimistic).",
    ]
    assert page.text.startswith(mark)
    for shown in (page.text, (run.path / "report.md").read_text()):
        assert [shown.count(note) for note in notes] == [4, 4]
    cells = Results.model_validate(results).cells[:4]
    refilled = simulations([cell.changed(batching="refill") for cell in cells])
    assert "optimistic" not in " ".join(refilled)
    table = (run.path / "tables/arithmetic.b1.tex").read_text()
    assert mark in table
    marked = sum(c["batch_size"] == 1 for c in results["cells"]) // 2
    assert table.count("(simulated)") == marked * table.count("toprule")
    assert mark in (run.path / "figures/arithmetic.b1.frontier.svg").read_text()


def test_nothing_a_model_wrote_is_markup(reported: RunDirectory) -> None:
    """The vocabulary is full of closing script tags. The page has only its own scripts, and the texts are whole."""
    page = page_of(reported)
    assert [s.get("type") for s in page.all("script")] == ["application/json", None, None]
    assert not page.all("b")
    data = json.loads(page.data)
    answers = [a for g in data["groups"] for i in g["items"] for a in i["answers"]]
    assert any("</script><script>broken=1</script>" in "".join(a["pieces"]) for a in answers)


PAYLOAD = (
    "</script><script>document.title='x'</script><img src=x onerror=a()>\"'&`*_[a](http://b)$\\frac\x1b[2J\u202e\n#"
)


# The lines of a long name, on the page and in a figure; what stands in backticks.
BREAKS = {"wbr", "g", "text", "defs", "path", "use", "code"}
FIXED = {"on", "status", "verdict", "verdicts", "grade", "claims", "length", "batching", "method", "engine"}
FIXED |= {"plan_sha256"}


def written_with(run: RunDirectory, end: str) -> Page:
    """Write the report of results in which every string that a stranger can choose ends with `end`."""
    results = stored_json(run, "results.json")
    cells = {c["cell"] for c in results["cells"]}

    def ended(value: Any) -> Any:
        if isinstance(value, str):
            return value if value in cells else value + end
        if isinstance(value, dict):
            return {k: v if k in FIXED else ended(v) for k, v in value.items()}
        return [ended(entry) for entry in value] if isinstance(value, list) else value

    write(run, ended(results))
    return page_of(run)


def test_no_string_of_a_run_becomes_markup(run: RunDirectory) -> None:
    """Names, paths, errors, flags, the environment: the page has its own elements, the files their own lines."""
    pages = [written_with(run, end) for end in ("end", PAYLOAD)]
    harmless, hostile = ([tag for tag, _ in page.elements if tag not in BREAKS] for page in pages)
    assert hostile == harmless
    handlers = [(tag, name) for tag, attributes in pages[1].elements for name in attributes if name.startswith("on")]
    assert handlers == []
    for name, data in files_of(run).items():
        written = data.decode(errors="ignore").replace(pages[1].data, "")  # model output is shown as it is
        assert name.endswith(".png") or printable(written, keep="\n") == written, name
    markdown = (run.path / "report.md").read_text()
    assert not re.search(r"(?<!\\)\]\((?!figures/)", markdown)  # a link
    assert "<script" not in markdown


def test_pieces_make_up_the_stored_text(reported: RunDirectory) -> None:
    """The viewer shows the generated tokens, shaded by forwards."""
    for group in json.loads(page_of(reported).data)["groups"]:
        cells = [c for c in stored_json(reported, "results.json")["cells"] if c["batch_size"] == group["batch_size"]]
        for number, arm in enumerate(group["arms"]):
            cell = next(c for c in cells if c["arm"] == arm["arm"] and c["suite"].startswith(group["suite"][:7]))
            lines = {g["item"]: g for g in stored_lines(reported, f"generations/{cell['cell']}.jsonl")}
            for item in group["items"]:
                answer, line = item["answers"][number], lines[item["item"]]
                plain = [p for i, p in enumerate(answer["pieces"]) if i not in answer["special"]]
                assert "".join(plain) == line["text"]
                assert answer["commits"] == line["commits"]


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("source", ["embedded:tiny/ar", "random:qwen2.5-7b"])
def test_checkpoints_that_are_no_folder_have_shades_too(run: RunDirectory, source: str) -> None:
    """Embedded and random checkpoints have a tokenizer wherever mtbench is installed."""
    results = stored_json(run, "results.json")
    for cell in results["cells"]:
        cell["checkpoints"] = dict.fromkeys(cell["checkpoints"], source)
    write(run, results)
    page = page_of(run)
    assert "A tokenizer could not be loaded" not in page.text
    assert json.loads(page.data)["groups"][0]["items"][0]["answers"][0]["pieces"]


@pytest.mark.usefixtures("undrawn")
def test_without_a_tokenizer_texts_are_whole_and_still_escaped(run: RunDirectory) -> None:
    """A report can be rebuilt without the checkpoints: it has no shades, a note and no error."""
    results = stored_json(run, "results.json")
    for cell in results["cells"]:
        cell["checkpoints"] = dict.fromkeys(cell["checkpoints"], "/nowhere/at/all")
    write(run, results)
    page = page_of(run)
    assert len(page.all("script")) == 3
    assert "A tokenizer could not be loaded" in page.text
    item = json.loads(page.data)["groups"][0]["items"][0]
    lines = {g["item"]: g for g in stored_lines(run, "generations/arithmetic.ar.ar.graph.b1.jsonl")}
    assert item["answers"][0]["pieces"] is None
    assert item["answers"][0]["text"] == lines[item["item"]]["text"]


@pytest.mark.usefixtures("undrawn")
def test_a_failed_cell_is_a_row_with_its_error(run: RunDirectory) -> None:
    """It is shown with its error, as text, and the others are compared as before."""
    failed = "arithmetic.mars-tau0.3.mars.graph.b1"
    run.append("failures.jsonl", [{"cell": failed, "error": "out of memory at <b>batch</b> | size 1"}])
    write_report(run, assemble(run))
    page, markdown = page_of(run), (run.path / "report.md").read_text()
    assert "Failed: out of memory at <b>batch</b> | size 1" in page.text
    assert not page.all("b")
    assert "out of memory at &lt;b>batch&lt;/b> \\| size 1" in markdown
    assert "Left out: 1 failed." in page.text


@pytest.mark.usefixtures("undrawn")
def test_deleted_answers_are_said_in_one_line(run: RunDirectory) -> None:
    """A table of the stored timings alone would look complete."""
    plain = next(cell for cell in assemble(run).cells if cell.reference)
    assert not any("missing" in flag for flag in plain.flags)
    (run.path / f"generations/{plain.cell}.jsonl").unlink()
    flags = next(cell for cell in assemble(run).cells if cell.cell == plain.cell).flags
    n = plain.items
    assert f"{n} of {n} timed answers are missing from generations/: figures of tokens lack them" in flags


def test_a_void_cell_says_why(run: RunDirectory) -> None:
    """With other tokens in a later round, the row says that it cannot be trusted, and the summary leaves it out."""
    name = "timings/arithmetic.mars-tau0.3.mars.graph.b1.jsonl"
    keep_lines(run, name, [t if t["identical"] is None else {**t, "identical": 0} for t in stored_lines(run, name)])
    write_report(run, assemble(run))
    assert "Void, not to be trusted: tokens differ between rounds." in page_of(run).text
    assert "Left out: 1 void." in page_of(run).text


def test_an_unscored_suite_claims_nothing_of_accuracy(reported: RunDirectory) -> None:
    """It has no accuracy and no comparison of accuracies, and says so."""
    markdown = (reported.path / "report.md").read_text()
    section = next(
        part for part in markdown.split("\n## ") if part.startswith("prompts:my prompts.jsonl, batch size 1")
    )
    assert "not scored" in section
    assert "accuracy, %" not in section
    assert "Accuracy compared" not in section


def test_the_summary_counts_by_verdicts(run: RunDirectory) -> None:
    cells = arithmetic_cells(run)
    own = {c["arm"]: c["speedup"][-1] | {"baseline": "ar@mars/graph"} for c in cells[2:]}
    for cell, verdict in zip(cells[2:], ("faster", "slower"), strict=True):
        own[cell["arm"]]["verdict"] = verdict
    place = "On arithmetic at batch size 2"
    assert summary_of(cells, own) == [f"{place}: 1 of 2 arms faster than ar@mars/graph, 1 slower."]
    cells[3]["status"], cells[2]["void"] = "failed", ["it was disturbed"]
    assert summary_of(cells, own)[-1] == "Left out: 1 failed, 1 void."


def test_the_page_warns_of_what_spoils_the_run(run: RunDirectory) -> None:
    """An unfinished run, and an arm that breaks its promise."""
    cells = arithmetic_cells(run)
    cells[0]["status"] = "partial"
    cells[2] |= {
        "claims": "lossless",
        "lossless": cells[2]["lossless"] | {"against": "ar@mars/graph", "grade": "divergent"},
    }
    first, second = warnings([ResultCell.model_validate(cell) for cell in cells])
    assert first == f"The run is not finished: blocks are missing in 1 of {len(cells)} cells; continue with `--resume`."
    arm = cells[2]["arm"]
    assert second == (
        f"{arm} claims to be lossless and is not: its tokens are not those of ar@mars/graph; "
        f"`mtbench audit DIR:ar@mars/graph DIR:{arm}` says why."
    )


def arithmetic_cells(run: RunDirectory, batch_size: int = 2) -> Any:
    cells = stored_json(run, "results.json")["cells"]
    return [c for c in cells if (c["suite"], c["batch_size"]) == ("arithmetic", batch_size)]


def summary_of(cells: Any, own: Any) -> list[str]:
    speedups = {arm: Speedup.model_validate(entry) for arm, entry in own.items()}
    typed = [ResultCell.model_validate(cell) for cell in cells]
    return summary(typed, speedups, "arithmetic at batch size 2")


def test_the_first_figure_has_the_fastest_arms(run: RunDirectory) -> None:
    """At most twelve, in the order of the table; its caption says how many there are."""
    [cell] = arithmetic_cells(run)[2:3]
    arms = [f"mars:tau={n / 100}@mars/graph" for n in range(1, 16)]
    cells = [ResultCell.model_validate(cell | {"arm": arm, "cell": f"c{n}"}) for n, arm in enumerate(arms)]
    own = {
        arm: Speedup.model_validate(cell["speedup"][-1] | {"value": 1 + n % 15 / 10, "ci_low": None, "ci_high": None})
        for n, arm in enumerate(arms)
    }
    numbers = {arm: n for n, arm in enumerate(arms, 1)}
    drawn = figures.draw(figures.Scene(cells, numbers, own))[0]
    assert [arm for arm in arms if arm in drawn.alt] == arms[3:]
    assert "The 12 fastest of 15 arms" in drawn.caption


@pytest.mark.usefixtures("undrawn")
def test_a_single_arm_needs_no_baseline(run: RunDirectory) -> None:
    """A run of one arm, without a comparison, has a page, too."""
    results = stored_json(run, "results.json")
    results["cells"] = [c | {"speedup": [], "accuracy_vs": [], "agreement": []} for c in results["cells"][:1]]
    plan = stored_json(run, "plan.json")
    plan["groups"] = [plan["groups"][0] | {"cells": [results["cells"][0]["cell"]]}]
    run.write_json("plan.json", plan)
    write(run, results)
    text = page_of(run).text
    assert text.count("no arm can be compared") == 1
    assert "Accurac" not in text.partition("no arm can be compared")[2].partition("95% intervals")[0]


def test_without_a_baseline_the_summary_names_the_option_that_adds_one(run: RunDirectory) -> None:
    """The option adds the reference on the arm's own checkpoint; a reference needs none."""
    cells = arithmetic_cells(run)
    (sentence,) = summary_of([cells[0], cells[2]], {})
    assert sentence.endswith("can be compared with a baseline; add `--method ar:on=mars`.")
    (sentence,) = summary_of(cells[:2], {})
    assert "add" not in sentence


def sections_of(run: RunDirectory, results: Any) -> list[str]:
    """Write the report and return the sections of its Markdown, one per suite and batch size."""
    write(run, results)
    parts = (run.path / "report.md").read_text().split("\n## ")[1:]
    return [part for part in parts if ", batch size " in part.splitlines()[0]]


def arm_of(results: Any, arm: str, batch_size: int = 2) -> Any:
    found = (c for c in results["cells"] if (c["suite"], c["batch_size"]) == ("arithmetic", batch_size))
    return next(c for c in found if c["arm"].startswith(arm))


@pytest.mark.usefixtures("undrawn")
def test_what_drafts_and_heads_cost_has_columns_where_any_arm_has_them(run: RunDirectory) -> None:
    """Forwards per token, seconds and their share of decoding; no other table has an empty column."""
    results = stored_json(run, "results.json")
    assert not re.search(r"\| draft|\| head time", "".join(sections_of(run, results)))
    cell = arm_of(results, "mars:tau")
    cell |= {"draft_forwards": 1200, "draft_forwards_per_token": 2.5, "draft_s": 0.3, "head_s": 0.06, "decode_s": 0.6}
    (shown,) = [part for part in sections_of(run, results) if "| draft" in part]
    cost = shown.partition("### Cost of the measurement")[2]
    assert "| draft forwards per token | draft time | head time |" in cost
    assert "| 2.50 | 300 ms, 50.0% of decoding | 60.0 ms, 10.0% of decoding |" in cost
    assert cost.count("| – | – | – |") == 3
    cell |= {"draft_s": None, "head_s": None}
    (shown,) = [part for part in sections_of(run, results) if "| draft" in part]
    assert "draft time" not in shown


ACCEPTANCE = {
    "length": 2.0,
    "rate": 0.3333,
    "per_position": [0.5, 0.375, 0.125],
    "offered": 1240,
    "derived": {owner: 1.5 + i / 100 for i, owner in enumerate(OWNERS)},
}


@pytest.mark.usefixtures("undrawn")
def test_acceptance_has_a_table_of_its_own(run: RunDirectory) -> None:
    """It shows the arms that guess, with every owner's figure. A hidden value is a dash, and no arm is no table."""
    results = stored_json(run, "results.json")
    arm_of(results, "mars:tau")["acceptance"] = ACCEPTANCE
    engine = {"length": 2.5, "rate": None, "per_position": None, "offered": None}
    arm_of(results, "mars@")["acceptance"] = {
        **engine,
        "derived": dict.fromkeys(DerivedAcceptance.model_fields) | {"vllm": 2.5},
    }
    part = next(p for p in sections_of(run, results) if p.startswith("arithmetic, batch size 2"))
    table = part.partition("### Acceptance")[2].partition("###")[0]
    derived = " | ".join(f"{1.5 + i / 100:.2f}" for i in range(len(OWNERS)))
    assert f"| 2.00 | 33.3 | 1,240 | 50, 38, 12 | {derived} |" in table
    assert "| 2.50 | – | – | – | 2.50 |" in table
    assert "ar@" not in table
    assert all(whose.replace("_", "\\_") in table for whose, _ in OWNERS.values())
    page = page_of(run)
    assert all(formula in page.text for _, formula in OWNERS.values())
    for cell in results["cells"]:
        cell["acceptance"] = None
    assert "### Acceptance" not in "".join(sections_of(run, results))


def printed(results: Any, width: int = 140) -> str:
    console = Console(width=width, record=True)
    for table in results_tables(Results.model_validate(results), width):
        console.print(table)
    return console.export_text()


@pytest.mark.usefixtures("undrawn")
def test_the_floor_stands_next_to_every_grade(run: RunDirectory) -> None:
    """Page and Markdown show `ar` against itself over batch sizes, unless there is one size."""
    results = stored_json(run, "results.json")
    for cell in results["cells"]:
        if cell["lossless"]:
            cell["lossless"]["floor"] |= {"items": 1200, "identical": 1150}
    markdown = "".join(sections_of(run, results))
    graded = sum(c["lossless"] is not None for c in results["cells"])
    assert graded == 4
    texts = (markdown, page_of(run).text)
    assert [text.count("floor 1,150 of 1,200") for text in texts] == [graded, graded]
    for cell in results["cells"]:
        if cell["lossless"]:
            cell["lossless"]["floor"] = None
    assert "floor" not in "".join(sections_of(run, results))


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("claims", "shown"),
    [
        ("lossy", "lossy by design"),
        ("distribution", "same distribution"),
        ("lossless", "not checked"),
    ],
)
def test_an_arm_without_a_grade_says_why(run: RunDirectory, claims: str, shown: str) -> None:
    """It is lossy by design, promises a distribution, or its reference arm did not run."""
    results = stored_json(run, "results.json")
    arm_of(results, "mars:tau").update(claims=claims, lossless=None)
    section = next(part for part in sections_of(run, results) if part.startswith("arithmetic, batch size 2"))
    assert f"| {shown} |" in section
    assert shown in page_of(run).text
    results["cells"] = [c for c in results["cells"] if (c["suite"], c["batch_size"]) == ("arithmetic", 2)]
    assert shown in printed(results)
    assert shown in (run.path / "tables/arithmetic.b2.tex").read_text()


@pytest.mark.usefixtures("undrawn")
def test_a_grade_against_an_equivalent_arm_does_not_make_a_lossy_arm_lossless(run: RunDirectory) -> None:
    """The page names the equivalent arm, which is lossy too. The terminal, which names no arm, shows `lossy`."""
    results = stored_json(run, "results.json")
    grade: dict[str, Any] = dict.fromkeys(("first_divergence", "epsilon", "worst_margin", "near_ties", "floor"))
    grade |= {"against": "mars@mars/graph", "grade": "exact", "items": 7, "identical": 7}
    arm_of(results, "mars@")["lossless"] = None
    arm_of(results, "mars:tau").update(claims="lossy", lossless=grade)
    section = next(part for part in sections_of(run, results) if part.startswith("arithmetic, batch size 2"))
    assert "| lossy by design, 7 of 7 the same, exact (against MARS) |" in section
    results["cells"] = [c for c in results["cells"] if (c["suite"], c["batch_size"]) == ("arithmetic", 2)]
    assert "lossy" in printed(results)
    assert "exact" not in printed(results)


def test_a_promised_distribution_is_never_graded_token_by_token(run: RunDirectory) -> None:
    """Also if its reference arm ran, and its tokens differ."""
    plan = stored_json(run, "plan.json")
    for cell in plan["cells"]:
        if cell["lossless_reference"]:
            cell["claims"] = "distribution"
    run.write_json("plan.json", plan)
    cells = assemble(run).cells
    assert sum(c.claims == "distribution" for c in cells) == 4
    assert {c.lossless is None for c in cells} == {True}


@pytest.mark.parametrize("high", [1.03, 1.1, 1.4, 1.9, 2.6, 4.8, 9.7, 30, 2000])
@pytest.mark.parametrize("low", [0.02, 0.3, 0.8, 0.97])
def test_ticks_leave_room_for_their_labels(low: float, high: float) -> None:
    """They are few and round, 1 is among them, and no two are closer than a sixth of the axis."""
    ticks = log_ticks(low, high)
    assert 1 in ticks
    assert 2 <= len(ticks) <= MOST_TICKS
    assert all((b / a) ** 6.001 >= high / low for a, b in itertools.pairwise(ticks))


NULLABLE = {
    **dict.fromkeys(("accuracy", "tokens_per_forward", "tokens_per_forward_ci", "tokens", "wall_s", "prefill_s")),
    **dict.fromkeys(("decode_s", "device_s", "peak_memory_bytes", "energy_j", "lossless", "kv_bytes")),
    **dict.fromkeys(("positions_fed_per_token", "positions_fed_per_forward", "draft_forwards", "repeated_identical")),
    **dict.fromkeys(("dtype", "device", "roofline_fraction", "parts", "simulated", "error", "acceptance")),
    **dict.fromkeys(("draft_forwards_per_token", "draft_s", "head_s")),
    "commit_histogram": {},
    "tokens_per_s": {"value": None, "ci_low": None, "ci_high": None},
    "ttft_s": {"p50": None, "p95": None},
    "commit_latency_s": {"p50": None, "p95": None},
}


def hollow(entry: dict[str, Any]) -> dict[str, Any]:
    """A comparison in which nothing was measured."""
    kept = ("baseline", "verdict", "gained", "lost", "n", "items", "identical")
    return {key: value if key in kept else None for key, value in entry.items()}


@pytest.mark.parametrize(
    ("where", "drawn"),
    [("each in another arm", "run"), ("all in one arm", "one_group_drawn"), ("all in all arms", "one_group_drawn")],
)
def test_a_value_that_was_not_measured_is_a_dash(
    run: RunDirectory, where: str, drawn: str, request: pytest.FixtureRequest
) -> None:
    """With every value that may be null, in one cell each, in one cell or in all cells, no page has None or NaN."""
    request.getfixturevalue(drawn)
    results = stored_json(run, "results.json")
    cells = results["cells"]
    names = [*NULLABLE, "speedup", "accuracy_vs"]
    for number, name in enumerate(names):
        chosen = {"each in another arm": [cells[number % len(cells)]], "all in one arm": [cells[2]]}.get(where, cells)
        for cell in chosen:
            cell[name] = NULLABLE[name] if name in NULLABLE else [hollow(entry) for entry in cell[name]]
    write(run, results)
    assert not re.search(r"\b(None|nan|NaN|inf)\b", page_of(run).text + (run.path / "report.md").read_text())


@pytest.mark.usefixtures("undrawn")
def test_values_of_a_gpu_are_shown_if_they_are_known(run: RunDirectory) -> None:
    """Share of the roofline, energy per token, the probe and idle power; on a CPU no column is empty."""
    results = stored_json(run, "results.json")
    write(run, results)
    markdown = (run.path / "report.md").read_text()
    assert not re.search(r"\| % of roofline|Idle power", markdown)
    assert markdown.count("% of roofline: no GPU: ") == 4
    assert markdown.count("Energy per token: no GPU: ") + markdown.count("Energy per token: not measured") == 4
    results["cells"][0] |= {"roofline_fraction": 0.8312, "j_per_token": 0.2104}
    sizes = {"copy_bytes": 1 << 31, "matmul_size": 8192, "cache_bytes": 50 << 20}
    speeds = {"bandwidth_bytes_per_s": 4.1e12, "matmul_flop_per_s": 7e14}
    results["environment"]["sessions"][-1]["probe"] = sizes | speeds
    results["environment"]["idle_power_w"] = 74.25
    write(run, results)
    markdown = (run.path / "report.md").read_text()
    shown = ("% of roofline", "| 83.1 |", "| 210 mJ |", "4.10 TB/s copied", "700 TFLOP/s multiplied", "74.2 W")
    assert [text for text in shown if text not in markdown] == []


def test_a_rebuilt_report_is_the_same_to_the_byte(run: RunDirectory, reported: RunDirectory) -> None:
    """It needs results.json and the generations only."""
    write(run, stored_json(run, "results.json"))
    assert files_of(run) == files_of(reported)
    assert len(files_of(run)) == 2 + 4 + 2 * (2 * 2 + 2 * 1)  # pages; tables; figures of scored suites, and of others


def test_tokens_that_share_a_letter_are_shown_together() -> None:
    """A letter split over several tokens stands with the last of them; broken bytes are shown as such."""
    parts = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"\xff", 4: b" b"}

    def decode(ids: Any) -> str:
        return b"".join(parts[i] for i in ids).decode(errors="replace")

    assert split([0, 1, 2, 4], decode) == ["a", "", "é", " b"]
    for ids in ([], [1], [3, 3, 3, 3, 3, 3, 0], [0, 1, 0, 1, 2], [1, 1, 2, 3, 4]):
        assert "".join(split(ids, decode)) == decode(ids)
        assert len(split(ids, decode)) == len(ids)


@BROWSER
def test_the_viewer_in_a_browser(reported: RunDirectory) -> None:
    """There is no error and no request, and buttons and lists work, from the keyboard too."""
    with opened((reported.path / "report.html").resolve().as_uri(), 400) as (page, wrong):
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.evaluate("typeof broken") == "undefined"
        item, status = page.locator("#viewer-item"), page.locator("#viewer-status")
        assert page.locator(".answer").count() == 4
        first = status.inner_text()
        assert page.locator("#viewer-previous").is_disabled()
        page.locator("#viewer-next").focus()
        page.keyboard.press("Enter")
        second = status.inner_text()
        assert second != first
        page.locator("#viewer-previous").click()
        assert status.inner_text() == first
        item.select_option(index=1)
        assert status.inner_text() == second
        page.locator("#viewer-group").select_option(index=0)
        page.locator("#viewer-arms input").first.uncheck()
        assert page.locator(".answer").count() == 3
        data = json.loads(page_of(reported).data)
        shown = page.locator(".answer .text").first.inner_text()
        assert "</script><script>broken=1</script>" in "".join(data["groups"][0]["items"][1]["answers"][1]["pieces"])
        assert "</script>" in shown
        assert page.locator(".answer .text .f").count() > 0
        assert wrong == []


def test_only_the_suite_of_its_family_is_a_synthetic_task(run: RunDirectory) -> None:
    """Over other questions the embedded family is a demonstration of a small model; so is a page with both."""
    results = stored_json(run, "results.json")
    cells = [ResultCell.model_validate(cell) for cell in results["cells"]]
    tiny = [cell for cell in cells if cell.suite == "arithmetic"]
    asked = [cell.changed(suite="gsm8k") for cell in tiny]
    assert disclaimers(tiny) == [DEMONSTRATION]
    assert disclaimers(asked) == disclaimers([*tiny, *asked]) == [SMALL_MODEL]


def test_a_checkpoint_that_overrides_a_role_is_named_in_place_of_the_family(run: RunDirectory) -> None:
    """By the last part of its folder or id, in the cells that decode with it; the family is named in the others."""
    cells = [ResultCell.model_validate(cell) for cell in stored_json(run, "results.json")["cells"]]
    family = {role: f"embedded:tiny/{role}" for role in ("ar", "mars")}
    assert checkpoint_names([cells[0].changed(checkpoints=family)]) == "tiny"
    changed = cells[0].changed(checkpoints=family | {"mars": "/home/somebody/mine"})
    assert checkpoint_names([changed]) == "tiny"
    assert checkpoint_names([changed.changed(on="mars")]) == "mine"
    assert checkpoint_names([changed.changed(family="mine", checkpoints={"ar": "owner/mine"})]) == "mine"


def test_the_variables_of_the_chat_template_are_named(small_run: RunDirectory) -> None:
    """A prompt written with another value is another prompt."""
    cell = small_run.read("results.json", Results).cells[0]
    task = {**cell.task, "chat_template": True, "template_options": {"enable_thinking": False}}

    assert "chat template, enable_thinking=false" in facts([cell.changed(task=task)])

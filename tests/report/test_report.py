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
from made_records import result_cell
from rich.console import Console
from rich.text import Text
from stages import assemble, write_report
from stored import keep_lines, stored_json, stored_lines

from mtbench.document.model import Figure
from mtbench.document.plots import MOST_TICKS, log_ticks
from mtbench.errors import printable
from mtbench.models.families import RECORD
from mtbench.plan.directory import RunDirectory
from mtbench.report import figures
from mtbench.report.generation_viewer import split
from mtbench.report.phrases import DEMONSTRATION, SMALL_MODEL, checkpoint_names, disclaimers
from mtbench.report.summary import warnings
from mtbench.report.terminal import results_tables
from mtbench.report.text import facts, question, training_cost, training_records
from mtbench.results.format import ResultCell, Results


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
FIXED = {"on", "status", "word", "words", "kind", "grade", "claims", "length", "batching", "method", "engine"}
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
def test_the_question_counts_no_arm_that_failed() -> None:
    cells = [result_cell(arm="a"), result_cell(arm="b"), result_cell(arm="c", status="failed")]
    assert question(cells) == "Which of 2 arms decodes fastest on arithmetic?"


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


@pytest.mark.usefixtures("undrawn")
def test_a_single_arm_needs_no_baseline(run: RunDirectory) -> None:
    """A run of one arm, without a comparison, has a page, too."""
    results = stored_json(run, "results.json")
    results["cells"] = [c | {"speedup": [], "accuracy_vs": [], "agreement": []} for c in results["cells"][:1]]
    plan = stored_json(run, "plan.json")
    plan["cells"] = plan["cells"][:1]
    plan["groups"] = [plan["groups"][0] | {"cells": [results["cells"][0]["cell"]]}]
    run.write_json("plan.json", plan)
    write(run, results)
    text = page_of(run).text
    assert text.count("no arm can be compared") == 1
    assert "Accurac" not in text.partition("no arm can be compared")[2].partition("95% intervals")[0]


def sections_of(run: RunDirectory, results: Any) -> list[str]:
    """Write the report and return the sections of its Markdown, one per suite and batch size."""
    write(run, results)
    parts = (run.path / "report.md").read_text().split("\n## ")[1:]
    return [part for part in parts if ", batch size " in part.splitlines()[0]]


def arm_of(results: Any, arm: str, batch_size: int = 2) -> Any:
    found = (c for c in results["cells"] if (c["suite"], c["batch_size"]) == ("arithmetic", batch_size))
    return next(c for c in found if c["arm"].startswith(arm))


def printed(results: Any, width: int = 140) -> str:
    console = Console(width=width, record=True)
    tables, notes = results_tables(Results.model_validate(results), width)
    console.print(*tables, *map(Text, notes))
    return console.export_text()


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(
    ("claims", "shown"),
    [
        ("lossy", "lossy by design"),
        ("distribution", "same distribution (promised)"),
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
    assert shown.partition(" (")[0] in (run.path / "tables/arithmetic.b2.tex").read_text()


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
    assert len(files_of(run)) == 2 + 4 + 2 * 3  # pages; tables; figures, of which too few blocks have no speedups


def test_tokens_that_share_a_letter_are_shown_together() -> None:
    """A letter split over several tokens stands with the last of them; broken bytes are shown as such."""
    parts = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b"\xff", 4: b" b"}

    def decode(ids: Any, before: Any = ()) -> str:
        head, whole = (b"".join(parts[i] for i in of).decode(errors="replace") for of in (before, [*before, *ids]))
        return whole.removeprefix(head)

    assert split([0, 1, 2, 4], [], decode) == ["a", "", "é", " b"]
    for ids in ([], [1], [3, 3, 3, 3, 3, 3, 0], [0, 1, 0, 1, 2], [1, 1, 2, 3, 4]):
        for prompt in ([], [0, 4]):
            assert "".join(split(ids, prompt, decode)) == decode(ids, prompt)
            assert len(split(ids, prompt, decode)) == len(ids)


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


def test_the_training_record_of_a_checkpoint_is_linked(run: RunDirectory, tmp_path: Path) -> None:
    cells = [ResultCell.model_validate(cell) for cell in stored_json(run, "results.json")["cells"]]
    assert training_records(cells) == {}
    own = cells[0].changed(checkpoints={"mars": str(tmp_path)})
    assert training_records([own]) == {}
    (tmp_path / RECORD).write_text("{}")
    assert training_records([own]) == {"Training record of mars": tmp_path / RECORD}
    assert training_cost(tmp_path / RECORD) == str(tmp_path / RECORD)
    cost = {"tokens": {"fed": 1974704}, "forwards": {"student": 1252, "teacher": 1252}, "flops": 10_049_900_000_000}
    (tmp_path / RECORD).write_text(json.dumps(cost))
    said = "(1,974,704 positions fed, 1,252 forward passes and 1,252 of the teacher, 1e+13 FLOPs)"
    assert training_cost(tmp_path / RECORD) == f"{tmp_path / RECORD} {said}"


def test_the_variables_of_the_chat_template_are_named(small_run: RunDirectory) -> None:
    """A prompt written with another value is another prompt."""
    cell = small_run.read("results.json", Results).cells[0]
    task = {**cell.task, "chat_template": True, "template_options": {"enable_thinking": False}}

    assert "chat template, enable_thinking=false" in facts([cell.changed(task=task)])

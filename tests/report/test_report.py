"""The report: it is complete and escaped, the same every time, and loads nothing from the network."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from stages import assemble, write_report
from stored import stored_json, stored_lines

from mtbench.document.model import Figure
from mtbench.errors import printable
from mtbench.plan.directory import RunDirectory
from mtbench.report import figures
from mtbench.report.phrases import checkpoint_names
from mtbench.report.summary import warnings
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


NULLABLE = {
    **dict.fromkeys(("accuracy", "tokens_per_forward", "tokens_per_forward_ci", "tokens", "wall_s", "prefill_s")),
    **dict.fromkeys(("decode_s", "device_s", "peak_memory_bytes", "energy_j", "lossless", "kv_bytes")),
    **dict.fromkeys(("positions_fed_per_token", "positions_fed_per_forward", "draft_forwards")),
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


@pytest.mark.usefixtures("one_group_drawn")
@pytest.mark.parametrize("where", ["each in another arm", "all in all arms"])
def test_a_value_that_was_not_measured_is_a_dash(run: RunDirectory, where: str) -> None:
    """With every value that may be null, in one cell each or in all cells, no page has None or NaN."""
    results = stored_json(run, "results.json")
    cells = results["cells"]
    names = [*NULLABLE, "speedup", "accuracy_vs"]
    for number, name in enumerate(names):
        chosen = cells if where == "all in all arms" else [cells[number % len(cells)]]
        for cell in chosen:
            cell[name] = NULLABLE[name] if name in NULLABLE else [hollow(entry) for entry in cell[name]]
    write(run, results)
    assert not re.search(r"\b(None|nan|NaN|inf)\b", page_of(run).text + (run.path / "report.md").read_text())


def test_a_rebuilt_report_is_the_same_to_the_byte(run: RunDirectory, reported: RunDirectory) -> None:
    """It needs results.json and the generations only."""
    write(run, stored_json(run, "results.json"))
    assert files_of(run) == files_of(reported)
    assert len(files_of(run)) == 2 + 4 + 2 * (2 * 2 + 2 * 1)  # pages; tables; figures of scored suites, and of others


def test_a_checkpoint_that_overrides_a_role_is_named_in_place_of_the_family(run: RunDirectory) -> None:
    """By the last part of its folder or id, in the cells that decode with it; the family is named in the others."""
    cells = [ResultCell.model_validate(cell) for cell in stored_json(run, "results.json")["cells"]]
    family = {role: f"embedded:tiny/{role}" for role in ("ar", "mars")}
    assert checkpoint_names([cells[0].changed(checkpoints=family)]) == "tiny"
    changed = cells[0].changed(checkpoints=family | {"mars": "/home/somebody/mine"})
    assert checkpoint_names([changed]) == "tiny"
    assert checkpoint_names([changed.changed(on="mars")]) == "mine"
    assert checkpoint_names([changed.changed(family="mine", checkpoints={"ar": "owner/mine"})]) == "mine"

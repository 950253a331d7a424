"""What a gate writes for people: the page, the Markdown, the terminal, and the files beside them."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from browsers import BROWSER, opened
from made_gates import (
    GATES,
    allowed,
    changed,
    counts_only,
    floor_file,
    gate,
    hostile,
    many,
    slower,
    time_test,
    timed_cell,
)
from schemas import validator

from mtbench.document.console import Terminal
from mtbench.document.html_page import html
from mtbench.document.markdown_text import markdown
from mtbench.document.terminal import show
from mtbench.experiments.gate import figures, tables
from mtbench.experiments.gate.document import document
from mtbench.experiments.gate.experiment import write
from mtbench.experiments.gate.format import Gate
from mtbench.records import cleaned, dump, parse

EVERY = pytest.mark.parametrize("made", [pytest.param(make(), id=name) for name, make in GATES.items()])
FILES = {"gate.json", "gate.md", "gate.html"}


def shown_of(made: Gate) -> str:
    """The text of the page, without figures."""
    return text_of(html(document(made, drawn=False)))


def text_of(markup: str) -> str:
    """The visible text of a page."""
    markup = re.sub(r"<(style|script)>.*?</\1>|<wbr>", "", markup, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def printed(made: Gate, width: int = 100) -> str:
    terminal = Terminal(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(document(made, drawn=False), terminal)
    return terminal.export_text()


@EVERY
def test_all_files_are_written(made: Gate, tmp_path: Path) -> None:
    """Every kind of gate has every file; gate.json is the record itself."""
    assert write(tmp_path / "new", made) == tmp_path / "new" / "gate.html"
    assert {path.name for path in (tmp_path / "new").iterdir()} - {"figures"} == FILES
    stored = (tmp_path / "new" / "gate.json").read_text()
    assert parse(stored, Gate, "gate.json") == made


@EVERY
def test_a_gate_is_as_its_schema_says(made: Gate) -> None:
    document = json.loads(json.dumps(dump(made), allow_nan=False))
    validator("gate").validate(document)
    for name in document:
        assert not validator("gate").is_valid({k: v for k, v in document.items() if k != name}), name


def test_a_floor_is_as_its_schema_says() -> None:
    document: dict[str, Any] = json.loads(json.dumps(dump(floor_file())))
    validator("floor").validate(document)
    assert not validator("floor").is_valid({**document, "floors": [{**document["floors"][0], "pairs": 0}]})


@EVERY
def test_the_first_sentence_is_the_word_and_why(made: Gate) -> None:
    """On the page, in the Markdown and, as what a reader sees last, in the terminal."""
    shown, clean = document(made, drawn=False), cleaned(made)
    sentence = f"{made.word}: {clean.reason.rstrip('.')}"
    heading = re.search("<h1>.*</h1>", html(shown))
    assert heading
    assert text_of(re.sub("</?code>", "`", heading[0])) == f"{tables.SIGNS[made.word]} {sentence}"
    assert markdown(shown).startswith(f"# {made.word}: ")
    last = "".join(printed(made, 4000).splitlines()[-1].split())
    assert last == "".join(f"{tables.SIGNS[made.word]} {sentence}".split())


def test_percentages_are_what_people_read() -> None:
    assert tables.changed_by(time_test(0.031, 0.009)) == "+3.1% [2.2, 4.0]"
    assert tables.changed_by(time_test(-0.004, 0.005)) == "−0.4% [−0.9, 0.1]"
    assert tables.changed_by(time_test(-0.0001, 0.003)) == "0.0% [−0.3, 0.3]"
    assert tables.changed_by(time_test(0.0008, 0.0012)) == "+0.08% [−0.04, 0.20]"
    assert tables.changed_by(time_test(0.02, ci_low=None, ci_high=None)) == "no interval"
    assert tables.changed_by(time_test(ratio=None, ci_low=None, ci_high=None)) == "no interval"


def test_the_page_names_what_it_rests_on() -> None:
    """Builds side by side, the machine, the floor, findings by stage, the cells."""
    shown = shown_of(slower())
    for text in (
        "Tokens and counts of 4 cells: all the same.",
        "Times of 4 cells in 14 pairs of processes: 1 FAIL, 1 INCONCLUSIVE, 2 PASS.",
        "✗ FAIL slower: gsm8k.mars-tau0.9.graph.b1: head takes 3.4% longer",
        "+3.4% [2.6, 4.2] ✗ FAIL 14 4.00 s 4.15 s +0.9% +2.5% +1.7% +0.8%",
        "INCONCLUSIVE, 61 pairs needed",
        "Environment git:main git:feature",
        "torch 2.11.0 2.11.0",
        "GPU GPU-6a8e4a60",
        "Processor Intel(R) Xeon(R) Platinum 8480C",
        "Kernel Linux-6.8.0",
        "smallest detectable slowdown 1.0%",
        "tested after 6, 9, 14 pairs",
    ):
        assert text in shown, text
    assert "triton" not in shown  # in neither build


def test_without_times_no_column_of_times() -> None:
    """Counts only: the cells are named, and nothing is shown that was not measured."""
    shown = shown_of(counts_only())
    assert "Nothing was timed: only counts were asked for." in shown
    assert "1 gsm8k.ar.graph.b1 ✓ same – • not timed" in shown


def test_findings_stand_by_stage_the_gravest_first() -> None:
    shown = shown_of(changed())
    places = [
        shown.index(text)
        for text in ("Can they be compared?", "vanished:", "changed:", "more work:", "unstable:", "not timed:")
    ]
    assert places == sorted(places)


def test_a_cell_that_was_noted_is_not_called_the_same() -> None:
    """Other tokens by permission, or a base that disagrees with itself, are no agreement."""
    shown = shown_of(allowed())
    assert "Tokens and counts of 4 cells: 1 noted, 3 the same." in shown
    assert "• noted: changed" in shown


def test_the_figure_says_in_words_what_it_shows() -> None:
    """The text alternative has every cell's value and word; the drawing itself writes the word beside its mark."""
    forest = figures.forest(slower())
    for cell in slower().timed:
        assert f"{cell.arm}: {tables.changed_by(cell.test)}, {cell.test.word}" in forest.alt
        assert f"{tables.change(cell.test)}  {cell.test.word}" in forest.svg
    assert f"{tables.ALL_CELLS}: +1.1% [0.7, 1.5], INCONCLUSIVE" in forest.alt
    assert "accepted slowdown +2%" in forest.svg
    ElementTree.fromstring(forest.svg)
    assert "8\u2002medusa:tree=2x2@medusa/graph, b8: +5.2%" in figures.forest(many()).alt


def test_cells_without_times_are_drawn_as_far_as_they_go() -> None:
    """No pair, one pair, and times of zero seconds: what cannot be drawn is left out, and nothing fails."""
    unmeasured = time_test(ratio=None, ci_low=None, ci_high=None, word="INCONCLUSIVE")
    single = time_test(0.01, ci_low=None, ci_high=None, word="INCONCLUSIVE")
    none = timed_cell(0, test=unmeasured, base_s=[], head_s=[], attribution=None)
    one = timed_cell(1, test=single, base_s=[2.0], head_s=[2.02], attribution=None)
    zero = timed_cell(2, test=unmeasured, base_s=[0.0, 0.0], head_s=[0.0, 0.0], attribution=None)
    for cells in ([none], [one], [zero], [none, one, zero]):
        assert "INCONCLUSIVE" in figures.forest(gate(timed=cells, all_cells=None)).alt
    assert document(changed()).figures() == []


def test_no_text_is_markup() -> None:
    """Labels, errors and versions of strangers are shown as text, in figures too, and control nothing."""
    shown = document(hostile())
    page, written = html(shown), markdown(shown)
    assert "<b>&" not in page
    assert "broken=1" in text_of(page)
    assert "<script" not in written
    for text in (page, written, printed(hostile())):
        assert not set("\x1b\x00\u202e") & set(text)


@pytest.mark.parametrize("width", [60, 100, 200])
def test_the_terminal_has_every_cell(width: int) -> None:
    shown = "".join(printed(slower(), width).split())
    for cell in slower().timed:
        assert tables.changed_by(cell.test).replace(" ", "") in shown
    assert "61pairs" in shown
    assert all(len(line) <= width for line in printed(slower(), width).splitlines())


@BROWSER
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    """There is no error, and nothing is wider than the window, on a desk or a phone."""
    for name in ("FAIL by time", "FAIL by tokens", "30 cells", "hostile"):
        with opened(write(tmp_path / name, GATES[name]()).resolve().as_uri()) as (tab, wrong):
            tab.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
            for width in (1280, 400):  # tables scroll, the page does not
                tab.set_viewport_size({"width": width, "height": 900})
                assert tab.evaluate("document.documentElement.scrollWidth") == width, (name, width)
        assert wrong == []

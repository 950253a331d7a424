"""What a gate writes for people: the page, the Markdown, the terminal, and the files beside them."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from made_gates import (
    GATES,
    changed,
    floor_file,
    gate,
    hostile,
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
from mtbench.records import dump, parse

EVERY = pytest.mark.parametrize("made", [pytest.param(make(), id=name) for name, make in GATES.items()])
FILES = {"gate.json", "gate.md", "gate.html"}


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
    for name in (name for name, field in Gate.model_fields.items() if field.is_required()):
        assert not validator("gate").is_valid({k: v for k, v in document.items() if k != name}), name


def test_a_floor_is_as_its_schema_says() -> None:
    document: dict[str, Any] = json.loads(json.dumps(dump(floor_file())))
    validator("floor").validate(document)
    assert not validator("floor").is_valid({**document, "floors": [{**document["floors"][0], "pairs": 0}]})


def test_percentages_are_what_people_read() -> None:
    assert tables.changed_by(time_test(0.031, 0.009)) == "+3.1% [2.2, 4.0]"
    assert tables.changed_by(time_test(-0.004, 0.005)) == "−0.4% [−0.9, 0.1]"
    assert tables.changed_by(time_test(-0.0001, 0.003)) == "0.0% [−0.3, 0.3]"
    assert tables.changed_by(time_test(0.0008, 0.0012)) == "+0.08% [−0.04, 0.20]"
    assert tables.changed_by(time_test(0.02, ci_low=None, ci_high=None)) == "no interval"
    assert tables.changed_by(time_test(ratio=None, ci_low=None, ci_high=None)) == "no interval"


def test_cells_without_times_are_drawn_as_far_as_they_go() -> None:
    """No pair, one pair, and times of zero seconds: what cannot be drawn is left out, and nothing fails."""
    unmeasured = time_test(ratio=None, ci_low=None, ci_high=None, word="INCONCLUSIVE")
    single = time_test(0.01, ci_low=None, ci_high=None, word="INCONCLUSIVE")
    none = timed_cell(0, test=unmeasured, base_s=[], head_s=[])
    one = timed_cell(1, test=single, base_s=[2.0], head_s=[2.02])
    zero = timed_cell(2, test=unmeasured, base_s=[0.0, 0.0], head_s=[0.0, 0.0])
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

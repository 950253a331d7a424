"""What a gate writes for people: the page, the Markdown, the terminal, and the files beside them."""

import re
from html import unescape
from pathlib import Path

from made_gates import (
    hostile,
    time_test,
)

from mtbench.document.console import Terminal
from mtbench.document.html_page import html
from mtbench.document.markdown_text import markdown
from mtbench.document.terminal import show
from mtbench.experiments.gate import tables
from mtbench.experiments.gate.document import document
from mtbench.experiments.gate.experiment import write
from mtbench.experiments.gate.format import Gate
from mtbench.records import parse

FILES = {"gate.json", "gate.md", "gate.html"}


def text_of(markup: str) -> str:
    """The visible text of a page."""
    markup = re.sub(r"<(style|script)>.*?</\1>|<wbr>", "", markup, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def printed(made: Gate, width: int = 100) -> str:
    terminal = Terminal(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    show(document(made), terminal)
    return terminal.export_text()


def test_all_files_are_written(tmp_path: Path) -> None:
    """gate.json is the record itself."""
    made = hostile()
    assert write(tmp_path / "new", made) == tmp_path / "new" / "gate.html"
    assert {path.name for path in (tmp_path / "new").iterdir()} == FILES
    stored = (tmp_path / "new" / "gate.json").read_text()
    assert parse(stored, Gate, "gate.json") == made


def test_percentages_are_what_people_read() -> None:
    assert tables.changed_by(time_test(0.031, 0.009)) == "+3.1% [2.2, 4.0]"
    assert tables.changed_by(time_test(-0.004, 0.005)) == "−0.4% [−0.9, 0.1]"
    assert tables.changed_by(time_test(-0.0001, 0.003)) == "0.0% [−0.3, 0.3]"
    assert tables.changed_by(time_test(0.02, ci_low=None, ci_high=None)) == "no interval"


def test_no_text_is_markup() -> None:
    """Labels, errors and versions of strangers are shown as text, and control nothing."""
    shown = document(hostile())
    page, written = html(shown), markdown(shown)
    assert "<b>&" not in page
    assert "broken=1" in text_of(page)
    assert "<script" not in written
    for text in (page, written, printed(hostile())):
        assert not set("\x1b\x00\u202e") & set(text)

"""No text that comes from outside controls the terminal."""

import io

from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from mtbench.document.console import Terminal
from mtbench.errors import UserError, first_line, printable

HOSTILE = "a\x1b]0;title\x1b[2J\x9b31m\u202eb"
ESCAPED = r"a\x1b]0;title\x1b[2J\x9b31m\u202eb"


def test_a_terminal_shows_control_characters_as_escapes_in_lines_and_tables() -> None:
    file = io.StringIO()
    terminal = Terminal(file=file, width=120)
    terminal.print(HOSTILE, markup=False)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE, min_width=60)
    table.add_row(HOSTILE)
    terminal.print(table)
    shown = file.getvalue()
    assert shown.count(ESCAPED) == 4
    assert all(character == "\n" or character.isprintable() for character in shown)


def test_a_terminal_keeps_the_control_sequences_that_rich_makes() -> None:
    file = io.StringIO()
    Terminal(file=file, force_terminal=True, color_system="standard").print("[bold]word[/]")
    assert "\x1b[1mword\x1b[0m" in file.getvalue()


def test_an_error_is_one_printable_line() -> None:
    assert str(UserError(f"{HOSTILE}\n")) == ESCAPED + r"\n"
    assert first_line(RuntimeError(f"{HOSTILE}.")) == ESCAPED


@given(st.text())
def test_printable_text_has_no_control_character_and_keeps_what_has_none(text: str) -> None:
    shown = printable(text)
    assert "\x1b" not in shown
    assert len(shown.splitlines()) <= 1
    assert printable(shown) == shown
    if all(c.isprintable() or (c.isspace() and c not in "\t\n\r\v\f\x1c\x1d\x1e\x1f\x85\u2028\u2029") for c in text):
        assert shown == text

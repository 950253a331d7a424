"""Output of the command line, and the run directories that it has started."""

from pathlib import Path
from typing import Any

from mtbench.report.console import Terminal

FAILED, MISTAKE, INCOMPLETE, INTERRUPTED = 1, 2, 3, 130  # exit codes; mtbench/cli/main.py says what they mean
out = Terminal()
err = Terminal(stderr=True)
started: list[Path] = []  # run directories of this process; the message on interruption names the last one


def say(text: Any, console: Terminal | None = None) -> None:
    """Print one line of plain text, unwrapped."""
    (console or out).print(str(text), markup=False, highlight=False, soft_wrap=True)


def warn(text: Any) -> None:
    """Print one line of plain text to standard error."""
    say(text, err)

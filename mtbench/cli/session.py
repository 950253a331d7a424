"""Output of the command line, and its slow imports."""

import gc
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.files import write_errors

out = Terminal()
err = Terminal(stderr=True)


@contextmanager
def importing() -> Iterator[None]:
    """Exclude the million objects of torch and transformers from garbage collection.

    Their collection takes a fourth of the time until a command has planned a run.
    """
    first = "torch" not in sys.modules  # what a process made after that may be garbage
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


def say(text: Any, console: Terminal | None = None) -> None:
    """Print one line of plain text, unwrapped."""
    (console or out).say(text)


def warn(text: Any) -> None:
    """Print one line of plain text to standard error."""
    say(text, err)


def ignore_interrupts() -> None:
    """Ignore signals during the last output: the process ends now."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def beside_json(json_to: Path | None) -> Terminal:
    """Return where a command with `--json` prints: standard error if the JSON gets standard output."""
    return err if str(json_to) == "-" else out


def write_json(json_to: Path | None, text: str, advice: str = "choose another file for --json.") -> None:
    """Write JSON to the file of `--json`; `-` is standard output. `advice` ends the error of a full disk."""
    if str(json_to) == "-":
        sys.stdout.write(text)
    elif json_to is not None:
        with write_errors(json_to, advice):
            json_to.write_text(text)


def refuse_twice(paths: Sequence[Path], kind: str, advice: str) -> None:
    """Raise UserError if two of the paths that a command was given are the same file or directory."""
    seen: dict[str, Path] = {}
    for path in paths:
        other = seen.setdefault(os.path.realpath(path), path)
        if other is not path:
            raise UserError(f"{str(path)!r} is the same {kind} as {str(other)!r}; {advice}.")


def hide_types_of_flags(command: Any) -> None:
    """Leave the type out of the help of options without a value: Typer shows `<bool>`, which may not be given."""
    for parameter in (*command.params, command.get_help_option(typer.Context(command))):
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    for child in getattr(command, "commands", {}).values():
        hide_types_of_flags(child)

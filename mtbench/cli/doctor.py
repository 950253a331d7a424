"""`mtbench doctor`: run the checks, print and store each finding as it is found."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from mtbench import files
from mtbench.cli import session
from mtbench.cli.parameters import command
from mtbench.cli.session import beside_json, err, say
from mtbench.document.formatting import listed
from mtbench.errors import FAILED, INTERRUPTED
from mtbench.options import common
from mtbench.options.common import COMPARED
from mtbench.options.fields import option

if TYPE_CHECKING:
    from mtbench.doctor.checks import Checked, Diagnosis

app = typer.Typer()
STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "none": "dim"}


@app.command()
@command
def doctor(
    model: Annotated[
        str | None,
        option(
            "Folder, hub id or GGUF file of a checkpoint: which code decodes it here? Default: an embedded one.",
            COMPARED,
        ),
    ] = None,
    device: common.Device = "auto",
    json_to: common.JsonTo = None,
) -> None:
    """Check this machine: can figures that are measured here be trusted?

    Run it first, and paste its lines into an issue. ✓: as it should be. !: something works badly or is missing. ✗:
    figures measured here cannot be trusted; the exit code is 1. –: not measured here. It takes less than a minute, and
    for a checkpoint of yours the time to load it. Each finding is printed, and stored by `--json FILE`, when it is
    found: an interruption keeps it.
    """
    from mtbench.doctor.checks import SIGNS, Subject, all_checks, examine
    from mtbench.hardware import machine
    from mtbench.models.auto import resolve_device
    from mtbench.records import cleaned
    from mtbench.report.progress import ChangingLine

    files.refuse_existing(json_to)
    console, line = beside_json(json_to), ChangingLine(err)
    subject, checks = Subject(resolve_device(device), device, model), all_checks()
    steps = map(cleaned, examine(subject, machine.environment(sys.argv), checks))
    found = next(steps)
    try:
        _store(json_to, found)
        while found.not_reached:
            line.show(f"running: {found.not_reached[0]}")
            with line:
                found = next(steps)
            _store(json_to, found)
            console.print(_row(found.checks[-1], max(len(entry.name) for entry in checks)))
    except KeyboardInterrupt:
        session.ignore_interrupts()
        _store(json_to, found, last=True)
        running, *others = found.not_reached or [found.checks[-1].check]
        say(f"interrupted in {running}; not reached: {listed(others) or 'none'}", err)
        sys.exit(INTERRUPTED)
    wrong = [checked.check for checked in found.checks if checked.state == "fail"]
    verdict = f"cannot be trusted yet: {listed(wrong)}" if wrong else "can be trusted"
    console.say(f"{SIGNS['fail' if wrong else 'pass']} Figures measured here {verdict}. ({found.wall_s:.0f} s)")
    _store(json_to, found, last=True)
    if wrong:
        raise typer.Exit(FAILED)


def _row(checked: "Checked", width: int) -> Table:
    from mtbench.doctor.checks import SIGNS

    row = Table.grid(padding=(0, 2, 0, 0))
    for least in (1, width, None):
        row.add_column(min_width=least)
    text = Text.assemble(checked.found, *([f"\n→ {checked.advice}"] if checked.advice else []))
    row.add_row(Text(SIGNS[checked.state], STYLES[checked.state]), checked.check, text)
    return row


def _store(file: Path | None, found: "Diagnosis", *, last: bool = False) -> None:
    """Write what has been found to the file of `--json`, atomically; to a stream only the `last` time."""
    from mtbench.records import dump

    if file is not None and str(file) != "-" and (os.path.isfile(file) or not os.path.exists(file)):
        files.write_json(file, dump(found), advice="choose another file for --json.")
    elif last:
        session.write_json(file, json.dumps(dump(found), indent=1, allow_nan=False) + "\n")

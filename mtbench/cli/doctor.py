"""`mtbench doctor`: run the checks and print each finding as it is found."""

import json
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from mtbench import files
from mtbench.cli import session
from mtbench.cli.parameters import command
from mtbench.cli.session import beside_json, err
from mtbench.document.formatting import listed
from mtbench.errors import FAILED
from mtbench.hardware import machine
from mtbench.options import common
from mtbench.options.common import COMPARED
from mtbench.options.fields import option

if TYPE_CHECKING:
    from mtbench.doctor.checks import Checked

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
    for a checkpoint of yours the time to load it. Each finding is printed when it is found.
    """
    machine.choose_waiting()
    from mtbench.doctor.checks import SIGNS, Checked, Diagnosis, Subject, all_checks
    from mtbench.models.auto import resolve_device
    from mtbench.records import cleaned, dump
    from mtbench.report.progress import ChangingLine

    files.refuse_existing(json_to)
    console, line, started_at, found = beside_json(json_to), ChangingLine(err), time.monotonic(), list[Checked]()
    subject, checks = Subject(resolve_device(device), device, model), all_checks()
    for check in checks:
        with line:
            line.show(f"running: {check.name}")
            found.append(cleaned(check.checked(subject)))
        console.print(_row(found[-1], max(len(entry.name) for entry in checks)))
    wrong = [checked.check for checked in found if checked.state == "fail"]
    verdict = f"cannot be trusted yet: {listed(wrong)}" if wrong else "can be trusted"
    wall_s = time.monotonic() - started_at
    console.say(f"{SIGNS['fail' if wrong else 'pass']} Figures measured here {verdict}. ({wall_s:.0f} s)")
    diagnosis = Diagnosis(
        schema_version=1,
        environment=machine.environment(sys.argv),
        device=subject.device,
        passed=not wrong,
        wall_s=wall_s,
        checks=found,
    )
    session.write_json(json_to, json.dumps(dump(cleaned(diagnosis)), indent=1, allow_nan=False) + "\n")
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

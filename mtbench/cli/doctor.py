"""`mtbench doctor`: run the checks, print a table, write JSON, remember whether the machine passed."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mtbench.cli.parameters import command
from mtbench.cli.session import FAILED, beside_json, err, write_json
from mtbench.files import refuse_existing
from mtbench.runs import options
from mtbench.runs.options import COMPARED, option

app = typer.Typer()
FIGURES_S = 50.0  # after so long, figures are left out that no trust rests on
STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "none": "dim"}


@app.command()
@command
def doctor(
    model: Annotated[
        Sequence[str],
        option(
            "Folder, hub id or GGUF file of a checkpoint: which code would decode it here? Repeatable; default: the "
            "embedded ones.",
            COMPARED,
        ),
    ] = (),
    device: options.Device = "auto",
    data_dir: options.DataDir = None,
    json_to: options.JsonTo = None,
) -> None:
    """Check this machine: can figures that are measured here be trusted?

    Run it first, and paste its table into an issue. ✓: as it should be. !: something works badly or is missing. ✗:
    figures measured here cannot be trusted; the exit code is 1. –: not measured here. It takes a minute at most, and
    for checkpoints of yours the time to load them.
    """
    from mtbench.doctor import record
    from mtbench.doctor.checks import SIGNS, Subject, all_checks, examine
    from mtbench.hardware import machine
    from mtbench.records import cleaned, dump
    from mtbench.report.progress import ChangingLine
    from mtbench.runs.model_pool import resolve_device

    file = None if json_to is None else Path(json_to)
    refuse_existing(file)
    until_s, console = time.monotonic() + FIGURES_S, beside_json(file)
    subject = Subject(resolve_device(device), device, data_dir, tuple(model), until_s)
    with ChangingLine(err) as line:
        found = cleaned(examine(subject, machine.environment(sys.argv), all_checks(), line.show))
    record.remember(subject.device, passed=found.passed)
    table = Table.grid(padding=(0, 2, 0, 0))
    for checked in found.checks:
        text = Text.assemble(checked.found, *([f"\n→ {checked.advice}"] if checked.advice else []))
        table.add_row(Text(SIGNS[checked.state], STYLES[checked.state]), checked.check, text)
    console.print(table)
    wrong = [checked.check for checked in found.checks if checked.state == "fail"]
    verdict = f"cannot be trusted yet: {', '.join(wrong)}" if wrong else "can be trusted"
    console.say(f"{SIGNS['fail' if wrong else 'pass']} Figures measured here {verdict}. ({found.wall_s:.0f} s)")
    write_json(file, json.dumps(dump(found), indent=1, allow_nan=False) + "\n")
    if wrong:
        raise typer.Exit(FAILED)

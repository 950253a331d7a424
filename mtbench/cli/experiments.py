"""The commands that measure: `run`, `choose`, `gate`, `load`, `audit`, `reproduce`.

Each is made from its experiment's options.

An experiment is imported when its command runs: it imports torch, which `--help` does not need.
"""

import sys
import time
from pathlib import Path
from typing import Any

import typer

from mtbench.cli.parameters import given, load_plugins, parameters, record_of, with_parameters
from mtbench.cli.session import beside_json, err, importing, say, warn, write_json
from mtbench.experiments.registry import KINDS, experiment_of, records_of
from mtbench.files import refuse_existing
from mtbench.hardware.machine import choose_waiting


def command(name: str) -> typer.Typer:
    """Return the command of an experiment."""
    app = typer.Typer()

    def run(ctx: typer.Context, **_: Any) -> None:
        carry_out(name, ctx)

    run.__doc__ = KINDS[name].help
    app.command(name)(with_parameters(run, parameters(*records_of(name))))
    return app


def carry_out(name: str, ctx: typer.Context) -> None:
    """Run the command, print the findings, and end with the path of its page."""
    began = time.monotonic()
    request_kind, session_kind = records_of(name)
    given_options, session = given(ctx, request_kind), record_of(ctx, session_kind)
    choose_waiting(Path(session.out) if session.out is not None and session.resume else None)
    files = load_plugins(session.plugin)
    session = session.changed(plugin=files) if files else session
    with importing():
        from mtbench.experiments import experiment as frame  # imports torch

        experiment = experiment_of(name)
    json_to = session.json_to
    there = Path(session.out) / experiment.result if session.out is not None and session.resume else None
    refuse_existing(json_to, there)
    console = beside_json(json_to)
    if not session.resume and (listed := experiment.listing(record_of(ctx, request_kind))):
        for renderable in listed:
            console.print(renderable)
        return
    if getattr(session, "dry_run", False):
        frame.dry_run(experiment, given_options, session, console, err)
        return
    job = frame.begin(experiment, given_options, session, err, warn, sys.argv, began)
    found = frame.carry_out(experiment, job)
    experiment.show(job, found, console)
    if json_to is not None:
        written = job.path / experiment.result
        write_json(json_to, written.read_text(), f"all is complete, and {written} has the same.")
    say(job.path / experiment.page, console)
    if code := experiment.exit_code(found, session):
        raise typer.Exit(code)

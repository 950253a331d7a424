"""The stages of a run as commands of their own: `plan`, `generate`, `score` and `report`."""

import sys
from typing import Annotated, Any

import typer

from mtbench.cli.parameters import command, given, load_plugins, parameters, record_of, with_parameters
from mtbench.cli.session import beside_json, err, importing, out, say, warn, write_json
from mtbench.errors import FAILED, UserError
from mtbench.files import refuse_existing
from mtbench.options import common
from mtbench.options.common import MACHINE
from mtbench.options.fields import option
from mtbench.plan.request import Execution, RunRequest, RunSession

app = typer.Typer()

NOT_OF_A_PLAN = ("resume", "json_to", "dry_run", "workers", "ray", "server", "peak_memory", "fail_on")


def plan(ctx: typer.Context, **_: Any) -> None:
    """Write the plan of a run: prompts as token ids, cells, blocks, rounds."""
    with importing():
        from mtbench.experiments import experiment as frame  # imports torch
        from mtbench.experiments.run import PLAN_ONLY

    session = record_of(ctx, RunSession)
    load_plugins(session.plugin)
    job = frame.begin(PLAN_ONLY, given(ctx, RunRequest), session, err, warn, sys.argv)
    say(job.path)


app.command()(with_parameters(plan, parameters(RunRequest, RunSession, without=NOT_OF_A_PLAN)))


@app.command()
@command
def generate(
    directory: common.Directory,
    workers: common.Workers = None,
    ray: common.Ray = None,
    data_dir: common.DataDir = None,
    server: common.Servers = (),
    engine_option: common.EngineOptions = (),
    peak_memory: common.PeakMemory = False,
    timed_only: Annotated[
        bool, option("Leave out the untimed passes: re-scoring, energy, peak memory.", MACHINE, hidden=True)
    ] = False,
    turns: Annotated[
        bool,
        option(
            "Print `ready` before every block and wait for a line on standard input, so that two processes "
            "can take turns.",
            MACHINE,
            hidden=True,
        ),
    ] = False,
    plugin: common.Plugins = (),
) -> None:
    """Decode the missing batches of a plan.

    Needs no network, lm-eval or datasets, except for a suite whose authors do not allow its prompts to be stored.
    """
    with importing():
        from mtbench.measure import executor
        from mtbench.plan.directory import RunDirectory
        from mtbench.plan.run import Run
        from mtbench.report.progress import RunProgress

    execution = Execution(
        workers=workers,
        ray=ray,
        data_dir=data_dir,
        peak_memory=peak_memory,
        timed_only=timed_only,
        wait=_wait_for_turn if turns else None,
        servers=frozenset(server),
        engine_options=frozenset(engine_option),
    )
    files = RunDirectory.open(directory)
    files.refuse_other("run")  # without looks, cells that left would be decoded
    with RunProgress(err) as progress, Run.locked(files) as run:
        executor.generate(run, progress, execution)
    if any(failure.stage is None for failure in run.failures):
        raise typer.Exit(FAILED)


def _wait_for_turn() -> None:
    """Print `ready`, then wait for a line on standard input. Raises UserError if the input ends."""
    say("ready")
    out.file.flush()
    if not sys.stdin.readline():
        raise UserError("--turns: standard input ended before the last block; give one line per block.")


@app.command()
@command
def score(
    directory: common.Directory,
    data_dir: common.DataDir = None,
    allow_unsandboxed_code: common.AllowUnsandboxedCode = False,
    plugin: common.Plugins = (),
) -> None:
    """Score the stored texts of a run. Needs no model and no GPU."""
    from mtbench.measure import score as scoring
    from mtbench.plan.directory import RunDirectory
    from mtbench.plan.run import Run

    with Run.locked(RunDirectory.open(directory)) as run:
        scoring.score(run, data_dir, unsandboxed=allow_unsandboxed_code)
        scoring.validate(run)


@app.command()
@command
def report(
    directory: common.Directory,
    json_to: common.JsonTo = None,
    plugin: common.Plugins = (),
    price_per_hour: common.PricePerHour = None,
) -> None:
    """Rebuild results.json, report.md and report.html from stored lines."""
    with importing():
        from mtbench.experiments import pipeline
        from mtbench.experiments.choose import experiment as race
        from mtbench.plan.directory import RunDirectory
        from mtbench.plan.run import Run
        from mtbench.report.terminal import show_results

    written = directory / "results.json"
    refuse_existing(json_to, written)
    with Run.locked(RunDirectory.open(directory)) as run:
        rebuild = race.report if run.race is not None else pipeline.report
        results = rebuild(run, price_per_hour=price_per_hour)
    console = beside_json(json_to)
    show_results(run.directory, results, console)
    write_json(json_to, written.read_text(), f"the run is complete, and {written} has the same.")
    say(directory / "report.html", console)

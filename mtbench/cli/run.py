"""`mtbench run` and its stages `plan`, `generate`, `score` and `report`: their options.

The work is in mtbench/cli/stages.py and mtbench/cli/report.py. A command imports them when it runs: they import torch,
which `--help` does not need.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from mtbench.cli.request_options import (
    DataOption,
    DryRunOption,
    FailOnOption,
    JsonOption,
    OutOption,
    PeakMemoryOption,
    PluginOption,
    PriceOption,
    RayOption,
    ResumeOption,
    ServerOption,
    UnsandboxedOption,
    WorkersOption,
    given_fields,
    request_of,
    with_options,
)
from mtbench.cli.session import FAILED
from mtbench.files import refuse_existing
from mtbench.runs.run_request import Execution

app = typer.Typer()

DirectoryArgument = Annotated[Path, typer.Argument(help="A run directory.")]


@app.command()
@with_options
def run(
    ctx: typer.Context,
    directory: OutOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
    json_to: JsonOption = None,
    workers: WorkersOption = None,
    ray: RayOption = None,
    server: ServerOption = [],  # noqa: B006
    peak_memory: PeakMemoryOption = False,
    fail_on: FailOnOption = "divergent,void,failed",
    **_: Any,
) -> None:
    """Compare arms: plan, generate, score and report."""
    from mtbench.cli import report, stages

    refuse_existing(json_to, directory / "results.json" if directory and resume else None)
    request = request_of(ctx.params)
    failing = report.causes(fail_on)
    servers = {*server, *stages.servers_of(request)}
    settings = Execution.of(request, workers=workers, ray=ray, peak_memory=peak_memory, servers=servers)
    stages.check(settings, request.device)
    given = given_fields(ctx)
    if dry_run:
        stages.dry_run(request, None if resume else directory, given)
        return
    opened = stages.resume(request, directory, given) if resume else stages.start(request, directory, given)
    if code := report.finish(opened, settings, json_to, failing):
        raise typer.Exit(code)


@app.command()
@with_options
def plan(ctx: typer.Context, directory: OutOption = None, **_: Any) -> None:
    """Write the plan of a run: prompts as token ids, cells, blocks, rounds."""
    from mtbench.cli import stages

    stages.plan(request_of(ctx.params), directory, given_fields(ctx))


@app.command()
def generate(
    directory: DirectoryArgument,
    workers: WorkersOption = None,
    ray: RayOption = None,
    data_dir: DataOption = None,
    server: ServerOption = [],  # noqa: B006
    peak_memory: PeakMemoryOption = False,
    timed_only: Annotated[
        bool, typer.Option("--timed-only", help="Leave out the untimed passes: re-scoring, energy, peak memory.")
    ] = False,
    turns: Annotated[
        bool,
        typer.Option(
            "--turns",
            help="Print `ready` before every block and wait for a line on standard input, so that two processes can "
            "take turns.",
        ),
    ] = False,
    plugin: PluginOption = [],  # noqa: B006
) -> None:
    """Decode the missing batches of a plan.

    Needs no network, lm-eval or datasets, except for a suite whose authors do not allow its prompts to be stored.
    """
    from mtbench.cli import stages

    where = None if data_dir is None else str(data_dir)
    settings = Execution(
        workers=workers,
        ray=ray,
        data_dir=where,
        peak_memory=peak_memory,
        timed_only=timed_only,
        wait=stages.wait_for_turn if turns else None,
        servers=frozenset(server),
    )
    if not stages.generate(directory, settings):
        raise typer.Exit(FAILED)


@app.command()
def score(
    directory: DirectoryArgument,
    data_dir: DataOption = None,
    allow_unsandboxed_code: UnsandboxedOption = False,
    plugin: PluginOption = [],  # noqa: B006
) -> None:
    """Score the stored texts of a run. Needs no model and no GPU."""
    from mtbench.cli import stages

    where = None if data_dir is None else str(data_dir)
    stages.score(directory, Execution(data_dir=where, allow_unsandboxed_code=allow_unsandboxed_code))


@app.command("report")
def rebuild(
    directory: DirectoryArgument,
    json_to: JsonOption = None,
    plugin: PluginOption = [],  # noqa: B006
    price_per_hour: PriceOption = None,
) -> None:
    """Rebuild results.json, report.md and report.html from stored lines."""
    from mtbench.cli import report

    refuse_existing(json_to, directory / "results.json")
    report.report(directory, json_to, price_per_hour)

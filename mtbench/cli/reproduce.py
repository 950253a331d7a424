"""`mtbench reproduce`: its options. The work is in mtbench/cli/reproduction.py, which imports torch."""

from typing import Annotated

import typer
from typer import Option

from mtbench.cli.request_options import (
    CheckpointOption,
    DataOption,
    DeviceOption,
    DryRunOption,
    DtypeOption,
    OfflineOption,
    OutOption,
    RayOption,
    ResumeOption,
    SeedOption,
    SkipOption,
    UnsandboxedOption,
    WorkersOption,
    in_panels,
    was_given,
)
from mtbench.cli.session import FAILED
from mtbench.errors import UserError
from mtbench.runs.run_request import DEFAULTS

app = typer.Typer()


@app.command()
@in_panels
def reproduce(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A published table; without a name, list all tables.")] = None,
    family: Annotated[
        str | None,
        Option("--family", help="Run only this family; another than the table's replaces all of them."),
    ] = None,
    suite: Annotated[
        list[str],
        Option(
            "--suite",
            help="Run only this suite; another than the table's replaces all of them. Repeatable.",
        ),
    ] = [],  # noqa: B006
    checkpoint: CheckpointOption = [],  # noqa: B006
    limit: Annotated[int | None, Option("--limit", help="Items per suite or subtask; default: as published.")] = None,
    batch_size: Annotated[
        str | None, Option("--batch-size", help="One or several, such as 1,8; default: the table's.")
    ] = None,
    rounds: Annotated[
        int | None, Option("--rounds", help="How often the first blocks are timed; default: the table's.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, Option("--max-new-tokens", help="Maximum tokens of an answer; default: as published.")
    ] = None,
    engine: Annotated[
        str | None, Option("--engine", help="graph, eager (as papers measure) or invariant; default: the table's.")
    ] = None,
    protocol: Annotated[
        str | None,
        Option(
            "--protocol",
            help="paper (default): ignore stop strings while decoding and count as the paper does; or own.",
        ),
    ] = None,
    dtype: DtypeOption = DEFAULTS.dtype,
    device: DeviceOption = DEFAULTS.device,
    seed: SeedOption = DEFAULTS.seed,
    data_dir: DataOption = None,
    offline: OfflineOption = DEFAULTS.offline,
    skip_unscorable: SkipOption = DEFAULTS.skip_unscorable,
    allow_unsandboxed_code: UnsandboxedOption = DEFAULTS.allow_unsandboxed_code,
    workers: WorkersOption = None,
    ray: RayOption = None,
    directory: OutOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Run a published table and compare every figure with ours."""
    from mtbench.cli import reproduction

    if resume:
        if directory is None:
            raise UserError("--resume needs the directory: `mtbench reproduce -o DIR --resume`.")
        given = {option for option in ctx.params if was_given(ctx, option)}
        started = reproduction.resume(directory, ctx.params, given)
    elif name is None:
        reproduction.list_tables()
        return
    elif dry_run:
        reproduction.dry_run(ctx.params)
        return
    else:
        started = reproduction.start(directory, ctx.params)
    if not reproduction.finish(started, workers, ray):
        raise typer.Exit(FAILED)

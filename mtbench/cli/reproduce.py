"""`mtbench reproduce NAME`: a published table here, figure beside figure. Without a name: which there are."""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer import Option

from mtbench.cli import session
from mtbench.cli.request_options import (
    CheckpointOption,
    DataOption,
    DeviceOption,
    DtypeOption,
    OfflineOption,
    RayOption,
    SkipOption,
    UnsandboxedOption,
    WorkersOption,
    role_and_path,
    whole_numbers,
)
from mtbench.errors import UserError

if TYPE_CHECKING:
    from mtbench.reproduce.published import Asked, Part, Published

out = Console()
err = Console(stderr=True)
PER_SESSION = {"name", "offline", "data_dir", "allow_unsandboxed_code"}  # what `--resume` may say anew


def reproduce(
    ctx: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Of a published table; without one they are listed.")] = None,
    family: Annotated[
        str | None, Option("--family", help="Only this family of the table's; or another one in place of all.")
    ] = None,
    suite: Annotated[
        list[str], Option("--suite", help="Only this suite of the table's; or another one in place of all. Repeats.")
    ] = [],  # noqa: B006
    checkpoint: CheckpointOption = [],  # noqa: B006
    limit: Annotated[int | None, Option("--limit", help="Items per suite or subtask; default: as published.")] = None,
    batch_size: Annotated[
        str | None, Option("--batch-size", help="One or several, such as 1,8; default: the table's.")
    ] = None,
    rounds: Annotated[
        int | None, Option("--rounds", help="Times the first blocks are timed; default: the table's.")
    ] = None,
    max_new_tokens: Annotated[int | None, Option("--max-new-tokens", help="Default: as published.")] = None,
    engine: Annotated[
        str | None, Option("--engine", help="graph, eager (as papers measure) or invariant; default: the table's.")
    ] = None,
    protocol: Annotated[
        str, Option("--protocol", help="paper: decode on behind stop strings and count as the paper does; or own.")
    ] = "paper",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    seed: Annotated[int, Option("--seed", help="Of blocks, orders and drawn data.")] = 0,
    data_dir: DataOption = None,
    offline: OfflineOption = False,
    skip_unscorable: SkipOption = False,
    allow_unsandboxed_code: UnsandboxedOption = False,
    workers: WorkersOption = None,
    ray: RayOption = None,
    directory: Annotated[Path | None, Option("-o", "--out", help="Default runs/NAME-<time>.")] = None,
    resume: Annotated[bool, Option("--resume", help="Finish what is missing in -o DIR.")] = False,
    dry_run: Annotated[
        bool, Option("--dry-run", help="Print what would run and how long it takes here; run nothing.")
    ] = False,
) -> None:
    """Run a published table here and print our figure beside each of its own, with a verdict."""
    if resume:
        folder, asked, parts = _resume(ctx, directory)
    elif name is None:
        _list()
        return
    else:
        from mtbench.reproduce import published as reproduction
        from mtbench.runs import workers as crew
        from mtbench.runs.model_pool import resolve_device

        crew.refuse(workers, ray, device)
        asked, table = _asked(ctx.params), reproduction.published(name)
        if ray is None:
            resolve_device(device)
        folder = directory or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
        reproduction.refuse_existing(folder)
        parts = reproduction.lay_out(table, asked)
        if dry_run:
            _dry_run(table, parts)
            return
        reproduction.begin(folder, asked, parts, sys.argv)
    session.begun.append(folder)
    _say(parts)
    _finish(folder, asked, parts, workers, ray)


def _asked(params: Mapping[str, Any]) -> "Asked":
    """What was asked for. Raises UserError for text that cannot be read."""
    from mtbench.reproduce.published import Asked

    given = {f.name: params[f.name] for f in dataclasses.fields(Asked)}
    return Asked(
        **{
            **given,
            "checkpoint": dict(role_and_path(text) for text in params["checkpoint"]),
            "batch_size": None if params["batch_size"] is None else whole_numbers(params["batch_size"]),
            "data_dir": None if params["data_dir"] is None else str(params["data_dir"].resolve()),
        }
    )


def _resume(ctx: typer.Context, directory: Path | None) -> "tuple[Path, Asked, list[Part]]":
    """The reproduction in `directory`, with which whatever was said again must agree."""
    from mtbench.reproduce.published import reopen

    if directory is None:
        raise UserError("--resume needs the directory: `mtbench reproduce -o DIR --resume`.")
    stored, parts = reopen(directory)
    if ctx.params["name"] not in (None, stored.name):
        raise UserError(f"{str(directory)!r} holds {stored.name!r}, not {ctx.params['name']!r}; leave the name out.")
    said = _asked({**ctx.params, "name": stored.name})
    begun, now = (json.loads(json.dumps(dataclasses.asdict(one))) for one in (stored, said))  # lists, not tuples
    for name in begun.keys() - PER_SESSION:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and begun[name] != now[name]:
            raise UserError(
                f"the reproduction in {str(directory)!r} was begun with {name}={begun[name]!r}, not {now[name]!r}; go "
                f"on with `mtbench reproduce -o {directory} --resume`, or begin another in a new directory."
            )
    return directory, dataclasses.replace(stored, **{name: getattr(said, name) for name in PER_SESSION}), parts


def _finish(folder: Path, asked: "Asked", parts: "list[Part]", workers: int | None, ray: str | None) -> None:
    """Run what is missing; a table of every figure, then the page's path as the last line."""
    from mtbench.report.progress import RunProgress
    from mtbench.reproduce import page
    from mtbench.reproduce.compare import compare
    from mtbench.reproduce.published import published, run

    broken: list[UserError] = []
    for part in parts:
        if part.plan is not None:
            try:
                with RunProgress(err) as progress:
                    run(folder, part, asked, progress, workers, ray)
            except UserError as error:  # the other family may fare better
                broken.append(error)
                _warn(f"{part.family} could not be run: {error}")
    if len(broken) == sum(part.plan is not None for part in parts):
        raise broken[0]
    result = compare(published(asked.name), asked, parts, folder)
    written = page.write(folder, result)
    out.print(page.terminal_table(result))
    _print(str(written))
    if broken or any("failed: " in figure["why"] for figure in result["figures"]):
        raise typer.Exit(2)


def _dry_run(table: "Published", parts: "list[Part]") -> None:
    from mtbench.report.progress import clock
    from mtbench.report.terminal import plan_table
    from mtbench.runs.executor import estimate_s

    for part in parts:
        if part.plan is not None:
            _print(f"{table.name}, {part.family}")
            out.print(plan_table(part.plan))
            _print(
                f"{part.family}: about {clock(estimate_s(part.plan))} (h:min:s), if every answer takes its whole budget"
            )
    _say(parts)


def _say(parts: "list[Part]") -> None:
    """What will not be run, and why."""
    for part in parts:
        for what, why in (*part.missing.items(), *part.closed.items()):
            _warn(f"not run: {part.family}, {what}: {why}")


def _warn(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _list() -> None:
    from mtbench.reproduce import published as reproduction

    table = Table("name", "what", "runs", "needs")
    for name in reproduction.names():
        one = reproduction.published(name)
        runs = []
        for family in one.families:
            arms = reproduction.specs_of([row for row in one.rows if row.family == family])
            runs.append(f"{family}: {len(arms)} arms")
        suites = len(one.benchmarks)
        runs.append(f"{suites} suites" if suites > 1 else next(iter(one.benchmarks.values()))["suite"])
        needs = [f"--checkpoint {role}=…" for role in reproduction.not_released(one)]
        needs += ["a GPU, for times"] * any("speedup" in row.figures for row in one.rows)
        table.add_row(*map(escape, (name, one.what, "\n".join(runs), ", ".join(needs) or "–")))
        table.add_section()
    table.caption = "any of them in miniature: mtbench reproduce NAME --family tiny --suite arithmetic --limit 8"
    out.print(table)


def _print(text: str) -> None:
    out.print(text, soft_wrap=True, markup=False, highlight=False)

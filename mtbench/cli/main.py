"""The command line. Exit codes: 0 every cell is ok, 2 a mistake, a missing thing or a failed cell."""

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from mtbench import __version__
from mtbench.cli import session
from mtbench.cli.fetch import fetch
from mtbench.cli.reproduce import reproduce
from mtbench.cli.request_options import (
    DataOption,
    RayOption,
    UnsandboxedOption,
    WorkersOption,
    request_of,
    with_options,
)
from mtbench.cli.train import app as train_app
from mtbench.errors import UserError, unknown

if TYPE_CHECKING:
    from mtbench.runs.directory import RunDirectory
    from mtbench.runs.plan import Plan, RunRequest

UsageError: type[Any] = typer.BadParameter.__base__ or typer.BadParameter  # of the option parser Typer brings
INTERRUPTED = 130
WIDE = 100  # columns that a listing wants for all it has to say
PER_SESSION = {"time_budget_s", "offline", "data_dir", "allow_unsandboxed_code"}  # what `--resume` may say anew

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compare multi-token decoding methods on your model and your machine. With nothing else said, "
    "`mtbench run` is the embedded demonstration.",
)
app.add_typer(train_app, name="train")
app.command()(fetch)
app.command()(reproduce)
out = Console()
err = Console(stderr=True)

OutOption = Annotated[Path | None, typer.Option("-o", "--out", help="Run directory; default runs/<suite>-<time>.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Copy results.json there; - for standard output.")]


@app.callback(invoke_without_command=True)
def common(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        out.print(__version__)
        raise typer.Exit


@app.command()
@with_options
def run(
    ctx: typer.Context,
    directory: OutOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Finish what is missing in -o DIR.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and a time estimate; run nothing.")
    ] = False,
    json_to: JsonOption = None,
    workers: WorkersOption = None,
    ray: RayOption = None,
    **_: Any,
) -> None:
    """Plan, generate, score and report: a comparison of arms, from prompts to a page."""
    from mtbench.runs import workers as crew
    from mtbench.runs.model_pool import resolve_device

    request = request_of(ctx.params)
    crew.refuse(workers, ray, request.device)
    if ray is None:
        resolve_device(request.device)
    if dry_run:
        _dry_run(request, None if resume else directory)
        return
    opened = _resume(ctx, request, directory) if resume else _start(request, directory)
    results = _finish(opened, request, json_to, workers, ray)
    if any(cell["status"] != "ok" for cell in results["cells"]):
        raise typer.Exit(2)


@app.command()
@with_options
def plan(ctx: typer.Context, directory: OutOption = None, **_: Any) -> None:
    """Write the plan of a run: prompts as token ids, cells, blocks, rounds."""
    opened = _start(request_of(ctx.params), directory)
    out.print(str(opened.path), soft_wrap=True, markup=False, highlight=False)


DirectoryArgument = Annotated[Path, typer.Argument(help="A run directory.")]


@app.command()
def generate(
    directory: DirectoryArgument, workers: WorkersOption = None, ray: RayOption = None, data_dir: DataOption = None
) -> None:
    """Run what is missing of a plan: no network, no lm-eval, no datasets, unless a suite's questions are in no file."""
    from mtbench.runs.directory import RunDirectory

    where = None if data_dir is None else str(data_dir)
    _generate(RunDirectory.open(directory), None, workers, ray, where)


@app.command()
def score(
    directory: DirectoryArgument, data_dir: DataOption = None, allow_unsandboxed_code: UnsandboxedOption = False
) -> None:
    """Score the stored texts of a run. Needs no model and no GPU."""
    from mtbench.runs.directory import RunDirectory
    from mtbench.runs.score import score as score_run

    where = None if data_dir is None else str(data_dir)
    score_run(RunDirectory.open(directory), where, unsandboxed=allow_unsandboxed_code)


@app.command()
def report(directory: DirectoryArgument, json_to: JsonOption = None) -> None:
    """Rebuild results.json, report.md and report.html from what is stored."""
    from mtbench.runs.directory import RunDirectory

    _report(RunDirectory.open(directory), json_to)


@app.command()
def ls(what: Annotated[str, typer.Argument(help="methods, suites or families.")] = "methods") -> None:
    """What there is to compare, and what each needs."""
    listings = {"methods": _list_methods, "suites": _list_suites, "families": _list_families}
    if what not in listings:
        raise unknown("listing", what, listings, "mtbench ls --help")
    listings[what]()


def main() -> None:
    """The entry point: a user's mistake is one line and exit code 2."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's way to interrupt
    session.begun.clear()
    try:
        code = app(prog_name="mtbench", standalone_mode=False)
    except UserError as error:
        code = _complain(str(error))
    except UsageError as error:
        code = _complain(f"{error.format_message()} See `mtbench {' '.join(sys.argv[1:2])} --help`.")
    if code == INTERRUPTED:
        _say_how_to_go_on("".join(sys.argv[1:2]))
    sys.exit(code)


def _say_how_to_go_on(command: str) -> None:
    """After an interruption."""
    said, training = "nothing was begun", command == "train"
    if training or session.begun:
        resumed = command if command == "reproduce" else "run"
        again = "the same command" if training else f"`mtbench {resumed} -o {session.begun[-1]} --resume`"
        said = f"what was complete is kept, {again} goes on"
    err.print(f"interrupted; {said}", markup=False, highlight=False, soft_wrap=True)


def _complain(mistake: str) -> int:
    err.print(f"error: {mistake}", markup=False, highlight=False, soft_wrap=True)
    return 2


def _start(request: "RunRequest", directory: Path | None) -> "RunDirectory":
    """A planned run. Nothing is written before the plan is known to be sound."""
    from mtbench.runs.planner import begin_run, make_plan

    path = directory or Path("runs") / f"{_slug(request.suite[0])}-{time.strftime('%Y%m%d-%H%M%S')}"
    _refuse_existing(path)
    planned = make_plan(request)
    opened = begin_run(path, planned, sys.argv)
    session.begun.append(path)
    for warning in planned.warnings():
        err.print(warning, markup=False, highlight=False, soft_wrap=True)
    return opened


def _refuse_existing(path: Path) -> None:
    """An existing run is refused before the work of planning."""
    from mtbench.runs.directory import RunDirectory

    if path.exists():
        RunDirectory.create(path)


def _resume(ctx: typer.Context, request: "RunRequest", directory: Path | None) -> "RunDirectory":
    """The run in `directory`, whose plan must agree with whatever was said again on the command line."""
    from mtbench.runs.directory import RunDirectory
    from mtbench.runs.plan import read_plan

    if directory is None:
        raise UserError("--resume needs the run directory: `mtbench run -o DIR --resume`.")
    if not (directory / "plan.json").is_file() and directory.is_dir():
        return _restart(request, directory)
    opened = RunDirectory.open(directory)
    session.begun.append(directory)
    planned, asked = (one.model_dump(mode="json") for one in (read_plan(opened).request, request))
    names = {"time_budget": "time_budget_s"}
    for name in ctx.params:
        field = names.get(name, name)
        source = ctx.get_parameter_source(name)
        said = source is not None and source.name == "COMMANDLINE"
        if said and field in planned and field not in PER_SESSION and planned[field] != asked[field]:
            raise UserError(
                f"the run in {str(directory)!r} was planned with {name}={planned[field]!r}, not {asked[field]!r}; "
                f"go on with `mtbench run -o {directory} --resume`, or start another run in a new directory."
            )
    return opened


def _restart(request: "RunRequest", directory: Path) -> "RunDirectory":
    """A run that died before it had a plan holds nothing to keep: it starts anew."""
    from mtbench.runs.directory import RunDirectory

    beginnings = ("environment.json", ".environment.json.", ".plan.json.")
    left = list(directory.iterdir())
    if not all(path.name.startswith(beginnings) for path in left):
        return RunDirectory.open(directory)  # which says what is missing
    for path in left:
        path.unlink()
    return _start(request, directory)


def _finish(
    opened: "RunDirectory", request: "RunRequest", json_to: Path | None, workers: int | None, ray: str | None
) -> Mapping[str, Any]:
    from mtbench.runs.score import due
    from mtbench.runs.score import score as score_run

    _generate(opened, request.time_budget_s, workers, ray, request.data_dir)
    if due(opened):
        score_run(opened, request.data_dir, unsandboxed=request.allow_unsandboxed_code)
    return _report(opened, json_to)


def _generate(
    opened: "RunDirectory",
    time_budget_s: float | None = None,
    workers: int | None = None,
    ray: str | None = None,
    data_dir: str | None = None,
) -> None:
    from mtbench.report.progress import RunProgress
    from mtbench.runs.executor import generate as run_plan

    with RunProgress(err) as progress:
        run_plan(opened, progress, time_budget_s, workers, ray, data_dir)


def _report(opened: "RunDirectory", json_to: Path | None) -> Mapping[str, Any]:
    """Tables, then the page's path as the last line; with `--json -` standard output is left to the JSON."""
    from mtbench.report.terminal import results_tables
    from mtbench.report.write import write_report
    from mtbench.results.aggregate import assemble

    results = assemble(opened)
    path = write_report(opened, results)
    console = err if str(json_to) == "-" else out
    for table in results_tables(results, console.width):
        console.print(table)
    if str(json_to) == "-":
        sys.stdout.write((opened.path / "results.json").read_text())
    elif json_to is not None:
        json_to.write_text((opened.path / "results.json").read_text())
    console.print(str(path), soft_wrap=True, markup=False, highlight=False)
    return results


def _dry_run(request: "RunRequest", directory: Path | None) -> None:
    from mtbench.report.terminal import plan_table
    from mtbench.runs.planner import make_plan

    if directory is not None:
        _refuse_existing(directory)
    planned = make_plan(request)
    out.print(plan_table(planned))
    for warning in planned.warnings():
        out.print(warning, markup=False, highlight=False, soft_wrap=True)
    out.print(_estimate(planned), markup=False, highlight=False, soft_wrap=True)


def _estimate(planned: "Plan") -> str:
    from mtbench.decoding.openai_client import ServerError
    from mtbench.runs.executor import estimate_s

    try:
        seconds = estimate_s(planned)
    except ServerError as error:
        raise UserError(f"{error}; without it there is no estimate.") from None
    return (
        f"about {seconds / 60:.0f} min, if every answer takes its whole budget"
        if seconds > 90
        else (f"about {seconds:.0f} s, if every answer takes its whole budget")
    )


def _list_methods() -> None:
    from mtbench.decoding.arms import ENGINES
    from mtbench.decoding.registry import METHODS
    from mtbench.options import options_of, roles_of, show

    table = Table(*(Column(c, no_wrap=c in ("method", "option")) for c in ("method", "option", "default", "allowed")))
    table.add_column("what it is")
    for name in METHODS:
        method = METHODS[name]
        roles = [*method.roles, *roles_of(method, {})]
        needs = f"needs: {', '.join(roles)} checkpoint{'s' if len(roles) > 1 else ''}"
        table.add_row(f"[bold]{name}[/]", "", "", needs, escape(_about(method)))
        for o in options_of(method):
            table.add_row("", o.name, show(o.default), escape(o.kind), escape(o.help))
        table.add_section()
    table.caption = (
        f"every method also takes on=ROLE, and engine={'|'.join(ENGINES)} where the loop is ours; "
        "'a|b' are two arms: quote it in a shell"
    )
    for name, why in METHODS.broken.items():
        table.add_row(f"[bold]{escape(name)}[/]", "", "", "broken", escape(why))
    out.print(table)


def _list_suites() -> None:
    from mtbench.evaluation.registry import SUITES

    narrow = out.width < WIDE
    headings = ("suite", "new tokens", *([] if narrow else ["scored by"]), "subtasks")
    table = Table(*(Column(c, no_wrap=True) for c in headings), "what it is", box=SIMPLE_HEAD)
    runs_on: dict[str, list[str]] = {}
    for name in SUITES:
        suite = SUITES[name]
        runs_on.setdefault(suite.family, []).append(name)
        several = str(len(suite.subtasks) or "")
        scored = [] if narrow else [suite.metric or "–"]
        table.add_row(*map(escape, (name, str(suite.max_new_tokens), *scored, several, _about(suite))))
    for name, why in SUITES.broken.items():
        table.add_row(escape(name), "broken", *[""] * (len(headings) - 2), escape(why))
    usual = max(runs_on, key=lambda family: len(runs_on[family]))
    others = [f"{', '.join(names)} on {family}" for family, names in runs_on.items() if family != usual]
    table.caption = f"with no family named, on {usual}; {'; '.join(others)}"
    out.print(table)


def _list_families() -> None:
    from mtbench.models.families import FAMILIES, RANDOM
    from mtbench.models.random_shapes import SHAPES

    table = Table("family", "role", "checkpoint", "what it is")
    for family in FAMILIES.values():
        for number, (role, where) in enumerate(family.roles.items()):
            shown = where if "/" not in where or where.count("/") == 1 else "embedded"
            table.add_row("" if number else family.name, role, shown, "" if number else escape(family.about))
        table.add_section()
    table.caption = f"random weights, for speed alone: --weights {', '.join(RANDOM + shape for shape in SHAPES)}"
    out.print(table)


def _about(registered: type) -> str:
    """The first sentence of the file that registered it."""
    return (sys.modules[registered.__module__].__doc__ or "").strip().partition("\n")[0]


def _slug(spec: str) -> str:
    from mtbench.decoding.arms import safe

    return safe(spec.partition(":")[0])

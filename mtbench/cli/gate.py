"""`mtbench gate` compares two builds, `gate calibrate` measures the machine's noise.

Exit codes: 0: PASS; 1: FAIL; 2: the builds cannot be compared, or a user's mistake; 3: INCONCLUSIVE.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from mtbench.cli.request_options import ResumeOption, given_arguments, resumed, was_given, with_options
from mtbench.cli.session import out, say, warn
from mtbench.errors import UserError
from mtbench.plugins import read_file
from mtbench.runs.run_request import seconds

app = typer.Typer()

DEFAULT_LIMIT = "100"  # items of a suite
MOST_PAIRS = 1000
PER_SESSION = {"directory", "resume", "time_budget"}  # options that `--resume` takes
NOT_PASSED_ON = ("time_budget", "plugin")  # of the options of a run: the gate has its own, and each build its files
ENV = "the folder of a virtual environment, git:REV, pip:REQUIREMENT or url:ADDRESS of a server"
_with_options = partial(with_options, without=("max_loss", "limit", "price_per_hour"))
BaseOption = Annotated[str | None, Option("--base", help=f"Build to compare with: {ENV}.")]
HeadOption = Annotated[str | None, Option("--head", help="Build to judge; default: this environment.")]
BasePluginOption = Annotated[
    list[str],
    Option(
        "--base-plugin",
        metavar="FILE.py",
        help="Base imports this file in place of that of --plugin, such as an older version of it. Repeatable.",
    ),
]
GateLimitOption = Annotated[
    str,
    Option("--limit", metavar="INTEGER|all", help="Items per suite, or per subtask of a suite with subtasks."),
]
MarginOption = Annotated[float, Option("--margin", help="Slowdown that matters, as a share: 0.02 is 2 %.")]
BlocksOption = Annotated[int, Option("--blocks", min=1, help="Blocks of each group that are timed.")]
PairsOption = Annotated[
    int | None,
    Option(
        "--pairs",
        min=2,
        max=MOST_PAIRS,
        help="Pairs of processes at the last look; default: by the calibrated noise, at most 40. Fresh pairs that test "
        "a FAIL once more come on top.",
    ),
]
InterleaveOption = Annotated[
    bool,
    Option(
        "--interleave",
        help="Both processes of a pair are alive and take turns, block by block: less noise, but both must fit into "
        "memory.",
    ),
]
CountsOption = Annotated[bool, Option("--counts-only", help="Compare tokens and work only; time nothing.")]
ChangedOption = Annotated[
    bool, Option("--allow-changed", help="Head may emit other tokens. Both builds are then timed on base's commits.")
]
TorchOption = Annotated[bool, Option("--allow-torch", help="The builds may have different versions of torch.")]
LimitOption = Annotated[
    str,
    Option(
        "--process-limit",
        metavar="DURATION",
        help="Longest time of one process of a build, such as 90s, 30m or 2h; with --interleave, of one turn. "
        "A head that takes longer fails.",
    ),
]
DirtyOption = Annotated[bool, Option("--allow-dirty", help="A build may come from a checkout with changed files.")]
GateOutOption = Annotated[Path | None, Option("-o", "--out", help="Folder of the gate; default: runs/gate-<time>.")]
CalibrationOutOption = Annotated[
    Path | None,
    Option("-o", "--out", help="Folder of the pairs; default: runs/calibration-<time>. floor.json is written beside."),
]


ASKED = {"base", "head", "margin", "blocks", "pairs", "interleave", "counts_only"}  # parameters that a gate stores
ASKED |= {"allow_changed", "allow_torch", "allow_dirty"}


@app.callback(invoke_without_command=True)
@_with_options
def gate(
    ctx: typer.Context,
    base: BaseOption = None,
    head: HeadOption = None,
    base_plugin: BasePluginOption = [],  # noqa: B006
    margin: MarginOption = 0.02,
    blocks: BlocksOption = 8,
    pairs: PairsOption = None,
    interleave: InterleaveOption = False,
    counts_only: CountsOption = False,
    allow_changed: ChangedOption = False,
    allow_torch: TorchOption = False,
    allow_dirty: DirtyOption = False,
    process_limit: LimitOption = "2h",
    limit: GateLimitOption = DEFAULT_LIMIT,
    directory: GateOutOption = None,
    resume: ResumeOption = False,
    **_: Any,
) -> None:
    """Compare two builds of mtbench: their tokens, forward passes and speed.

    Each build decodes the same plan in processes of its own. Tokens and counts are compared first and must be equal.
    Then times are compared over pairs of processes, until the answer is known. The exit code is 0 for PASS, 1 for FAIL,
    2 for builds that cannot be compared, 3 for INCONCLUSIVE.

    Without --method every method runs, which takes long on a CPU. A small start: --method ar --method mars:tau=0.9
    --batch-size 8 --limit 32 --blocks 4.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options_before(ctx)
        return
    from mtbench.cli import gating
    from mtbench.experiments.gate import page
    from mtbench.experiments.gate.format import EXIT_CODES

    if base is None and not base_plugin and not resume:
        raise UserError(f"--base is missing; give {ENV}, such as `mtbench gate --base git:main`, or --base-plugin.")
    opened = _opened(
        ctx,
        directory,
        gating.GATE,
        **{name: ctx.params[name] for name in ASKED},
        base_plugins=base_plugin,
        process_limit_s=seconds(process_limit, "--process-limit"),
    )
    found = gating.run(opened, warn, seconds(ctx.params["time_budget"]))
    for renderable in page.terminal(found):
        out.print(renderable)
    for line in gating.tell_github(found):
        say(line)
    say(opened.directory / "gate.html")
    raise typer.Exit(EXIT_CODES[found.word])


@app.command()
@_with_options
def calibrate(
    ctx: typer.Context,
    base: Annotated[str | None, Option("--base", help=f"Build: {ENV}; default: this environment.")] = None,
    blocks: BlocksOption = 8,
    pairs: Annotated[int, Option("--pairs", min=3, max=MOST_PAIRS, help="Pairs of processes.")] = 10,
    interleave: InterleaveOption = False,
    allow_dirty: DirtyOption = False,
    process_limit: LimitOption = "2h",
    limit: GateLimitOption = DEFAULT_LIMIT,
    directory: CalibrationOutOption = None,
    resume: ResumeOption = False,
    **_: Any,
) -> None:
    """Measure how much the times of one build differ by chance on this machine.

    Runs pairs of processes of one build. floor.json, beside the folder, gets the noise of every cell and the smallest
    slowdown that a gate with the same options can find. It holds for this machine, torch and plan, for 30 days.
    """
    from mtbench.cli import gating

    build = {"base": base, "head": base, "margin": 0.02, "counts_only": False, "allow_changed": False}
    build["process_limit_s"] = seconds(process_limit, "--process-limit")
    opened = _opened(
        ctx,
        directory,
        gating.CALIBRATION,
        **build,
        blocks=blocks,
        pairs=pairs,
        interleave=interleave,
        allow_torch=False,
        allow_dirty=allow_dirty,
    )
    floor, file = gating.calibrate(opened, warn, seconds(ctx.params["time_budget"]))
    out.print(gating.floor_table(floor))
    say(file)


def _opened(ctx: typer.Context, directory: Path | None, kind: Any, **asked: Any) -> Any:
    """Return the gate or calibration in `directory`: a new one, or with --resume the one that is there."""
    from mtbench.cli import gating

    if ctx.params["resume"]:
        return gating.reopen(resumed(ctx, directory, kind.command, PER_SESSION), kind)
    files = ctx.params["plugin"]
    of_base = [read_file(file).path for file in asked.pop("base_plugins", ())] or files
    asked |= {"plugins": files, "base_plugins": of_base, "seed": ctx.params["seed"]}
    return gating.begin(directory, kind, plan_arguments=_plan_arguments(ctx), **asked)


def _refuse_options_before(ctx: typer.Context) -> None:
    """Raise UserError for an option that stands before the subcommand, which would not get it."""
    given = sorted(f"--{name.replace('_', '-')}" for name in ctx.params if was_given(ctx, name))
    if given:
        word = ctx.invoked_subcommand
        raise UserError(f"{', '.join(given)} stands before `{word}`; write `mtbench gate {word} OPTIONS`.")


def _plan_arguments(ctx: typer.Context) -> list[str]:
    """Return the options of `mtbench plan` that both builds get."""
    arguments = given_arguments(ctx, NOT_PASSED_ON)
    return arguments if was_given(ctx, "limit") else [*arguments, "--limit", DEFAULT_LIMIT]

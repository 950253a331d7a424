"""`mtbench gate`: compare two builds; `gate calibrate`: measure the machine's noise; `gate history`: what gates said.

Exit codes: 0: PASS; 1: FAIL; 2: the builds cannot be compared, or a user's mistake; 3: INCONCLUSIVE.
"""

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from mtbench.cli import session
from mtbench.cli.request_options import ResumeOption, given_arguments, seconds, was_given, with_options
from mtbench.cli.session import out, say, warn
from mtbench.errors import UserError

app = typer.Typer(help="Compare two builds of mtbench: same tokens, same work, as fast?")

DEFAULT_LIMIT = 100  # items of a suite
ENV = "the folder of a virtual environment, git:REV, pip:REQUIREMENT or url:ADDRESS of a server"
BaseOption = Annotated[str | None, Option("--base", help=f"Build to compare with: {ENV}.")]
HeadOption = Annotated[str | None, Option("--head", help="Build to judge; default: this environment.")]
MarginOption = Annotated[float, Option("--margin", help="Slowdown that matters, as a share.")]
BlocksOption = Annotated[int, Option("--blocks", min=1, help="Blocks of each group that are timed.")]
PairsOption = Annotated[
    int | None, Option("--pairs", min=2, help="Most pairs of processes; default: by the calibrated noise, at most 40.")
]
LiveOption = Annotated[
    bool, Option("--live", help="Both processes of a pair are alive and take turns, block by block: less noise.")
]
CountsOption = Annotated[bool, Option("--counts-only", help="Compare tokens and work only; time nothing.")]
ChangedOption = Annotated[
    bool,
    Option("--allow-changed", help="Head may emit other tokens; its times are then those of base's commits, replayed."),
]
TorchOption = Annotated[bool, Option("--allow-torch", help="The builds may have different versions of torch.")]
DirtyOption = Annotated[bool, Option("--allow-dirty", help="A build may come from a checkout with changed files.")]
GateOutOption = Annotated[Path | None, Option("-o", "--out", help="Folder of the gate; default: runs/gate-<time>.")]

NOT_PASSED_ON = ("time_budget", "accuracy_margin")  # the gate has its own


@app.callback(invoke_without_command=True)
@with_options
def gate(
    ctx: typer.Context,
    base: BaseOption = None,
    head: HeadOption = None,
    margin: MarginOption = 0.02,
    blocks: BlocksOption = 8,
    pairs: PairsOption = None,
    live: LiveOption = False,
    counts_only: CountsOption = False,
    allow_changed: ChangedOption = False,
    allow_torch: TorchOption = False,
    allow_dirty: DirtyOption = False,
    directory: GateOutOption = None,
    resume: ResumeOption = False,
    **_: Any,
) -> None:
    """Compare two builds of mtbench: same tokens, same work, as fast?

    Each build decodes the same plan in processes of its own. First tokens and counts are compared, exactly. Then times,
    over pairs of processes, until the answer is known. Ends with 0: PASS; 1: FAIL; 2: refused; 3: INCONCLUSIVE.
    """
    if ctx.invoked_subcommand is not None:
        return
    from mtbench.gate import command
    from mtbench.gate.format import EXIT_CODES

    budget_s = seconds(ctx.params["time_budget"])
    if resume:
        if directory is None:
            raise UserError("--resume needs the gate's folder: `mtbench gate -o DIR --resume`.")
        given = {name for name in ctx.params if was_given(ctx, name)} - {"directory", "resume", "time_budget"}
        if given:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
            raise UserError(
                f"a gate goes on as it began, so {named} cannot change; go on with `mtbench gate -o {directory} "
                "--resume`."
            )
        request = command.stored_request(directory)
    else:
        if base is None:
            raise UserError(f"--base is missing; give {ENV}, such as `mtbench gate --base git:main`.")
        directory = directory or Path("runs") / f"gate-{time.strftime('%Y%m%d-%H%M%S')}"
        request = command.new_request(
            directory,
            base=base,
            head=head,
            plan_arguments=_plan_arguments(ctx),
            margin=margin,
            blocks=blocks,
            pairs=pairs,
            live=live,
            counts_only=counts_only,
            allow_changed=allow_changed,
            allow_torch=allow_torch,
            allow_dirty=allow_dirty,
            seed=ctx.params["seed"],
        )
    session.started.append(directory)
    found = command.run(directory, request, warn, budget_s)
    for renderable in command.shown(found):
        out.print(renderable)
    say(directory / "gate.html")
    raise typer.Exit(EXIT_CODES[found.word])


def _plan_arguments(ctx: typer.Context) -> list[str]:
    """Return the options of `mtbench plan` that both builds get."""
    arguments = given_arguments(ctx, NOT_PASSED_ON)
    return arguments if was_given(ctx, "limit") else [*arguments, "--limit", str(DEFAULT_LIMIT)]

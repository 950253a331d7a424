"""`mtbench choose`: race the methods that some checkpoints serve, and say which to use.

Exit codes: 0: the race has ended, whatever it says; 1: plain decoding failed; 2: a user's mistake; 3: the time budget
ended the race.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from mtbench.cli.request_options import (
    OutOption,
    ResumeOption,
    WorkersOption,
    absolute,
    given,
    with_options,
)
from mtbench.cli.session import FAILED, INCOMPLETE, beside_json, say
from mtbench.experiments.choose.request import RACE_DEFAULTS, RACE_OPTIONS
from mtbench.files import refuse_existing
from mtbench.runs.run_request import OPTIONS, RACED_BLOCKS, Execution, seconds

app = typer.Typer()

PER_SESSION = {"directory", "resume", "time_budget", "workers", "data_dir", "offline", "plugin", "json_to"}
PER_SESSION |= {"allow_unsandboxed_code"}
NOT_RACED = {*OPTIONS, "bundle"} - {*RACE_OPTIONS}  # options of a run that a race does not take
SuiteOption = Annotated[
    list[str], Option("--suite", help="Suite as NAME or NAME:REST; prompts:FILE for your own. See `mtbench ls suites`.")
]
LossOption = Annotated[float, Option("--max-loss", help="Loss of accuracy that you accept, in points.")]
ObjectiveOption = Annotated[
    str,
    Option(
        "--objective",
        help="speed or latency: an arm leaves when it is surely slower. energy or memory: the least measured value.",
    ),
]
SloOption = Annotated[
    str | None,
    Option(
        "--slo", help="Limits of 95th percentiles, such as ttft=500ms,itl=50ms (between two commits); default: none."
    ),
]
MethodOption = Annotated[
    list[str],
    Option("--method", help="Arm to race, such as 'mars:tau=0.95|0.8'. Repeatable; default auto: all that can run."),
]
LimitOption = Annotated[
    str | None,
    Option(
        "--limit",
        metavar="INTEGER|all",
        help=f"Most items of the suite; default: {RACED_BLOCKS} blocks of the largest batch size.",
    ),
]
DryOption = Annotated[bool, Option("--dry-run", help="Print the candidates and how long it takes at most.")]
DecisionOption = Annotated[
    Path | None, Option("--json", help="Also write decision.json to this file; `-` is standard output.")
]


@app.command()
@partial(with_options, without=NOT_RACED)
def choose(
    ctx: typer.Context,
    suite: SuiteOption = list(RACE_DEFAULTS.suite),  # noqa: B006
    method: MethodOption = list(RACE_DEFAULTS.method),  # noqa: B006
    max_loss: LossOption = RACE_DEFAULTS.max_loss,
    objective: ObjectiveOption = RACE_DEFAULTS.objective,
    slo: SloOption = RACE_DEFAULTS.slo,
    limit: LimitOption = None,
    workers: WorkersOption = None,
    directory: OutOption = None,
    resume: ResumeOption = False,
    dry_run: DryOption = False,
    json_to: DecisionOption = None,
    **_: Any,
) -> None:
    """Say which method to use, by a race of the methods that your checkpoints serve.

    An arm leaves as soon as it is surely not the one to choose.

    All methods that the checkpoints serve run beside plain decoding on your prompts. The decision names the fastest arm
    with the same tokens, and the fastest arm that loses no more than --max-loss, at every batch size.
    """
    execution = Execution(
        time_budget_s=seconds(ctx.params["time_budget"]),
        workers=workers,
        data_dir=absolute(ctx.params["data_dir"]),
        offline=ctx.params["offline"],
        allow_unsandboxed_code=ctx.params["allow_unsandboxed_code"],
    )
    _choose(ctx, execution, directory, json_to, resume=resume, dry_run=dry_run)


def _choose(
    ctx: typer.Context,
    execution: Execution,
    directory: Path | None,
    json_to: Path | None,
    *,
    resume: bool,
    dry_run: bool,
) -> None:
    from mtbench.cli import choosing  # imports torch

    refuse_existing(json_to, directory / choosing.FILE if directory and resume else None)
    opened = choosing.resume(directory, given(ctx, PER_SESSION)) if resume else None
    if opened is None:
        request = choosing.request_of(ctx.params)
        if dry_run:
            choosing.dry_run(request, directory, execution)
            return
        opened = choosing.begin(request, directory, execution)
    results, decision = choosing.run(opened, execution, json_to)
    say(opened.path / "report.html", beside_json(json_to))
    if not decision.complete:
        raise typer.Exit(INCOMPLETE)
    if any(cell.reference and cell.status == "failed" for cell in results.cells):
        raise typer.Exit(FAILED)

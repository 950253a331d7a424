"""`mtbench choose`: race the methods that some checkpoints serve, and say which to use.

Exit codes: 0: the race has ended, whatever it says; 1: plain decoding failed; 2: a user's mistake; 3: the time budget
ended the race.
"""

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mtbench.cli.request_options import (
    BudgetOption,
    CheckpointOption,
    DataOption,
    DeviceOption,
    DtypeOption,
    FamilyOption,
    ModelOption,
    OfflineOption,
    PluginOption,
    ResumeOption,
    SeedOption,
    TokensOption,
    UnsandboxedOption,
    WorkersOption,
    absolute,
    given,
    in_panels,
)
from mtbench.cli.session import FAILED, INCOMPLETE, out, say
from mtbench.racing.request import RACE_DEFAULTS
from mtbench.runs.run_request import RACED_BLOCKS, Execution, seconds

app = typer.Typer()

PER_SESSION = {"directory", "resume", "time_budget", "workers", "data_dir", "offline", "plugin"}
PER_SESSION |= {"allow_unsandboxed_code"}
SuiteOption = Annotated[
    str, Option("--suite", help="Suite as NAME or NAME:REST; prompts:FILE for your own. See `mtbench ls suites`.")
]
SIZES = ",".join(map(str, RACE_DEFAULTS.batch_size))
SizeOption = Annotated[str, Option("--batch-size", help="One or several sizes, such as 1,8.")]
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
CandidatesOption = Annotated[
    list[str],
    Option(
        "--candidates", help="Arm to race, such as 'mars:tau=0.95|0.8'. Repeatable; default auto: all that can run."
    ),
]
LimitOption = Annotated[
    str | None,
    Option(
        "--limit",
        metavar="INTEGER|all",
        help=f"Most items of the suite; default: {RACED_BLOCKS} blocks of the largest batch size.",
    ),
]
TemperatureOption = Annotated[float, Option("--temperature", help="0 is greedy.")]
DryOption = Annotated[bool, Option("--dry-run", help="Print the candidates and how long it takes at most.")]
ChooseOutOption = Annotated[Path | None, Option("-o", "--out", help="Run directory; default: runs/<suite>-<time>.")]


@app.command()
@in_panels
def choose(
    ctx: typer.Context,
    suite: SuiteOption = RACE_DEFAULTS.suite,
    candidates: CandidatesOption = list(RACE_DEFAULTS.candidates),  # noqa: B006
    plugin: PluginOption = [],  # noqa: B006
    family: FamilyOption = RACE_DEFAULTS.family,
    model: ModelOption = RACE_DEFAULTS.model,
    checkpoint: CheckpointOption = [],  # noqa: B006
    batch_size: SizeOption = SIZES,
    max_loss: LossOption = RACE_DEFAULTS.max_loss,
    objective: ObjectiveOption = RACE_DEFAULTS.objective,
    slo: SloOption = RACE_DEFAULTS.slo,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = RACE_DEFAULTS.max_new_tokens,
    temperature: TemperatureOption = RACE_DEFAULTS.temperature,
    data_dir: DataOption = None,
    offline: OfflineOption = RACE_DEFAULTS.offline,
    allow_unsandboxed_code: UnsandboxedOption = RACE_DEFAULTS.allow_unsandboxed_code,
    dtype: DtypeOption = RACE_DEFAULTS.dtype,
    device: DeviceOption = RACE_DEFAULTS.device,
    seed: SeedOption = RACE_DEFAULTS.seed,
    workers: WorkersOption = None,
    time_budget: BudgetOption = None,
    directory: ChooseOutOption = None,
    resume: ResumeOption = False,
    dry_run: DryOption = False,
) -> None:
    """Say which method to use, by a race of the methods that your checkpoints serve.

    An arm leaves as soon as it is surely not the one to choose.

    All methods that the checkpoints serve run beside plain decoding on your prompts. The decision names the fastest arm
    with the same tokens, and the fastest arm that loses no more than --max-loss, at every batch size.
    """
    execution = Execution(
        time_budget_s=seconds(time_budget),
        workers=workers,
        data_dir=absolute(data_dir),
        offline=offline,
        allow_unsandboxed_code=allow_unsandboxed_code,
    )
    _choose(ctx, execution, directory, resume=resume, dry_run=dry_run)


def _choose(ctx: typer.Context, execution: Execution, directory: Path | None, *, resume: bool, dry_run: bool) -> None:
    from mtbench.cli import choosing  # imports torch

    opened = choosing.resume(directory, given(ctx, PER_SESSION)) if resume else None
    if opened is None:
        request = choosing.request_of(ctx.params)
        if dry_run:
            choosing.dry_run(request, directory, execution)
            return
        opened = choosing.begin(request, directory, execution)
    results, decision = choosing.run(opened, execution)
    say(opened.path / "report.html", out)
    if not decision.complete:
        raise typer.Exit(INCOMPLETE)
    if any(cell.reference and cell.status == "failed" for cell in results.cells):
        raise typer.Exit(FAILED)

"""`mtbench choose`: race the methods that some checkpoints serve, and say which to use.

Exit codes: 0: the race has ended, whatever it says; 1: plain decoding failed; 2: a user's mistake; 3: the time budget
ended the race.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from mtbench.cli.request_options import (
    CheckpointOption,
    DataOption,
    DeviceOption,
    DtypeOption,
    FamilyOption,
    ModelOption,
    OfflineOption,
    ResumeOption,
    SeedOption,
    UnsandboxedOption,
    WorkersOption,
    absolute,
    checkpoints,
    in_panels,
    resumed,
    seconds,
    whole_numbers,
)
from mtbench.cli.session import INCOMPLETE, out, say
from mtbench.errors import UserError, unknown
from mtbench.runs.run_request import DEFAULTS, Execution, RunRequest

if TYPE_CHECKING:
    from mtbench.runs.formats import Slo

app = typer.Typer()

PER_SESSION = {"directory", "resume", "time_budget", "workers", "data_dir", "offline", "allow_unsandboxed_code"}
SuiteOption = Annotated[
    str, Option("--suite", help="Suite as NAME or NAME:REST; prompts:FILE for your own. See `mtbench ls suites`.")
]
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
    str | None, Option("--slo", help="Limits of 95th percentiles, such as ttft=500ms,itl=50ms; default: none.")
]
BudgetOption = Annotated[
    str | None, Option("--time-budget", help="Start no batch after 90s, 30m or 2h; continue with --resume.")
]
CandidatesOption = Annotated[
    list[str],
    Option(
        "--candidates", help="Arm to race, such as 'mars:tau=0.95|0.8'. Repeatable; default auto: all that can run."
    ),
]
LimitOption = Annotated[int | None, Option("--limit", help="Most items of the suite; default: all.")]
TokensOption = Annotated[
    int | None, Option("--max-new-tokens", help="Maximum tokens of an answer; default: the suite's.")
]
TemperatureOption = Annotated[float, Option("--temperature", help="0 is greedy.")]
DryOption = Annotated[bool, Option("--dry-run", help="Print the candidates and how long it takes at most.")]
ChooseOutOption = Annotated[Path | None, Option("-o", "--out", help="Run directory; default: runs/<suite>-<time>.")]


@app.command()
@in_panels
def choose(
    ctx: typer.Context,
    suite: SuiteOption = DEFAULTS.suite[0],
    candidates: CandidatesOption = ["auto"],  # noqa: B006
    family: FamilyOption = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = [],  # noqa: B006
    batch_size: SizeOption = "1,8",
    max_loss: LossOption = 1.0,
    objective: ObjectiveOption = "speed",
    slo: SloOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = None,
    temperature: TemperatureOption = DEFAULTS.temperature,
    data_dir: DataOption = None,
    offline: OfflineOption = DEFAULTS.offline,
    allow_unsandboxed_code: UnsandboxedOption = False,
    dtype: DtypeOption = DEFAULTS.dtype,
    device: DeviceOption = DEFAULTS.device,
    seed: SeedOption = DEFAULTS.seed,
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

    if resume:
        opened = choosing.reopen(resumed(ctx, directory, "choose", PER_SESSION))
    else:
        request, given = _request_of(ctx.params), ctx.params
        settings = choosing.Settings(
            _objective(given["objective"]), _share(given["max_loss"]), slo_limits(given["slo"])
        )
        if dry_run:
            choosing.dry_run(request, settings, directory)
            return
        opened = choosing.begin(request, settings, directory)
    decision = choosing.run(opened, execution)
    say(opened.path / "report.html", out)
    if not decision.complete:
        raise typer.Exit(INCOMPLETE)


def _request_of(given: Mapping[str, Any]) -> RunRequest:
    """Return the request of a race: its candidates are the methods, none for all that can run."""
    same = ("family", "model", "limit", "max_new_tokens", "temperature", "offline", "dtype", "device", "seed")
    return RunRequest(
        suite=(given["suite"],),
        checkpoint=checkpoints(given["checkpoint"]),
        method=() if given["candidates"] == ["auto"] else tuple(given["candidates"]),
        batch_size=tuple(whole_numbers(given["batch_size"])),
        data_dir=absolute(given["data_dir"]),
        **{name: given[name] for name in same},
    )


def _objective(text: str) -> Any:
    from mtbench.runs.formats import OBJECTIVES

    if text not in OBJECTIVES:
        raise unknown("objective", text, OBJECTIVES, "mtbench choose --help")
    return text


def _share(points: float) -> float:
    if not 0 < points < 100:
        raise UserError(f"--max-loss {points:g} is not allowed; it is points of accuracy, such as 1, and above 0.")
    return points / 100


def slo_limits(text: str | None) -> "Slo":
    """Return the limits in text such as `ttft=500ms,itl=50ms`, in seconds. Raises UserError for other text.

    >>> slo_limits("ttft=500ms,itl=0.05s")
    {'ttft': 0.5, 'itl': 0.05}
    """
    found: Slo = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"(ttft|itl)=(\d+(?:\.\d+)?)(ms|s)", part)
        if match is None:
            raise UserError(f"--slo {part!r} is not allowed; write ttft=500ms, itl=50ms, or both with a comma.")
        found["ttft" if match[1] == "ttft" else "itl"] = float(match[2]) / (1000 if match[3] == "ms" else 1)
    return found

"""`mtbench load`: load servers with the prompts of a suite, by a client of others.

Exit codes: 0: every point has ended; 2: a user's mistake, or a server or client that failed; 3: the time budget ended
the load.
"""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from mtbench.cli.request_options import (
    CheckpointOption,
    DataOption,
    DeviceOption,
    DryRunOption,
    DtypeOption,
    EngineOption,
    FamilyOption,
    LossOption,
    ModelOption,
    OfflineOption,
    PluginOption,
    ResumeOption,
    TokensOption,
    UnsandboxedOption,
    in_panels,
    resumed,
)
from mtbench.cli.session import INCOMPLETE, out, say
from mtbench.runs.run_request import DEFAULTS, seconds

app = typer.Typer()

PER_SESSION = {"directory", "resume", "time_budget", "client_python", "plugin", "url"}  # options that `--resume` takes
MethodOption = Annotated[
    list[str],
    Option(
        "--method",
        help="Method that this command serves, such as 'mars:tau=1|0.95' or, with a range that the server adapts to "
        "its queue, mars:tau=0.95..0.7. Repeatable.",
    ),
]
UrlOption = Annotated[
    list[str],
    Option(
        "--url",
        help="NAME=URL of a server that runs already, ending in /v1; NAME=URL=VARIABLE if the environment variable has "
        "its key. Repeatable.",
    ),
]
SuiteOption = Annotated[str, Option("--suite", help="Suite as NAME or NAME:REST. See `mtbench ls suites`.")]
LimitOption = Annotated[int | None, Option("--limit", help="Most items of the suite; default: as many as are sent.")]
RateOption = Annotated[str | None, Option("--request-rate", help="Requests per second, such as 1,2,4.")]
ConcurrencyOption = Annotated[
    str | None, Option("--concurrency", help="Requests at a time, such as 1,4,16; instead of --request-rate.")
]
PoissonOption = Annotated[bool, Option("--poisson", help="Poisson arrivals; default: constant gaps.")]
DurationOption = Annotated[
    str, Option("--duration", help="Time in which a point's requests are sent, such as 30s, with --request-rate.")
]
RequestsOption = Annotated[int | None, Option("--requests", help="Requests of a point; default: rate times duration.")]
RoundsOption = Annotated[int, Option("--rounds", help="How often every point is run; intervals of times need 5.")]
SloOption = Annotated[
    str | None,
    Option("--slo", help="Limits of goodput, such as ttft=500ms,itl=50ms,e2e=5s; default: every answer is good."),
]
SeqsOption = Annotated[int, Option("--max-num-seqs", help="Rows of a served method: requests decoded side by side.")]
QueueOption = Annotated[int, Option("--max-queue", help="Requests that a served method lets wait.")]
TimeoutOption = Annotated[
    str, Option("--request-timeout", help="Time after which a request has failed, such as 90s or 5m.")
]
ClientOption = Annotated[str, Option("--client", help="Program that sends the requests: aiperf or guidellm.")]
PythonOption = Annotated[
    Path | None,
    Option("--client-python", help="A Python that has the client; default: installed once in the cache folder."),
]
LoadSeedOption = Annotated[int, Option("--seed", help="Random seed for the order of items, arms and arrivals.")]
BudgetOption = Annotated[
    str | None, Option("--time-budget", help="Start no point after 90s, 30m or 2h; continue with --resume.")
]
LoadOutOption = Annotated[Path | None, Option("-o", "--out", help="Folder of the load; default: runs/load-<time>.")]


@app.command()
@in_panels
def load(
    ctx: typer.Context,
    method: MethodOption = [],  # noqa: B006
    plugin: PluginOption = [],  # noqa: B006
    url: UrlOption = [],  # noqa: B006
    suite: SuiteOption = DEFAULTS.suite[0],
    family: FamilyOption = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = [],  # noqa: B006
    engine: EngineOption = DEFAULTS.engine,
    dtype: DtypeOption = DEFAULTS.dtype,
    device: DeviceOption = DEFAULTS.device,
    limit: LimitOption = None,
    data_dir: DataOption = None,
    offline: OfflineOption = False,
    allow_unsandboxed_code: UnsandboxedOption = False,
    request_rate: RateOption = None,
    concurrency: ConcurrencyOption = None,
    poisson: PoissonOption = False,
    duration: DurationOption = "30s",
    requests: RequestsOption = None,
    rounds: RoundsOption = 5,
    slo: SloOption = None,
    max_num_seqs: SeqsOption = 8,
    max_queue: QueueOption = 64,
    max_new_tokens: TokensOption = None,
    request_timeout: TimeoutOption = "300s",
    client: ClientOption = "aiperf",
    client_python: PythonOption = None,
    seed: LoadSeedOption = 0,
    max_loss: LossOption = DEFAULTS.max_loss,
    time_budget: BudgetOption = None,
    directory: LoadOutOption = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Load servers with a suite's prompts: goodput, latency and accuracy from the same requests.

    Each arm is a server: `mtbench serve` with a method, started by this command, or a given URL. aiperf or guidellm
    sends the prompts at every rate, arm by arm, in rounds. The answers are scored by the suite. A small start:
    --method ar --method mars:tau=0.95 --request-rate 2,8 --duration 10s --rounds 1.
    """
    _load(ctx, directory, client_python, seconds(time_budget), resume=resume, dry_run=dry_run)


def _load(
    ctx: typer.Context,
    directory: Path | None,
    client_python: Path | None,
    budget_s: float | None,
    *,
    resume: bool,
    dry_run: bool,
) -> None:
    from mtbench.cli import loading
    from mtbench.experiments.load import page

    if resume:
        opened: Any = loading.reopen(resumed(ctx, directory, "load", PER_SESSION))
    else:
        request = loading.request_of(ctx.params)
        if dry_run:
            for renderable in loading.dry_run(request, directory):
                out.print(renderable)
            return
        opened = loading.begin(request, directory)
    found = loading.run(opened, client_python, budget_s, ctx.params["url"])
    for renderable in page.terminal(found):
        out.print(renderable)
    say(opened.path / page.PAGE)
    if not found.complete:
        raise typer.Exit(INCOMPLETE)

"""`mtbench load`: load servers with the prompts of a suite, by a client of others.

Exit codes: 0: every point has ended; 2: a user's mistake, or a server or client that failed; 3: the time budget ended
the load.
"""

import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from mtbench.cli.request_options import (
    CheckpointOption,
    DataOption,
    DeviceOption,
    DryRunOption,
    DtypeOption,
    FamilyOption,
    ModelOption,
    OfflineOption,
    ResumeOption,
    UnsandboxedOption,
    absolute,
    checkpoints,
    in_panels,
    seconds,
    was_given,
)
from mtbench.cli.session import INCOMPLETE, out, say
from mtbench.errors import UserError

app = typer.Typer()

SuiteOption = Annotated[str, Option("--suite", help="Suite as NAME or NAME:REST. See `mtbench ls suites`.")]
LimitOption = Annotated[int | None, Option("--limit", help="Most items of the suite; default: as many as are sent.")]
LoadOutOption = Annotated[Path | None, Option("-o", "--out", help="Folder of the load; default: runs/load-<time>.")]
PER_SESSION = {"directory", "resume", "time_budget", "client_python"}  # options that `--resume` takes


@app.command()
@in_panels
def load(
    ctx: typer.Context,
    arm: Annotated[
        list[str],
        Option(
            "--arm",
            help="Method that this command serves, such as 'mars:tau=1|0.95' or, with a range that the server adapts "
            "to its queue, mars:tau=0.95..0.7. Repeatable; the first arm is listed first.",
        ),
    ] = [],  # noqa: B006
    url: Annotated[
        list[str], Option("--url", help="NAME=URL of a server that runs already, ending in /v1. Repeatable.")
    ] = [],  # noqa: B006
    suite: Annotated[
        str, Option("--suite", help="Suite as NAME or NAME:REST. See `mtbench ls suites`.")
    ] = "arithmetic",
    family: FamilyOption = None,
    model: ModelOption = None,
    checkpoint: CheckpointOption = [],  # noqa: B006
    engine: Annotated[str, Option("--engine", help="How forward passes run: graph, eager or invariant.")] = "graph",
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    limit: Annotated[
        int | None, Option("--limit", help="Most items of the suite; default: as many as are sent.")
    ] = None,
    data_dir: DataOption = None,
    offline: OfflineOption = False,
    allow_unsandboxed_code: UnsandboxedOption = False,
    rates: Annotated[str | None, Option("--rates", help="Requests per second, such as 1,2,4.")] = None,
    concurrency: Annotated[
        str | None, Option("--concurrency", help="Requests at a time, such as 1,4,16; instead of --rates.")
    ] = None,
    poisson: Annotated[bool, Option("--poisson", help="Poisson arrivals; default: constant gaps.")] = False,
    duration_s: Annotated[
        float, Option("--duration-s", help="Seconds in which a point's requests are sent, with --rates.")
    ] = 30.0,
    requests: Annotated[
        int | None, Option("--requests", help="Requests of a point; default: rate times duration.")
    ] = None,
    rounds: Annotated[int, Option("--rounds", help="How often every point is run; intervals of times need 5.")] = 5,
    slo: Annotated[
        str | None,
        Option("--slo", help="Limits of goodput, such as ttft=500ms,itl=50ms,e2e=5s; default: every answer is good."),
    ] = None,
    rows: Annotated[int, Option("--rows", help="Rows of a served method: requests decoded side by side.")] = 8,
    max_queue: Annotated[int, Option("--max-queue", help="Requests that a served method lets wait.")] = 64,
    max_new_tokens: Annotated[
        int | None, Option("--max-new-tokens", help="Maximum tokens of an answer; default: the suite's.")
    ] = None,
    request_timeout_s: Annotated[
        float, Option("--request-timeout-s", help="Seconds after which a request has failed.")
    ] = 300.0,
    client: Annotated[str, Option("--client", help="Program that sends the requests: aiperf or guidellm.")] = "aiperf",
    client_python: Annotated[
        Path | None,
        Option("--client-python", help="A Python that has the client; default: installed once in the cache folder."),
    ] = None,
    seed: Annotated[int, Option("--seed", help="Random seed for the order of items, arms and arrivals.")] = 0,
    accuracy_margin: Annotated[
        float, Option("--accuracy-margin", help="Margin of the verdict `not worse`; 0.02 is 2 points.")
    ] = 0.02,
    time_budget: Annotated[
        str | None, Option("--time-budget", help="Start no point after 90s, 30m or 2h; continue with --resume.")
    ] = None,
    directory: Annotated[
        Path | None, Option("-o", "--out", help="Folder of the load; default: runs/load-<time>.")
    ] = None,
    resume: ResumeOption = False,
    dry_run: DryRunOption = False,
) -> None:
    """Load servers with the prompts of a suite: goodput, latency and accuracy from the same requests.

    Each arm is a server: `mtbench serve` with a method, started by this command, or a given URL. aiperf or guidellm
    sends the prompts at every rate, arm by arm, in rounds. The answers are scored by the suite. A small start: --arm ar
    --arm mars:tau=0.95 --rates 2,8 --duration-s 10 --rounds 1.
    """
    from mtbench.cli import loading

    budget_s = seconds(time_budget)
    if resume:
        opened = loading.reopen(_resumed(ctx, directory))
    else:
        request = loading.request_of(
            {
                "suite": suite,
                "arm": arm,
                "url": loading.urls(url),
                "family": family,
                "model": model,
                "checkpoint": checkpoints(checkpoint),
                "engine": engine,
                "dtype": dtype,
                "device": device,
                "rates": loading.numbers(rates, "--rates", float),
                "concurrency": loading.numbers(concurrency, "--concurrency", int),
                "poisson": poisson,
                "duration_s": duration_s,
                "requests": requests,
                "rounds": rounds,
                "slo": loading.limits(slo),
                "client": client,
                "limit": limit,
                "rows": rows,
                "max_queue": max_queue,
                "max_new_tokens": max_new_tokens,
                "request_timeout_s": request_timeout_s,
                "seed": seed,
                "data_dir": absolute(data_dir),
                "offline": offline,
                "allow_unsandboxed_code": allow_unsandboxed_code,
                "accuracy_margin": accuracy_margin,
            }
        )
        path = directory or Path("runs") / f"load-{time.strftime('%Y%m%d-%H%M%S')}"
        if dry_run:
            for renderable in loading.dry_run(request, directory):
                out.print(renderable)
            return
        opened = loading.begin(request, path)
    found = loading.run(opened, client_python, budget_s)
    for renderable in loading.terminal(found):
        out.print(renderable)
    say(opened.path / loading.PAGE)
    if not found.complete:
        raise typer.Exit(INCOMPLETE)


def _resumed(ctx: typer.Context, directory: Path | None) -> Path:
    """Return the folder of a load to go on with. Raises UserError for an option that cannot change."""
    if directory is None:
        raise UserError("--resume needs the folder: `mtbench load -o DIR --resume`.")
    given = sorted(name for name in ctx.params if was_given(ctx, name) and name not in PER_SESSION)
    if given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UserError(
            f"a load goes on as it began, so {named} cannot change; go on with `mtbench load -o {directory} --resume`."
        )
    return directory

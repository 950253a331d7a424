"""What `mtbench plan`, `generate` and `score` do and print. It does not import the report's pages or libraries."""

import sys
from collections.abc import Collection
from pathlib import Path

from mtbench.cli import session
from mtbench.cli.session import err, out, say, warn
from mtbench.decoding.openai_client import ServerError
from mtbench.errors import UserError
from mtbench.report.progress import RunProgress
from mtbench.report.terminal import plan_table
from mtbench.runs import lifecycle
from mtbench.runs.directory import RunDirectory
from mtbench.runs.executor import estimate_s
from mtbench.runs.formats import FailureLine
from mtbench.runs.lifecycle import check as check
from mtbench.runs.lifecycle import servers_of as servers_of
from mtbench.runs.plan import Plan
from mtbench.runs.planner import make_plan
from mtbench.runs.run_request import Execution, RunRequest


def start(request: RunRequest, directory: Path | None) -> RunDirectory:
    """Plan a run. Nothing is written if the request is wrong."""
    path = directory or lifecycle.default_directory(request)
    run, planned = lifecycle.start(path, request, sys.argv)
    session.started.append(path)
    for warning in planned.warnings():
        warn(warning)
    return run


def resume(request: RunRequest, directory: Path | None, given: Collection[str]) -> RunDirectory:
    """Open the run in `directory`; the `given` fields of the request must agree with its plan."""
    if directory is None:
        raise UserError("--resume needs the run directory: `mtbench run -o DIR --resume`.")
    if lifecycle.clear_unplanned(directory, given):
        return start(request, directory)
    run = lifecycle.reopen(directory, request, given)
    session.started.append(directory)
    return run


def plan(request: RunRequest, directory: Path | None) -> None:
    """Write a plan and print its directory."""
    say(start(request, directory).path)


def generate(directory: Path, settings: Execution) -> bool:
    """Decode the missing batches of a plan; return whether every cell could be decoded."""
    run = RunDirectory.open(directory)
    with RunProgress(err) as progress:
        lifecycle.generate(run, settings, progress)
    return all(failure.stage is not None for failure in run.read_lines("failures.jsonl", FailureLine))


def wait_for_turn() -> None:
    """Print `ready`, then wait for a line on standard input. Raises UserError if the input ends."""
    say("ready")
    out.file.flush()
    if not sys.stdin.readline():
        raise UserError("--turns: standard input ended before the last block; give one line per block.")


def score(directory: Path, settings: Execution) -> None:
    """Score the stored texts of a run."""
    lifecycle.score(RunDirectory.open(directory), settings)


def dry_run(request: RunRequest, directory: Path | None) -> None:
    """Print the plan and a time estimate."""
    if directory is not None:
        lifecycle.refuse_existing(directory)
    planned = make_plan(request)
    out.print(plan_table(planned))
    for warning in planned.warnings():
        say(warning)
    say(f"about {_estimate(planned)}, if every answer takes its whole token budget")


def _estimate(planned: Plan) -> str:
    try:
        seconds = estimate_s(planned)
    except ServerError as error:
        raise UserError(f"{error}; the time estimate needs the server.") from None
    if seconds > 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s"

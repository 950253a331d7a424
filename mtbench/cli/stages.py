"""What `mtbench plan`, `generate` and `score` do and print. It does not import the report's pages or libraries."""

import sys
from collections.abc import Collection
from pathlib import Path

from mtbench.cli import session
from mtbench.cli.session import err, out, say, warn
from mtbench.decoding.openai_client import ServerError
from mtbench.errors import UserError
from mtbench.report.formatting import counted
from mtbench.report.phrases import batches
from mtbench.report.progress import RunProgress
from mtbench.report.terminal import plan_table
from mtbench.runs import lifecycle
from mtbench.runs.accuracy_needs import DIFFERING, AccuracyNeed, accuracy_needs
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import FailureLine
from mtbench.runs.lifecycle import check as check
from mtbench.runs.lifecycle import servers_of as servers_of
from mtbench.runs.plan import Plan
from mtbench.runs.planner import make_plan
from mtbench.runs.run_request import Execution, RunRequest
from mtbench.runs.time_estimate import estimate_blocks_s, modelled_gpu


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
    """Print the plan, a time estimate, and what a verdict on accuracy will take."""
    if directory is not None:
        lifecycle.refuse_existing(directory)
    planned = make_plan(request)
    out.print(plan_table(planned))
    for warning in planned.warnings():
        say(warning)
    try:
        blocks_s = estimate_blocks_s(planned)
    except ServerError as error:
        raise UserError(f"{error}; the time estimate needs the server.") from None
    total_s = sum(sum(group.rounds) * block_s for group, block_s in zip(planned.groups, blocks_s, strict=True))
    say(f"about {_duration(total_s)}, if every answer takes its whole token budget{_basis(planned)}")
    needs = accuracy_needs(planned)
    if needs:
        assumed = f"true difference 0, {DIFFERING:.0%} of the items right in one arm only, 80% power"
        say(f"items for a verdict on accuracy (assumed: {assumed}):")
    for need in needs:
        say(_need(planned, need, need.time_s(blocks_s[need.place])))


def _basis(planned: Plan) -> str:
    """Return what else the time estimate assumes."""
    gpu = modelled_gpu(planned)
    return "" if gpu is None else f" and every forward pass gives one token; computed for an {gpu.name}, not measured"


def _need(planned: Plan, need: AccuracyNeed, time_s: float | None) -> str:
    """Return the items and the time of a verdict on accuracy, and whether the plan has enough items."""
    group, within = need.group, 100 * planned.request.accuracy_margin
    place = f"{group.suite}, {batches(group.batch_size, group.batching)}, {counted(need.arms, 'arm')}"
    if need.needed is None or time_s is None:
        return f"{place}: no number of items shows `not worse` within {within:g} points"
    takes = f"`not worse` within {within:g} points takes about {need.needed:,} items, {_duration(time_s)}"
    return f"{place}: {takes}; planned: {need.planned:,}, {_enough(planned, need)}"


def _enough(planned: Plan, need: AccuracyNeed) -> str:
    """Return whether a group has enough items, and if not, why or what to do."""
    if need.enough:
        return "enough"
    suite = planned.suite(need.group.suite)
    if need.planned < len(suite.scored_items):
        return "too few; only the largest batch size has all items"
    if not suite.is_whole(planned.request.limit):
        return "too few; raise `--limit`"
    return "too few, and the suite has no more; add prompts, or take a larger suite"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"

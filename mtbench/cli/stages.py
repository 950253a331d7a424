"""What `mtbench plan`, `generate` and `score` do and print. It does not import the report's pages or libraries."""

import sys
from collections.abc import Collection
from pathlib import Path

from mtbench.cli import session
from mtbench.cli.session import err, out, say, warn
from mtbench.errors import UserError
from mtbench.report.formatting import counted
from mtbench.report.phrases import batches, suite_name
from mtbench.report.progress import MeasuringProgress, RunProgress
from mtbench.report.terminal import plan_table
from mtbench.runs import lifecycle
from mtbench.runs.accuracy_needs import DIFFERING, AccuracyNeed, accuracy_needs
from mtbench.runs.directory import RunDirectory, refuse_used
from mtbench.runs.formats import FailureLine
from mtbench.runs.lifecycle import check as check
from mtbench.runs.lifecycle import servers_of as servers_of
from mtbench.runs.plan import Plan
from mtbench.runs.planner import make_plan
from mtbench.runs.run_request import ALL, Execution, RunRequest
from mtbench.runs.time_estimate import Estimate, all_blocks, duration, estimate


def start(request: RunRequest, directory: Path | None, given: Collection[str]) -> RunDirectory:
    """Plan a run, and say what it holds. Nothing is written if the request is wrong. `given`: fields of options."""
    path = directory or lifecycle.default_directory(request)
    run, planned = lifecycle.start(path, request, sys.argv)
    session.started.append(path)
    warn(plan_line(planned, given))
    for warning in planned.warnings():
        warn(warning)
    return run


def resume(request: RunRequest, directory: Path | None, given: Collection[str]) -> RunDirectory:
    """Open the run in `directory`; the `given` fields of the request must agree with its plan."""
    if directory is None:
        raise UserError("--resume needs the run directory: `mtbench run -o DIR --resume`.")
    if lifecycle.clear_unplanned(directory, given):
        return start(request, directory, given)
    run = lifecycle.reopen(directory, request, given)
    session.started.append(directory)
    return run


def plan(request: RunRequest, directory: Path | None, given: Collection[str]) -> None:
    """Write a plan and print its directory."""
    say(start(request, directory, given).path)


def plan_line(planned: Plan, given: Collection[str]) -> str:
    """Return a plan in one line: its items, with the default limit if that left some out, its arms and batches."""
    limit = planned.request.limit
    items = ", ".join(f"{len(suite.items):,} items of {suite_name(suite.suite)}" for suite in planned.suites)
    if "limit" not in given and not all(suite.is_whole(limit) for suite in planned.suites):
        items += f" (default `--limit {limit}`; `--limit {ALL}` runs all)"
    arms = counted(len({cell.arm for cell in planned.cells}), "arm")
    rounds = counted(planned.request.rounds, "round")
    timed = sum(sum(group.rounds) * len(group.cells) for group in planned.groups)
    sizes = " and ".join(map(str, sorted(set(planned.request.batch_size))))
    return f"plan: {items}; {arms}, batch size {sizes}, {rounds}: {timed:,} blocks to time"


def generate(directory: Path, settings: Execution) -> bool:
    """Decode the missing batches of a plan; return whether every cell could be decoded."""
    run = RunDirectory.open(directory)
    lifecycle.refuse_race(run)
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


def dry_run(request: RunRequest, directory: Path | None, given: Collection[str] = ()) -> None:
    """Print the plan, a time estimate, and what a verdict on accuracy will take."""
    if directory is not None:
        refuse_used(directory, "run")
    planned = make_plan(request)
    say(plan_line(planned, given))
    out.print(plan_table(planned))
    for warning in planned.warnings():
        say(warning)
    expected = show_estimate(planned)
    needs = accuracy_needs(planned)
    if needs:
        assumed = f"true difference 0, {DIFFERING:.0%} of the items right in one arm only, 80% power"
        say(f"items for a verdict on accuracy (assumed: {assumed}):")
    for need in needs:
        say(_need(planned, need, need.time_s(expected.blocks_s[need.place])))


def show_estimate(planned: Plan, before: str = "") -> Estimate:
    """Print how long a plan takes, and which cells fail; return it. before: words before the time."""
    with MeasuringProgress(err) as progress:
        expected = estimate(planned, progress.show)
    for cell, error in expected.failed.items():
        say(f"{cell} fails: {error}")
    say(f"{before}{expected.described(all_blocks(planned))}")
    return expected


def _need(planned: Plan, need: AccuracyNeed, time_s: float | None) -> str:
    """Return the items and the time of a verdict on accuracy, and whether the plan has enough items."""
    group, within = need.group, planned.request.max_loss
    place = f"{group.suite}, {batches(group.batch_size, group.batching)}, {counted(need.arms, 'arm')}"
    if need.needed is None or time_s is None:
        return f"{place}: no number of items shows `not worse` within {within:g} points"
    takes = f"`not worse` within {within:g} points takes about {need.needed:,} items, {duration(time_s)}"
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

"""What `mtbench choose` does and prints: the candidates, the race, the decision."""

import sys
from pathlib import Path
from typing import NamedTuple

from mtbench.choose.candidates import Candidates, candidates
from mtbench.choose.decide import decide
from mtbench.choose.format import Decision
from mtbench.choose.runner import Racing, plan_race, race_of
from mtbench.choose.runner import begin as begin_race
from mtbench.choose.terminal import candidate_tables, decision_tables
from mtbench.cli import session
from mtbench.cli.session import err, out, say, warn
from mtbench.errors import UserError
from mtbench.report import pipeline
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.progress import RunProgress
from mtbench.results.decision_text import without_preface
from mtbench.runs import lifecycle
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import Objective, Race, Slo
from mtbench.runs.plan import Plan
from mtbench.runs.plan_checks import read_plan
from mtbench.runs.run_request import Execution, RunRequest
from mtbench.runs.time_estimate import all_blocks, estimate


class Settings(NamedTuple):
    """What a race decides by."""

    objective: Objective
    max_loss: float  # as a share
    slo_s: Slo


def begin(request: RunRequest, settings: Settings, directory: Path | None) -> RunDirectory:
    """Plan a race. Nothing is written if the request is wrong."""
    path = directory or lifecycle.default_directory(request)
    lifecycle.refuse_existing(path)
    found, plan = _planned(request, settings)
    run = begin_race(path, plan, race_of(plan, found, *settings), sys.argv)
    session.started.append(path)
    for warning in plan.warnings():
        warn(warning)
    return run


def reopen(directory: Path) -> RunDirectory:
    """Open a race to go on with it."""
    run = RunDirectory.open(directory)
    if not run.has("race.json"):
        raise UserError(
            f"{str(directory)!r} is a run in which no arm leaves; go on with `mtbench run -o {directory} --resume`."
        )
    session.started.append(directory)
    return run


def run(opened: RunDirectory, execution: Execution) -> Decision:
    """Run what is missing of a race, decide and print."""
    plan, race = read_plan(opened), opened.read("race.json", Race)
    lifecycle.check(execution, plan.request.device)
    racing = Racing(opened, plan, race, execution)
    with opened.locked():
        with RunProgress(err) as progress:
            racing.expect = progress.expect
            results = pipeline.finish(opened, racing.executing(), progress)
        decision = decide(racing, results)
    for table in decision_tables(results, decision):
        out.print(table)
    say("")
    names = arm_names(results.cells)
    say(in_words(decision.headline, names))
    for recommendation in decision.recommendations:
        if without_preface(recommendation) not in decision.headline:
            say(in_words(recommendation.text, names))
    for arm, settings in decision.serving.items():
        for engine, text in settings.items():
            say(f"{arm} in {engine} (not measured here): {text}")
    if not decision.complete:
        say(f"the time budget ended the race; go on with `mtbench choose -o {opened.path} --resume`")
    spent = decision.spent
    if spent.forwards_full:
        say(f"forwards: {spent.forwards:,} of {spent.forwards_full:,} of the full grid")
    return decision


def dry_run(request: RunRequest, settings: Settings, directory: Path | None) -> None:
    """Print the candidates and how long the race takes at most."""
    if directory is not None:
        lifecycle.refuse_existing(directory)
    found, plan = _planned(request, settings)
    print_candidates(found)
    say(f"at most, if no arm leaves: {estimate(plan).described(all_blocks(plan))}")


def print_candidates(found: Candidates) -> None:
    """Print the arms that can be raced, and why the other methods cannot."""
    for table in candidate_tables([str(arm) for arm in (found.plain, *found.arms)], found.refused):
        out.print(table)


def _planned(request: RunRequest, settings: Settings) -> tuple[Candidates, Plan]:
    found = candidates(request)
    if not found.arms:
        raise UserError("there is nothing to race beside plain decoding; see `mtbench ls arms`.")
    return found, plan_race(request, found, settings.max_loss)

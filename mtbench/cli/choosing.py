"""What `mtbench choose` does and prints: the candidates, the race, the decision."""

import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mtbench import plugins, records
from mtbench.cli import session
from mtbench.cli.request_options import fields_of, number_or_all
from mtbench.cli.session import beside_json, err, out, say, warn, write_json
from mtbench.cli.stages import show_estimate
from mtbench.experiments.choose import pipeline
from mtbench.experiments.choose.candidates import Candidates
from mtbench.experiments.choose.pipeline import resume as resume
from mtbench.experiments.choose.request import RACE_OPTIONS, RaceRequest
from mtbench.experiments.choose.terminal import candidate_tables, decision_tables
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.progress import RunProgress
from mtbench.report.race import deploy_parts
from mtbench.report.terminal import decision_lines
from mtbench.report.text import weights
from mtbench.results.decision_format import FILE as FILE
from mtbench.results.decision_format import Decision
from mtbench.results.decision_text import ALL_USED, budget_spent
from mtbench.results.format import Results
from mtbench.runs import lifecycle
from mtbench.runs.directory import RunDirectory, refuse_used
from mtbench.runs.run_request import Execution


def request_of(params: Mapping[str, Any]) -> RaceRequest:
    """Return the request that the options make. Raises UserError for text that cannot be read."""
    fields = fields_of(params, RACE_OPTIONS) | {"limit": number_or_all(params["limit"])}
    return records.validate(fields, RaceRequest, "the options", "see `mtbench choose --help`.")


def begin(request: RaceRequest, directory: Path | None, execution: Execution) -> RunDirectory:
    """Plan a race. Nothing is written if the request is wrong."""
    run, plan = pipeline.begin(request, directory, execution, sys.argv)
    for warning in pipeline.warnings(plan):
        warn(warning)
    return run


def run(opened: RunDirectory, execution: Execution, json_to: Path | None = None) -> tuple[Results, Decision]:
    """Run what is missing of a race, decide and print. With `--json -`, standard output is only the JSON."""
    session.started.append(opened.path)
    with RunProgress(err) as progress:
        results, decision = pipeline.finish(opened, execution, progress)
    console = beside_json(json_to)
    say = partial(session.say, console=console)
    session.show(decision_tables(results, decision), console)
    for line in decision_lines(results, decision):
        say(line)
    for line in deployment_lines(decision, arm_names(results.cells)):
        say(line)
    for made in weights(results):
        say(f"Weights: {made}; an engine that computes with the quantised weights has other times.")
    if not decision.complete:
        say(budget_spent(decision, f"mtbench choose -o {opened.path} --resume{plugins.as_options()}"))
    elif not decision.least and any(rec.word == "cannot tell" for rec in decision.recommendations):
        say(ALL_USED)
    spent = decision.spent
    if spent.forwards_full:
        say(f"forwards: {spent.forwards:,} of {spent.forwards_full:,} of the full grid")
    written = opened.path / FILE
    write_json(json_to, written.read_text(), f"the race is complete, and {written} has the same.")
    return results, decision


def deployment_lines(decision: Decision, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the commands that start a serving engine with the recommended arms."""
    for part in deploy_parts(decision):
        yield f"{part.heading}:"
        yield from (f"{in_words(name, names)}: {command}" for name, command in part.rows)
        yield from filter(None, [in_words(part.text, names)])


def dry_run(request: RaceRequest, directory: Path | None, execution: Execution) -> None:
    """Print the candidates and how long the race takes at most."""
    lifecycle.check(execution, request.device)
    if directory is not None:
        refuse_used(directory, "choose")
    found, plan, _ = pipeline.planned(request)
    print_candidates(found)
    for warning in pipeline.warnings(plan):
        warn(warning)
    show_estimate(plan, "at most; eliminated arms shorten it: ")
    say("for less time: --max-new-tokens, --limit, or --time-budget 10m, which ends with what is known by then")


def print_candidates(found: Candidates) -> None:
    """Print the arms that can be raced, and why the other methods cannot."""
    for table in candidate_tables([str(arm) for arm in (found.plain, *found.arms)], found.refused):
        out.print(table)

"""`mtbench choose`: a race of methods that ends with a decision."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mtbench import plugins
from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.experiments.choose import pipeline
from mtbench.experiments.choose.candidates import Candidates
from mtbench.experiments.choose.request import RaceRequest, RaceSession
from mtbench.experiments.choose.terminal import candidate_tables, decision_tables
from mtbench.experiments.experiment import Experiment, Job
from mtbench.experiments.run import folder_of, show_estimate
from mtbench.report.arm_names import arm_names, in_words
from mtbench.report.race import DEPLOY, deployment
from mtbench.report.terminal import decision_lines
from mtbench.report.text import weights
from mtbench.results.decision_format import FILE, Decision
from mtbench.results.decision_text import ALL_USED, budget_spent
from mtbench.results.format import Results
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import Race
from mtbench.runs.plan import Plan
from mtbench.runs.planner import write_plan
from mtbench.runs.run_request import Execution
from mtbench.runs.workers import refuse

FAILED, INCOMPLETE = 1, 3  # exit codes: plain decoding failed; the time budget ended the race


class RacePlan(NamedTuple):
    """What can be raced, the plan of the run that the race is, and its looks."""

    found: Candidates
    plan: Plan
    race: Race


class Decided(NamedTuple):
    """What a race has found."""

    results: Results
    decision: Decision


class ChooseExperiment(Experiment[RaceRequest, RaceSession, RacePlan, Decided]):
    """A run in which arms leave."""

    command, begun_by, result, page = "choose", "plan.json", FILE, "report.html"
    request, session = RaceRequest, RaceSession

    def folder(self, request: RaceRequest) -> str:
        """Return the suite's name."""
        return folder_of(request)

    def plan(self, request: RaceRequest, session: RaceSession) -> RacePlan:
        """Return the candidates, the plan and the looks."""
        refuse(_execution(request, session), request.device)
        return RacePlan(*pipeline.planned(request))

    def warnings(self, planned: RacePlan) -> list[str]:
        """Return what is known to end without a verdict or a grade."""
        return pipeline.warnings(planned.plan)

    def dry_run(self, planned: RacePlan, given: Collection[str], console: Terminal, notes: Terminal) -> None:
        """Print the candidates and how long the race takes at most."""
        for table in candidate_tables(
            [str(arm) for arm in (planned.found.plain, *planned.found.arms)], planned.found.refused
        ):
            console.print(table)
        for warning in self.warnings(planned):
            notes.say(warning)
        show_estimate(planned.plan, console, notes, "at most; eliminated arms shorten it: ")
        console.say(
            "for less time: --max-new-tokens, --limit, or --time-budget 10m, which ends with what is known by then"
        )

    def begin(self, directory: RunDirectory, planned: RacePlan, argv: Sequence[str]) -> None:
        """Write environment, looks and plan."""
        write_plan(directory, planned.plan, argv, planned.race)

    def refuse_other(self, directory: Path) -> None:
        """Raise UserError for a run that is no race."""
        run = RunDirectory(directory)
        if run.has("plan.json") and not run.has("race.json"):
            raise UserError(
                f"{str(directory)!r} is a run in which no arm leaves; go on with `mtbench run -o {directory} --resume`."
            )

    def stored(self, directory: Path) -> None:
        """Return None: the plan has what became of the options."""
        RunDirectory.open(directory, self.command)

    def run(self, job: Job[RaceRequest, RaceSession]) -> Decided:
        """Run what is missing of the race, and decide."""
        with job.progress() as progress:
            return Decided(*pipeline.finish(job.directory, _execution(job.request, job.session), progress))

    def show(self, job: Job[RaceRequest, RaceSession], found: Decided, console: Terminal) -> None:
        """Print a line for each arm, what to use, and how to deploy it."""
        results, decision = found
        for block in decision_tables(results, decision):
            console.say(block) if isinstance(block, str) else console.print(block, highlight=False)
        for line in (*decision_lines(results, decision), *deployment_lines(decision, arm_names(results.cells))):
            console.say(line)
        for made in weights(results):
            console.say(f"Weights: {made}; an engine that computes with the quantised weights has other times.")
        if not decision.complete:
            console.say(budget_spent(decision, f"mtbench choose -o {job.path} --resume{plugins.as_options()}"))
        elif not decision.least and any(rec.word == "cannot tell" for rec in decision.recommendations):
            console.say(ALL_USED)
        spent = decision.spent
        if spent.forwards_full:
            console.say(f"forwards: {spent.forwards:,} of {spent.forwards_full:,} of the full grid")

    def exit_code(self, found: Decided, session: RaceSession) -> int:
        """Return 0 if the race has ended, whatever it says."""
        if not found.decision.complete:
            return INCOMPLETE
        return FAILED if any(cell.reference and cell.status == "failed" for cell in found.results.cells) else 0


def _execution(request: RaceRequest, session: RaceSession) -> Execution:
    return Execution.of(request, workers=session.workers, time_budget_s=session.time_budget_s)


def deployment_lines(decision: Decision, names: Mapping[str, str]) -> Iterator[str]:
    """Yield the commands that start a serving engine with the recommended arms."""
    rows, notes = deployment(decision)
    if rows or notes:
        yield f"{DEPLOY}:"
    yield from (f"{in_words(name, names)}: {command}" for name, command in rows)
    yield from (in_words(note, names) for note in notes)


EXPERIMENT = ChooseExperiment()

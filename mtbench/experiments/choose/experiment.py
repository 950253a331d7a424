"""`mtbench choose`: a race of methods that ends with a decision."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

from mtbench.document.console import Terminal
from mtbench.errors import FAILED, INCOMPLETE
from mtbench.experiments import pipeline
from mtbench.experiments.choose.batch_size_schedule import measure
from mtbench.experiments.choose.decide import decide, spent_on
from mtbench.experiments.choose.plan import RacePlan, plan_of
from mtbench.experiments.choose.request import RaceRequest, RaceSession
from mtbench.experiments.choose.runner import Racing
from mtbench.experiments.diagnosis import explain
from mtbench.experiments.experiment import Experiment, Job
from mtbench.experiments.run import folder_of, show_estimate
from mtbench.lineup.planner import write_plan
from mtbench.measure.worker_counts import refuse
from mtbench.plan.checks import RACE_ADVICE, read_plan, read_race
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.records import validate
from mtbench.report.progress import RunProgress
from mtbench.report.terminal import show_results
from mtbench.results.aggregate import assemble, read_stored
from mtbench.results.decision_format import FILE, Decision
from mtbench.results.format import Results


class StoredRace(NamedTuple):
    """A race that is resumed."""

    plan: Plan
    request: RaceRequest


class Decided(NamedTuple):
    """The findings of a race."""

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
        refuse(session.workers, None, request.device)
        return plan_of(request, session.time_budget_s)

    def warnings(self, planned: RacePlan) -> list[str]:
        """Return the suites that cannot get a verdict or a grade."""
        return planned.warnings

    def dry_run(self, planned: RacePlan, given: Collection[str], console: Terminal, notes: Terminal) -> None:
        """Print the candidates and how long the race takes at most."""
        for table in planned.candidates.tables():
            console.print(table)
        for warning in planned.warnings:
            notes.say(warning)
        budget_s = planned.time_budget_s
        show_estimate(planned.plan, console, notes, "if no arm is eliminated: ", budget_s=budget_s)
        console.say(
            "for less time: --max-new-tokens, --limit, or --time-budget 10m, which ends with what is known by then"
        )

    def begin(self, directory: RunDirectory, planned: RacePlan, argv: Sequence[str]) -> None:
        """Write environment, looks and plan."""
        write_plan(directory, planned.plan, argv, planned.race)

    def stored(self, directory: Path) -> StoredRace:
        """Return the plan, and the request."""
        run = RunDirectory.open(directory, self.command)
        plan = read_plan(run)
        race = read_race(run, plan)
        assert race is not None, "a run without race.json is refused before"
        return StoredRace(plan, validate(race.request, RaceRequest, f"{directory / 'race.json'}: request", RACE_ADVICE))

    def run(self, job: Job[RaceRequest, RaceSession]) -> Decided:
        """Run the rest of the race, and decide."""
        session = job.session
        execution = Execution.of(
            job.request,
            began=job.began,
            workers=session.workers,
            time_budget_s=session.time_budget_s,
            engine_options=job.requested.engine_option,
        )
        with job.progress() as progress:
            run = Run.open(job.directory, None if job.new else job.plan.plan)
            racing = Racing(run, execution)
            if not (is_decided(run) and run.directory.read(FILE, Decision).complete) or session.time_budget_s:
                racing.let_return()
            return finish(racing, progress, job.deadline)

    def show(self, job: Job[RaceRequest, RaceSession], decided: Decided, console: Terminal) -> None:
        """Print what to use and how to deploy it, a line for each arm, and notes."""
        show_results(job.directory, decided.results, console, others=job.session.deploy == "all")

    def decided(self, directory: Path) -> bool:
        """Return whether a block was decoded."""
        return any(directory.glob("timings/*"))

    def exit_code(self, decided: Decided, session: RaceSession) -> int:
        """Return 3 for a race that its time budget ended, 1 if plain decoding failed, else 0."""
        if not decided.decision.complete:
            return INCOMPLETE
        return FAILED if any(cell.reference and cell.status == "failed" for cell in decided.results.cells) else 0


def finish(racing: Racing, progress: RunProgress, deadline: float = float("inf")) -> Decided:
    """Run the rest of a race, decide, and write its pages. An earlier decision stays until then."""
    run = racing.run
    racing.restore_left()
    results = pipeline.finish(run, racing.executing(), progress)
    if explain(run, results, progress.show, deadline):
        results = assemble(run)
    decision = decide(racing, results)
    if decision.complete:
        measure(run, decision.recommendations, racing.execution, progress, deadline)
        decision = decide(racing, results)
    pipeline.write_pages(run, results)
    return Decided(results, decision)


def is_decided(run: Run) -> bool:
    """Return whether decision.json is of the stored blocks. A race that was resumed and killed has more of them."""
    files = run.directory
    return files.has(FILE) and files.read(FILE, Decision).spent == spent_on(read_stored(run))


def report(run: Run, *, price_per_hour: float | None = None) -> Results:
    """Write results, decision and pages of a race, from the stored lines. Its looks are kept if it has no new block."""
    results = assemble(run, price_per_hour=price_per_hour)
    looks = run.directory.read(FILE, Decision).looks if is_decided(run) else None
    decide(Racing(run, Execution()), results, looks)
    pipeline.write_pages(run, results)
    return results


EXPERIMENT = ChooseExperiment()

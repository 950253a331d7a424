"""`mtbench run`: arms compared on the same prompts. Its stages are in measure/, results/ and report/."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from mtbench.decoding.arms import is_served, safe
from mtbench.document.console import Terminal
from mtbench.document.formatting import counted
from mtbench.errors import FAILED, INCOMPLETE, MissingWeights
from mtbench.experiments import pipeline
from mtbench.experiments.diagnosis import explain
from mtbench.experiments.experiment import Experiment, Job
from mtbench.lineup import gpu_memory
from mtbench.lineup.engine_arms import servers_of
from mtbench.lineup.planner import make_plan, write_plan
from mtbench.measure.time_budget import outlook
from mtbench.measure.time_estimate import estimate
from mtbench.measure.worker_counts import refuse
from mtbench.options.common import Cause
from mtbench.options.texts import ALL
from mtbench.plan.checks import read_plan
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan
from mtbench.plan.request import DecodingRequest, Execution, RunRequest, RunSession
from mtbench.plan.run import Run
from mtbench.report.phrases import breaks_promise, suite_name
from mtbench.report.progress import ChangingLine
from mtbench.report.terminal import plan_table, show_results
from mtbench.results.aggregate import assemble
from mtbench.results.format import ResultCell, Results

CAUSES: Mapping[Cause, Callable[[ResultCell], bool]] = {
    "divergent": breaks_promise,
    "void": lambda cell: bool(cell.void),
    "failed": lambda cell: cell.status == "failed",
}


class RunExperiment(Experiment[RunRequest, RunSession, Plan, Results]):
    """A plan, decoded, scored and reported."""

    command, begun_by, result, page = "run", "plan.json", "results.json", "report.html"
    request, session = RunRequest, RunSession

    def folder(self, request: RunRequest) -> str:
        """Return the suite's name."""
        return folder_of(request)

    def plan(self, request: RunRequest, session: RunSession) -> Plan:
        """Return prompts, cells, blocks and rounds."""
        refuse(session.workers, session.ray, request.device)
        return make_plan(request, here=False) if session.ray is not None else gpu_memory.divided(make_plan(request))

    def headline(self, planned: Plan, given: Collection[str]) -> str:
        """Return a plan in one line: its items, with the default limit if that left some out, its arms and batches."""
        limit = planned.request.limit
        items = ", ".join(f"{len(suite.items):,} items of {suite_name(suite.suite)}" for suite in planned.suites)
        if "limit" not in given and not all(suite.is_whole(limit) for suite in planned.suites):
            items += f" (default `--limit {limit}`; `--limit {ALL}` runs all)"
        arms = counted(len({cell.arm for cell in planned.cells}), "arm")
        rounds = counted(planned.request.rounds, "round")
        timed = sum(sum(group.rounds) * len(group.cells) for group in planned.groups)
        sizes = " and ".join(map(str, sorted(set(planned.request.batch_size))))
        drawn = f"; {planned.request.words}" * bool(planned.request.words)
        return f"plan: {items}; {arms}, batch size {sizes}, {rounds}: {timed:,} blocks to time{drawn}"

    def warnings(self, planned: Plan) -> list[str]:
        """Return the parts that cannot get a verdict."""
        return planned.warnings()

    def dry_run(self, planned: Plan, given: Collection[str], console: Terminal, notes: Terminal) -> None:
        """Print the plan and a time estimate."""
        console.say(self.headline(planned, given))
        console.print(plan_table(planned))
        for warning in planned.warnings():
            console.say(warning)
        show_estimate(planned, console, notes, budget_s=planned.request.time_budget_s)

    def begin(self, directory: RunDirectory, planned: Plan, argv: Sequence[str]) -> None:
        """Write environment and plan."""
        write_plan(directory, planned, argv)

    def stored(self, directory: Path) -> Plan:
        """Return the plan."""
        return read_plan(RunDirectory.open(directory, self.command))

    def run(self, job: Job[RunRequest, RunSession]) -> Results:
        """Run what is missing of the plan, and write results and report."""
        execution = Execution.of(
            job.request,
            began=job.began,
            workers=job.session.workers,
            ray=job.session.ray,
            peak_memory=job.session.peak_memory,
            servers={*job.session.server, *servers_of(job.requested)},  # not the stored plan's: it is untrusted input
            engine_options=job.requested.engine_option,
        )
        run = Run.open(job.directory, None if job.new else job.plan)
        with job.progress() as progress:
            results = pipeline.finish(run, execution, progress)
        if explain(run, results, job.note, job.deadline):
            results = assemble(run)
        pipeline.write_pages(run, results)
        return results

    def show(self, job: Job[RunRequest, RunSession], results: Results, console: Terminal) -> None:
        """Print the decision and the tables."""
        show_results(job.directory, results, console)

    def exit_code(self, results: Results, session: RunSession) -> int:
        """Return 1 for a cell that `--fail-on` names, 3 for a run that its time budget ended, else 0."""
        if any(CAUSES[cause](cell) for cause in session.fail_on for cell in results.cells):
            return FAILED
        return INCOMPLETE if any(cell.status == "partial" for cell in results.cells) else 0


def folder_of(request: DecodingRequest) -> str:
    """Return the name that begins the default directory of a run: its suite's."""
    return safe(request.suite[0].partition(":")[0])


def show_estimate(
    planned: Plan, console: Terminal, notes: Terminal, before: str = "", *, budget_s: float | None = None
) -> None:
    """Print how long a plan takes, which cells fail, and whether its servers have time for a decision.

    before: words before the time. budget_s: the time budget. Without weights no time is known.
    """
    for parts in gpu_memory.described(planned):
        console.say(parts)
    expected = stopped = None
    try:
        with ChangingLine(notes) as line:
            line.show("time estimate: loading the models")
            expected = estimate(planned)
            for arm in expected.measure():
                line.show(f"time estimate: {expected.total()}; next {arm}", now=len(expected.samples) == 1)
    except MissingWeights as error:
        console.say(f"{outlook(planned, None, budget_s)}; how long a block takes is not known: {error}")
        return
    except KeyboardInterrupt as interrupt:  # what is known is printed
        if expected is None:
            raise
        stopped = interrupt
    for cell, reason in expected.failed.items():
        console.say(f"{cell} fails: {reason}")
    console.say(f"{before}{expected.described()}")
    if budget_s is not None or any(is_served(cell.engine) for cell in planned.cells):
        console.say(outlook(planned, expected.longest_block_s(), budget_s))
    if stopped:
        raise stopped


class PlanOnly(RunExperiment):
    """`mtbench plan`: another machine may decode the plan, and has its own device and dtype for `auto`."""

    def plan(self, request: RunRequest, session: RunSession) -> Plan:
        """Return prompts, cells, blocks and rounds."""
        return make_plan(request, here=False)


EXPERIMENT, PLAN_ONLY = RunExperiment(), PlanOnly()

"""A race from its request to its decision. `mtbench choose` and `mtbench.choose` share these steps."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import get_args

from mtbench.errors import UserError, unknown
from mtbench.experiments.choose import runner
from mtbench.experiments.choose.candidates import Candidates, candidates
from mtbench.experiments.choose.decide import decide, spent_on
from mtbench.experiments.choose.request import RaceRequest
from mtbench.experiments.choose.runner import Racing, plan_race, race_of
from mtbench.report import pipeline
from mtbench.report.progress import RunProgress
from mtbench.report.write import write_report
from mtbench.results.aggregate import assemble, read_stored
from mtbench.results.decision_format import FILE, Decision
from mtbench.results.format import Results
from mtbench.runs import lifecycle
from mtbench.runs.directory import RunDirectory, refuse_used
from mtbench.runs.formats import OBJECTIVES, LimitName, Objective, Race, Slo
from mtbench.runs.model_pool import resolve_device, with_dtype
from mtbench.runs.plan import Plan
from mtbench.runs.plan_checks import read_plan
from mtbench.runs.prompts import open_suites
from mtbench.runs.run_request import Execution, latency_limits, to_resume
from mtbench.statistics import EPSILON_POSITIONS_NEEDED, EXACT_EPSILON


def settings(request: RaceRequest) -> tuple[Objective, float, Slo]:
    """Return the objective, the accepted loss as a share, and the limits. Raises UserError for one not allowed."""
    objective = next((known for known in OBJECTIVES if known == request.objective), None)
    if objective is None:
        raise unknown("objective", request.objective, OBJECTIVES, "mtbench choose --help")
    if not 0 < request.max_loss < 100:
        raise UserError(
            f"--max-loss {request.max_loss:g} is not allowed; it is points of accuracy above 0 and below 100."
        )
    limits = latency_limits(request.slo, get_args(LimitName))
    slo_s: Slo = {name: limits[name] for name in get_args(LimitName) if name in limits}
    return objective, request.max_loss / 100, slo_s


def planned(request: RaceRequest) -> tuple[Candidates, Plan, Race]:
    """Return the candidates of a race, its plan and its looks. Raises UserError if the request is wrong."""
    (objective, max_loss, slo_s), asked = settings(request), request.run_request()
    if objective == "energy" and resolve_device(request.device) != "cuda":
        raise UserError("--objective energy needs a GPU, whose driver counts it; choose speed, latency or memory.")
    opened = open_suites(asked)
    found = candidates(asked)
    if not found.arms:
        raise UserError("there is nothing to race beside plain decoding; see `mtbench ls arms`.")
    plan = plan_race(asked, found, max_loss, opened)
    if request.dtype == "auto" and resolve_device(request.device) == "cpu" and _ungraded(plan):
        plan = plan.changed(request=plan.request.changed(dtype="float32"))
    return found, plan, race_of(plan, found, objective, max_loss, slo_s)


def warnings(plan: Plan) -> list[str]:
    """Return what is known beforehand to end without a verdict or a grade, and what was chosen for a grade."""
    said, chosen = plan.warnings(), plan.request.dtype
    remedy = "raise `--limit` or `--max-new-tokens`, or give `--dtype float32`"
    for suite, tokens, dtype in _ungraded(plan):
        said.append(
            f"{suite}: at most {tokens:,} tokens of plain decoding; {EPSILON_POSITIONS_NEEDED:,} are needed to tell "
            f"other tokens from rounding in {dtype}; {f'so it runs in {chosen}' if chosen in EXACT_EPSILON else remedy}"
        )
    return said


def _ungraded(plan: Plan) -> list[tuple[str, int, str]]:
    """Return the suites with too few tokens for a grade in the fastest dtype, with these tokens and this dtype."""
    fastest = plan.request.changed(dtype="auto") if plan.request.dtype in EXACT_EPSILON else plan.request
    dtype = with_dtype(plan.changed(request=fastest)).request.dtype
    tokens = {suite.suite: len(suite.items) * suite.max_new_tokens for suite in plan.suites}
    few = {suite: most for suite, most in tokens.items() if most < EPSILON_POSITIONS_NEEDED}
    return [] if dtype in EXACT_EPSILON else [(suite, most, dtype) for suite, most in few.items()]


def begin(
    request: RaceRequest, directory: Path | None, execution: Execution, command: Sequence[str]
) -> tuple[RunDirectory, Plan]:
    """Plan a race and write its plan. Nothing is written if either is wrong; then UserError is raised."""
    lifecycle.check(execution, request.device)
    path = directory or lifecycle.default_directory(request.run_request())
    refuse_used(path, "choose")
    _, plan, race = planned(request)
    return runner.begin(path, plan, race, command), plan


def resume(directory: Path | None, given: Collection[str]) -> RunDirectory | None:
    """Open a race to go on with it; None if it stopped before it had a plan, and is to begin again.

    given: options of this command that say what is raced. Raises UserError for a run that is no race, and for options
    that a race with a plan cannot change.
    """
    if directory is not None and lifecycle.clear_unplanned(directory, given):
        return None
    directory = to_resume(directory, given, "choose")
    run = RunDirectory.open(directory, "choose")
    if not run.has("race.json"):
        raise UserError(
            f"{str(directory)!r} is a run in which no arm leaves; go on with `mtbench run -o {directory} --resume`."
        )
    return run


def finish(run: RunDirectory, execution: Execution, progress: RunProgress) -> tuple[Results, Decision]:
    """Run what is missing of a race, decide, and write its pages. A decision from before stays until then."""
    plan, race = read_plan(run), run.read("race.json", Race)
    lifecycle.check(execution, plan.request.device)
    racing = Racing(run, plan, race, execution, progress.expect)
    with run.locked():
        Racing(run, plan, race, execution).restore_left()  # it counts no batches: none are expected yet
        results = pipeline.finish(run, racing.executing(), progress, pages=False)
        decision = decide(racing, results)
        write_report(run, results)
    return results, decision


def is_decided(run: RunDirectory) -> bool:
    """Return whether decision.json is of the stored blocks. A race that was resumed and killed has more of them."""
    return run.has(FILE) and run.read(FILE, Decision).spent == spent_on(read_stored(run))


def report(run: RunDirectory, *, price_per_hour: float | None = None) -> Results:
    """Write results, decision and pages of a race, from the stored lines. Its looks are kept if it has no new block."""
    with run.locked():
        results = assemble(run, price_per_hour=price_per_hour)
        looks = run.read(FILE, Decision).looks if is_decided(run) else None
        decide(Racing(run, read_plan(run), run.read("race.json", Race), Execution()), results, looks)
        write_report(run, results)
    return results

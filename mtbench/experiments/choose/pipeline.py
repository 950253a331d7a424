"""A race from its request to its decision. `mtbench choose` and `mtbench.choose` share these steps."""

from mtbench.errors import UserError
from mtbench.experiments.choose.candidates import Candidates, candidates
from mtbench.experiments.choose.decide import decide, spent_on
from mtbench.experiments.choose.request import RaceRequest
from mtbench.experiments.choose.runner import Racing, plan_race, race_of
from mtbench.report import pipeline
from mtbench.report.document import write_report
from mtbench.report.progress import RunProgress
from mtbench.results.aggregate import assemble, read_stored
from mtbench.results.decision_format import FILE, Decision
from mtbench.results.format import Results
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import Race
from mtbench.runs.model_pool import resolve_device, with_dtype
from mtbench.runs.plan import Plan
from mtbench.runs.plan_checks import read_plan
from mtbench.runs.prompts import open_suites
from mtbench.runs.run_request import Execution
from mtbench.runs.workers import refuse
from mtbench.statistics import EPSILON_POSITIONS_NEEDED, EXACT_EPSILON


def planned(request: RaceRequest) -> tuple[Candidates, Plan, Race]:
    """Return the candidates of a race, its plan and its looks. Raises UserError if the request is wrong."""
    objective, asked = request.objective, request.run_request()
    if objective == "energy" and resolve_device(request.device) != "cuda":
        raise UserError("--objective energy needs a GPU, whose driver counts it; choose speed, latency or memory.")
    opened = open_suites(asked)
    found = candidates(asked)
    if not found.arms:
        raise UserError("there is nothing to race beside plain decoding; see `mtbench ls arms`.")
    max_loss = request.max_loss / 100
    plan = plan_race(asked, found, max_loss, opened)
    if request.dtype == "auto" and resolve_device(request.device) == "cpu" and _ungraded(plan):
        plan = plan.changed(request=plan.request.changed(dtype="float32"))
    return found, plan, race_of(plan, found, objective, max_loss, dict(request.slo))


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


def finish(run: RunDirectory, execution: Execution, progress: RunProgress) -> tuple[Results, Decision]:
    """Run what is missing of a race, decide, and write its pages. A decision from before stays until then."""
    plan, race = read_plan(run), run.read("race.json", Race)
    refuse(execution, plan.request.device)
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

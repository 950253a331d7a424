"""The plan of a race: its candidates, the plan of its run, and the looks at it."""

import math
from typing import NamedTuple

from mtbench.errors import UserError
from mtbench.experiments.choose.candidates import Candidates, candidates
from mtbench.experiments.choose.race import looks
from mtbench.experiments.choose.request import RaceRequest
from mtbench.lineup.gpu_memory import divided
from mtbench.lineup.model_sampling import with_sampling
from mtbench.lineup.planner import make_plan
from mtbench.models.auto import resolve_device
from mtbench.options import AUTO
from mtbench.plan.formats import Race
from mtbench.plan.plan import MIN_BLOCKS, Plan
from mtbench.plan.prompts import open_suites
from mtbench.records import dump
from mtbench.statistics import EPSILON_POSITIONS_NEEDED, EXACT_EPSILON


class RacePlan(NamedTuple):
    """The candidates of a race, the plan of its run, and its looks."""

    candidates: Candidates
    plan: Plan
    race: Race
    warnings: list[str]  # the suites that cannot get a verdict or a grade
    time_budget_s: float | None = None  # of this call


def plan_of(request: RaceRequest, time_budget_s: float | None = None) -> RacePlan:
    """Return the plan of a race: every candidate beside plain decoding, one round, the largest batch size first.

    The largest has all items, so the accuracies are known when the smaller sizes start. A default batch size that has
    too few blocks for an interval is left out. Raises UserError if the request is wrong.
    """
    asked = with_sampling(request.run_request())
    opened = open_suites(asked)  # a wrong file is found before a checkpoint is read
    raced = candidates(asked)
    if len(raced.lineup.arms) == 1:
        raise UserError("there is nothing to race beside plain decoding; see `mtbench ls arms`.")
    plan = make_plan(asked, opened, raced.lineup)
    small, left_out = {} if "batch_size" in request.model_fields_set else plan.too_small, list[str]()
    if enough := [group.batch_size for group in plan.groups if small and group.name not in small]:
        plan = make_plan(asked.changed(batch_size=enough), opened, raced.lineup)
        left_out = [f"{why}; it is left out" for why in small.values()]
    groups = sorted(plan.groups, key=lambda group: -group.batch_size)
    cells = [plan.cell(name) for group in groups for name in group.cells]
    plan, ungraded = _graded(plan.changed(groups=groups, cells=cells), request, within=time_budget_s is not None)
    at = {group.name: looks(len(group.blocks)) for group in groups}
    race = Race(schema_version=2, request=dump(request), slo_s=dict(request.slo), refused=raced.refused, looks=at)
    return RacePlan(raced, divided(plan), race, [*left_out, *plan.warnings(), *ungraded], time_budget_s)


def _graded(plan: Plan, request: RaceRequest, *, within: bool) -> tuple[Plan, list[str]]:
    """Return the plan, and a sentence on each suite with too few tokens to tell other tokens from rounding.

    With `--dtype auto` on a CPU such a race runs in float32, which needs no tokens for that. within: a time budget, in
    which only the blocks of a decision are certain.
    """
    dtype = plan.request.dtype
    certain = MIN_BLOCKS * max(group.batch_size for group in plan.groups) if within else math.inf
    tokens = {suite.suite: min(len(suite.items), certain) * suite.max_new_tokens for suite in plan.suites}
    few = {suite: most for suite, most in tokens.items() if most < EPSILON_POSITIONS_NEEDED}
    if dtype in EXACT_EPSILON or not few:
        return plan, []
    remedy = "raise `--limit` or `--max-new-tokens`, or give `--dtype float32`"
    if request.dtype == AUTO and resolve_device(request.device) == "cpu":
        plan, remedy = plan.changed(request=plan.request.changed(dtype="float32")), "so it runs in float32"
    bound = f"in {MIN_BLOCKS} blocks" if within else "at most"
    return plan, [
        f"{suite}: {bound} {most:,} tokens of plain decoding; {EPSILON_POSITIONS_NEEDED:,} are needed to tell other "
        f"tokens from rounding in {dtype}; {remedy}"
        for suite, most in few.items()
    ]

"""A side of an audit that is named by its method: it decodes the requests of the other side's run.

The method may be one of ours, in our loop or in a serving engine, or a server.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from mtbench.decoding.arms import parse_arms
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.experiments import pipeline
from mtbench.experiments.audit.request import AuditRequest
from mtbench.experiments.audit.sides import named, place_of
from mtbench.lineup import engine_arms
from mtbench.lineup.planner import make_plan, write_plan
from mtbench.plan.checks import read_plan
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan
from mtbench.plan.request import Execution, RunRequest
from mtbench.plan.run import Run
from mtbench.report.progress import RunProgress


def is_method(text: str) -> bool:
    """Return whether an argument is a method as `mtbench run --method` takes it, and not a file of that name."""
    name = text.partition(":")[0]
    return name in METHODS and not os.path.exists(name)


def plan(method: str, other: str, request: AuditRequest) -> Plan:
    """Return the plan of a run of `method` on the items, with the budgets and batch sizes, of the other side.

    Raises UserError if the other side is no run, or for a method that its checkpoints do not serve.
    """
    parse_arms([method])
    place = Path(place_of(other)) if not is_method(other) else None
    if place is None or not place.is_dir():
        raise UserError(
            f"{method!r} is a method: the other side must be a run, whose plan it decodes, and {other!r} is none; "
            f"`mtbench run --method {method} -o DIR` makes one."
        )
    meant = named(other, offline=request.offline).meant
    if len(arms := dict.fromkeys(side.arm for side in meant)) > 1:
        raise UserError(f"{other} has {len(arms)} arms, and {method!r} is one; name one: `{place}:{next(iter(arms))}`.")
    sizes = dict.fromkeys(side.batch_size for side in meant)
    stored = read_plan(RunDirectory.open(place, "run")).request
    changed = stored.changed(
        method=(method,),
        batch_size=tuple(size for size in sizes if size),
        rounds=1,
        time_budget_s=None,
        engine_option=(),  # a stored plan is untrusted
        offline=request.offline or stored.offline,
    )
    return make_plan(changed)


def servers_of(texts: Sequence[str]) -> set[str]:
    """Return the servers that the arguments of a command name."""
    methods = tuple(text for text in texts if is_method(text))
    return engine_arms.servers_of(RunRequest(method=methods)) if methods else set()


def decode(directory: RunDirectory, planned: Plan, servers: Sequence[str], progress: RunProgress) -> None:
    """Decode the rest of a plan. `servers`: those that it may use."""
    if not directory.has("plan.json"):
        write_plan(RunDirectory.create(directory.path), planned, [])
    with Run.locked(directory) as run:
        pipeline.finish(run, Execution.of(planned.request, servers=servers), progress)

"""The stages of a run up to its scores: generate and score; what they need of the machine and of servers.

mtbench/report/pipeline.py goes on to the report.
"""

from mtbench.decoding.arms import parse_arms, safe
from mtbench.decoding.external import ExternalEngine
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.runs.directory import RunDirectory
from mtbench.runs.executor import Progress
from mtbench.runs.executor import generate as run_plan
from mtbench.runs.model_pool import resolve_device
from mtbench.runs.run_request import Execution, PlanRequest
from mtbench.runs.score import due
from mtbench.runs.score import score as score_run
from mtbench.runs.workers import refuse as refuse_workers


def check(execution: Execution, device: str) -> None:
    """Raise UserError if this machine or cluster lacks the workers or the device."""
    refuse_workers(execution.workers, execution.ray, device)
    if execution.ray is None:
        resolve_device(device)


def servers_of(request: PlanRequest) -> set[str]:
    """Return the servers that the arms of a request ask. Raises UserError for an arm that cannot be built."""
    specs = request.method or [spec for name in METHODS for spec in METHODS[name].default_arms]
    methods = [METHODS[arm.method](**arm.options) for arm in parse_arms(specs, request.engine)]
    return {method.server for method in methods if isinstance(method, ExternalEngine) and method.server is not None}


def folder_of(request: PlanRequest) -> str:
    """Return the name that begins the default directory of a run: its suite's."""
    return safe(request.suite[0].partition(":")[0])


def refuse_race(run: RunDirectory) -> None:
    """Raise UserError for a race: a command that makes no looks would decode what has left."""
    if run.has("race.json"):
        raise UserError(f"{str(run.path)!r} is a race; go on with `mtbench choose -o {run.path} --resume`.")


def generate(run: RunDirectory, execution: Execution, progress: Progress) -> None:
    """Decode what is missing of the plan."""
    with run.locked():
        run_plan(run, progress, execution)


def score(run: RunDirectory, execution: Execution) -> None:
    """Score the stored texts."""
    with run.locked():
        score_run(run, execution.data_dir, unsandboxed=execution.allow_unsandboxed_code)


def score_if_due(run: RunDirectory, execution: Execution) -> None:
    """Score the stored texts unless the scores are those of the stored texts, or if scoring failed before."""
    if due(run):
        score(run, execution)

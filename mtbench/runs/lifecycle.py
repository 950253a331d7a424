"""The stages of a run up to its scores: plan, generate, score; and what `--resume` accepts.

mtbench/report/pipeline.py goes on to the report.
"""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtbench.decoding.arms import parse_arms, safe
from mtbench.decoding.external import ExternalEngine
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.records import dump
from mtbench.runs.directory import RunDirectory, new_directory, refuse_used
from mtbench.runs.executor import Progress
from mtbench.runs.executor import generate as run_plan
from mtbench.runs.model_pool import resolve_device
from mtbench.runs.plan import Plan
from mtbench.runs.plan_checks import read_plan
from mtbench.runs.planner import begin_run, make_plan
from mtbench.runs.run_request import Execution, RunRequest
from mtbench.runs.score import due
from mtbench.runs.score import score as score_run
from mtbench.runs.workers import refuse as refuse_workers

PER_EXECUTION = {"time_budget_s", "offline", "data_dir", "allow_unsandboxed_code"}  # `--resume` may change them
# Files of a run that stopped before its plan: an environment, temporary files (mtbench/files.py), the lock.
UNPLANNED = re.compile(r"(environment|race)\.json|\.(environment|plan|race)\.json\.[a-z0-9_]{8}\.tmp|\.lock")


def check(execution: Execution, device: str) -> None:
    """Raise UserError if this machine or cluster lacks the workers or the device."""
    refuse_workers(execution.workers, execution.ray, device)
    if execution.ray is None:
        resolve_device(device)


def servers_of(request: RunRequest) -> set[str]:
    """Return the servers that the arms of a request ask. Raises UserError for an arm that cannot be built."""
    specs = request.method or [spec for name in METHODS for spec in METHODS[name].default_arms]
    methods = [METHODS[arm.method](**arm.options) for arm in parse_arms(specs, request.engine)]
    return {method.asks for method in methods if isinstance(method, ExternalEngine) and method.asks is not None}


def default_directory(request: RunRequest) -> Path:
    """Return `runs/<suite>-<time>`."""
    suite = request.suite[0].partition(":")[0]
    return new_directory(safe(suite))


def start(directory: Path, request: RunRequest, command: Sequence[str]) -> tuple[RunDirectory, Plan]:
    """Plan a run and write its plan. Nothing is written if the request is wrong; then UserError is raised."""
    refuse_used(directory, "run")
    plan = make_plan(request)
    return begin_run(directory, plan, command), plan


def clear_unplanned(directory: Path, given: Collection[str]) -> bool:
    """Remove the files of a run that stopped before it had a plan: they hold no results. Return whether it did so.

    `given`: the options of this command. Raises UserError if there are none: nothing says what the run was to compare.
    """
    if (directory / "plan.json").exists() or not directory.is_dir():
        return False
    unplanned = list(directory.iterdir())
    if not all(UNPLANNED.fullmatch(path.name) and path.is_file() for path in unplanned):
        return False
    if not given:
        raise UserError(
            f"{str(directory)!r} holds no plan: the run stopped before it had one. Repeat the command that started it, "
            "with all its options and `--resume`."
        )
    with RunDirectory(directory).locked():
        for path in unplanned:
            path.unlink(missing_ok=True)
    return True


def reopen(directory: Path, request: RunRequest, given: Collection[str]) -> RunDirectory:
    """Open the run in `directory`. Raise UserError if a `given` field of the request differs from its plan."""
    run = RunDirectory.open(directory)
    refuse_race(run)
    stored, asked = dump(read_plan(run).request), dump(request)
    for name in changed(stored, asked, set(given) - PER_EXECUTION):
        raise UserError(
            f"the run in {str(directory)!r} has {name}={stored[name]!r}, not {asked[name]!r}; resume it with "
            f"`mtbench run -o {directory} --resume`, or start another run in a new directory."
        )
    return run


def refuse_race(run: RunDirectory) -> None:
    """Raise UserError for a race: a command that makes no looks would decode what has left."""
    if run.has("race.json"):
        raise UserError(f"{str(run.path)!r} is a race; go on with `mtbench choose -o {run.path} --resume`.")


def changed(stored: Mapping[str, Any], asked: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return which of the named options differ, once both are written as JSON (where tuples are lists)."""
    before, now = (json.loads(json.dumps(dict(options))) for options in (stored, asked))
    return [name for name in sorted(names) if before[name] != now[name]]


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

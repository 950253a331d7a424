"""The stages of a run up to its scores: plan, generate, score; and what `--resume` accepts.

mtbench/report/pipeline.py goes on to the report.
"""

import json
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtbench.decoding.arms import safe
from mtbench.errors import UserError
from mtbench.records import dump
from mtbench.runs.directory import RunDirectory
from mtbench.runs.executor import Progress
from mtbench.runs.executor import generate as run_plan
from mtbench.runs.model_pool import resolve_device
from mtbench.runs.plan import Plan, read_plan
from mtbench.runs.planner import begin_run, make_plan
from mtbench.runs.run_request import Execution, RunRequest
from mtbench.runs.score import due
from mtbench.runs.score import score as score_run
from mtbench.runs.workers import refuse as refuse_workers

PER_EXECUTION = {"time_budget_s", "offline", "data_dir", "allow_unsandboxed_code"}  # `--resume` may change them
UNPLANNED = ("environment.json", ".environment.json.", ".plan.json.")  # files of a run that stopped before its plan


def check(execution: Execution, device: str) -> None:
    """Raise UserError if this machine or cluster lacks the workers or the device."""
    refuse_workers(execution.workers, execution.ray, device)
    if execution.ray is None:
        resolve_device(device)


def default_directory(request: RunRequest) -> Path:
    """Return `runs/<suite>-<time>`."""
    suite = request.suite[0].partition(":")[0]
    return Path("runs") / f"{safe(suite)}-{time.strftime('%Y%m%d-%H%M%S')}"


def refuse_existing(directory: Path) -> None:
    """Raise UserError if the directory holds something."""
    if directory.exists():
        RunDirectory.create(directory)


def start(directory: Path, request: RunRequest, command: Sequence[str]) -> tuple[RunDirectory, Plan]:
    """Plan a run and write its plan. Nothing is written if the request is wrong; then UserError is raised."""
    refuse_existing(directory)
    plan = make_plan(request)
    return begin_run(directory, plan, command), plan


def clear_unplanned(directory: Path) -> bool:
    """Remove the files of a run that stopped before it had a plan: they hold no results. Return whether it did so."""
    if (directory / "plan.json").is_file() or not directory.is_dir():
        return False
    files = list(directory.iterdir())
    if not all(path.name.startswith(UNPLANNED) for path in files):
        return False
    for path in files:
        path.unlink()
    return True


def reopen(directory: Path, request: RunRequest, given: Collection[str]) -> RunDirectory:
    """Open the run in `directory`. Raise UserError if a `given` field of the request differs from its plan."""
    run = RunDirectory.open(directory)
    stored, asked = dump(read_plan(run).request), dump(request)
    for name in changed(stored, asked, set(given) - PER_EXECUTION):
        raise UserError(
            f"the run in {str(directory)!r} has {name}={stored[name]!r}, not {asked[name]!r}; resume it with "
            f"`mtbench run -o {directory} --resume`, or start another run in a new directory."
        )
    return run


def changed(stored: Mapping[str, Any], asked: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return which of the named options differ, once both are written as JSON (where tuples are lists)."""
    before, now = (json.loads(json.dumps(dict(options))) for options in (stored, asked))
    return [name for name in sorted(names) if before[name] != now[name]]


def generate(run: RunDirectory, execution: Execution, progress: Progress) -> None:
    """Decode what is missing of the plan."""
    run_plan(
        run,
        progress,
        execution.time_budget_s,
        execution.workers,
        execution.ray,
        execution.data_dir,
        peak_memory_on_cpu=execution.peak_memory,
    )


def score(run: RunDirectory, execution: Execution) -> None:
    """Score the stored texts."""
    score_run(run, execution.data_dir, unsandboxed=execution.allow_unsandboxed_code)


def score_if_due(run: RunDirectory, execution: Execution) -> None:
    """Score the stored texts if some are new, or if scoring failed before."""
    if due(run):
        score(run, execution)

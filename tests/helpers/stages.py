"""The stages of a run as commands of their own: each opens the directory, as another process would."""

from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from mtbench.experiments import pipeline
from mtbench.lineup.planner import write_plan
from mtbench.measure import executor
from mtbench.measure import score as scoring
from mtbench.plan import prompts
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Plan
from mtbench.plan.run import Run
from mtbench.report import document
from mtbench.results import aggregate

P = ParamSpec("P")
T = TypeVar("T")


def begin_run(path: Path, plan: Plan, command: Sequence[str] = ("mtbench",)) -> RunDirectory:
    """Create a run directory that holds the plan."""
    run = RunDirectory.create(path)
    write_plan(run, plan, command)
    return run


def _opening(stage: Callable[Concatenate[Run, P], T]) -> Callable[Concatenate[RunDirectory, P], T]:
    @wraps(stage)
    def opened(directory: RunDirectory, /, *given: P.args, **named: P.kwargs) -> T:
        with Run.locked(directory) as run:
            return stage(run, *given, **named)

    return opened


open_plan = _opening(prompts.open_plan)
generate = _opening(executor.generate)
score, due = _opening(scoring.score), _opening(scoring.due)
read_stored, assemble = _opening(aggregate.read_stored), _opening(aggregate.assemble)
write_report = _opening(document.write_report)
finish, report = _opening(pipeline.finish), _opening(pipeline.report)

"""The frame of the commands that measure: options, directory, lock, start, resumption, deadline.

An **experiment** is a request, a plan, stored lines, results, and pages. A subclass defines these, and
this file does the rest for the command line (mtbench/cli/experiments.py) and the library (mtbench/api.py).
"""

import os
import re
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from rich.console import RenderableType

from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.options.fields import AUTO, fields_of, flag_of, option_of, read_options
from mtbench.plan.directory import RunDirectory, new_directory, refuse_used
from mtbench.plan.request import Session
from mtbench.records import Record, dump
from mtbench.report.progress import RunProgress

R = TypeVar("R", bound=Record)
S = TypeVar("S", bound=Session)
P = TypeVar("P")
F = TypeVar("F")
# Files left by a run that stopped before its plan was written: beginnings of plans, temporary files, the lock.
UNPLANNED = re.compile(r"(environment|race|plan)\.json|\.[a-z]+\.json\.[a-z0-9_]{8}\.tmp|\.lock")
started: list[Path] = []  # directories of this process; the message on interruption names the last one


@dataclass(frozen=True, kw_only=True)
class Job(Generic[R, S]):
    """An experiment in its directory.

    `request`: the stored request, with the changes that this command may make. `requested`: that of this command.
    `plan`: what this command has made, or what `stored` has read. `began`: when this command began, and its time budget
    with it, by time.monotonic. `new`: this command made it.
    """

    directory: RunDirectory
    request: R
    requested: R
    session: S
    plan: Any
    console: Terminal  # progress and notes
    began: float
    new: bool

    @property
    def path(self) -> Path:
        return self.directory.path

    @property
    def deadline(self) -> float:
        """The end of the time budget, by time.monotonic."""
        budget_s = getattr(self.session, "time_budget_s", getattr(self.request, "time_budget_s", None))
        return float("inf") if budget_s is None else self.began + budget_s

    def note(self, text: Any) -> None:
        """Print one line beside the results."""
        self.console.say(text)

    def progress(self) -> RunProgress:
        return RunProgress(self.console)


class Experiment(ABC, Generic[R, S, P, F]):
    """A command that measures: R its request, S the options of one call, P its plan, F its findings.

    A request or a plan that is wrong raises UserError; then nothing is written.
    """

    command: ClassVar[str]  # its name after `mtbench`
    begun_by: ClassVar[str]  # this file is written last: with it, the experiment has begun
    result: ClassVar[str]  # the JSON file with its findings
    page: ClassVar[str]  # the file that a person opens
    request: type[R]
    session: type[S]

    @abstractmethod
    def plan(self, request: R, session: S) -> P:
        """Return the plan. A request that cannot succeed fails here."""

    @abstractmethod
    def begin(self, directory: RunDirectory, planned: P, argv: Sequence[str]) -> None:
        """Write the files that `--resume` needs. The directory is locked and empty."""

    @abstractmethod
    def stored(self, directory: Path) -> Any:
        """Return the stored plan, with the `request`."""

    @abstractmethod
    def run(self, job: Job[R, S]) -> F:
        """Do what is missing, write the results and the page. A killed run can be resumed at any point."""

    @abstractmethod
    def show(self, job: Job[R, S], findings: F, console: Terminal) -> None:
        """Print the findings."""

    def folder(self, request: R) -> str:
        """Return the name that begins the default directory."""
        return self.command

    def listing(self, request: R) -> list[RenderableType]:
        """Return the list to print for a request that names nothing to do."""
        return []

    def headline(self, planned: P, given: Collection[str]) -> str | None:
        """Return a plan in one line. `given`: the options of this command."""
        return None

    def warnings(self, planned: P) -> list[str]:
        """Return the known limits of the results."""
        return []

    def dry_run(self, planned: P, given: Collection[str], console: Terminal, notes: Terminal) -> None:
        """Print the plan without running it."""
        raise UserError(f"`mtbench {self.command}` has no --dry-run.")

    def exit_code(self, findings: F, session: S) -> int:
        """Return the exit code."""
        return 0

    def decided(self, directory: Path) -> bool:
        """Return whether a directory must be kept when this command is refused."""
        return True


def begin(
    experiment: Experiment[R, S, P, F],
    given: Mapping[str, Any],
    session: S,
    console: Terminal,
    warn: Callable[[str], None],
    argv: Sequence[str],
    began: float | None = None,
) -> Job[R, S]:
    """Return a new job, or with `resume` the one in its directory.

    `given`: the options of the request. `began`: when the command began, by time.monotonic; None: now.
    """
    began = time.monotonic() if began is None else began
    request = _read(experiment, given)
    job = partial(Job[R, S], requested=request, session=session, console=console, began=began)
    if session.resume:
        directory = _resumed_directory(experiment, session.out, given)
        if directory is not None:
            stored = experiment.stored(directory)
            agreed = _agreed(experiment, directory, stored, request, session, given)
            started.append(directory)
            return job(directory=RunDirectory(directory), request=agreed, plan=stored, new=False)
    path = new_directory(experiment.folder(request)) if session.out is None else Path(session.out)
    refuse_used(path, experiment.command)
    planned = experiment.plan(request, session)
    run = RunDirectory.create(path)
    with run.locked():
        refuse_used(path, experiment.command)  # another command may have filled it before this one had the lock
        experiment.begin(run, planned, argv)
    started.append(path)
    if (line := experiment.headline(planned, given.keys())) is not None:
        console.say(line)
    for warning in experiment.warnings(planned):
        warn(warning)
    return job(directory=run, request=request, plan=planned, new=True)


def carry_out(experiment: Experiment[R, S, P, F], job: Job[R, S]) -> F:
    """Do what is missing. A refusal before anything was measured leaves nothing behind."""
    try:
        with job.directory.locked():
            return experiment.run(job)
    except UserError:
        if job.new and not experiment.decided(job.path):
            started.remove(job.path)
            _empty(job.path)
            with suppress(OSError):  # something new is in it
                job.path.rmdir()
                if job.session.out is None:
                    job.path.parent.rmdir()
        raise


def dry_run(
    experiment: Experiment[R, S, P, F], given: Mapping[str, Any], session: S, console: Terminal, notes: Terminal
) -> None:
    """Print the plan."""
    request = _read(experiment, given)
    if session.resume:
        raise UserError("--dry-run plans anew, and --resume goes on with a plan; leave one of them out.")
    if session.out is not None:
        refuse_used(Path(session.out), experiment.command)
    experiment.dry_run(experiment.plan(request, session), given.keys(), console, notes)


def _read(experiment: Experiment[R, S, P, F], given: Mapping[str, Any]) -> R:
    """Return the request, with the defaults that depend on other options. Raises UserError for a wrong value."""
    request = read_options(given, experiment.request, f"mtbench {experiment.command} --help")
    completed: R = request.completed() if hasattr(request, "completed") else request
    return completed


def _resumed_directory(experiment: Experiment[R, S, P, F], out: str | None, given: Collection[str]) -> Path | None:
    """Return the directory to resume; None if the stopped run had not begun, so that it starts again."""
    command = experiment.command
    if out is None:
        raise UserError(f"--resume needs the directory: `mtbench {command} -o DIR --resume`.")
    directory = Path(out)
    RunDirectory(directory).refuse_other(command)
    if os.path.isfile(directory / experiment.begun_by):
        return directory
    there = os.path.isdir(directory)
    left = [path for path in directory.rglob("*") if not path.is_dir()] if there else []
    if not there or not all(UNPLANNED.fullmatch(path.name) and path.is_file() for path in left):
        raise UserError(
            f"{out!r} holds nothing of `mtbench {command}`: it has no {experiment.begun_by}. Start without --resume."
        )
    if not given:
        raise UserError(
            f"{out!r} has no {experiment.begun_by}: the command stopped before it had one. Repeat the command that "
            "started it, with all its options and `--resume`."
        )
    with RunDirectory(directory).locked():
        _empty(directory)
    return None


def _agreed(
    experiment: Experiment[R, S, P, F], directory: Path, stored: Any, requested: R, session: S, given: Collection[str]
) -> R:
    """Return the request of a job with this command's changes. Raises UserError for a change that is not allowed."""
    kinds = experiment.request, experiment.session
    fields = {name: field for kind in kinds for name, field in fields_of(kind).items()}
    fixed = sorted(name for name in {*given, *session.model_fields_set} if not option_of(fields[name]).resumable)
    again = f"go on with `mtbench {experiment.command} -o {directory} --resume`"
    before, now = dump(stored.request), dump(requested)
    for name in fixed:
        if name not in before:
            raise UserError(f"a resumed {experiment.command} keeps {flag_of(name, fields[name])}; {again}.")
        if now[name] != AUTO and _plain(before[name]) != _plain(now[name]):  # `auto`: the plan has decided
            raise UserError(
                f"{str(directory)!r} has {name}={before[name]!r}, not {now[name]!r}; {again}, or start anew in "
                "another directory."
            )
    changed = {name for name in before if name in fields and option_of(fields[name]).resumable and name in given}
    changed |= {name for name in before if name in fields and option_of(fields[name]).permission}
    agreed: R = stored.request.changed(**{name: getattr(requested, name) for name in changed})
    return agreed


def _plain(value: Any) -> Any:
    return [*value] if isinstance(value, tuple) else value


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

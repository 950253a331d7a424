"""Run `mtbench plan` and `mtbench generate` of a build as processes of their own. Their files are the result.

A process of a build leads a process group. The group ends with it, or with the gate: no process of a build runs on
beside the next one, whose times it would spoil.
"""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mtbench import files
from mtbench.errors import UserError
from mtbench.experiments.gate.builds import Build, environment_of
from mtbench.programs.processes import kill_group, last_line, launched
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import FailureLine, GenerationLine, MemoryRecord, TimingLine

READY = b"ready"  # that `mtbench generate --turns` prints before every block
LONGEST_LINE = 1000  # bytes of standard output that are read at once


class BuildFailed(Exception):
    """A process of a build ended wrongly or wrote what cannot be read. The message says how, in one line."""

    def __init__(self, build: Build, how: str) -> None:
        self.build = build
        super().__init__(how)


class Process(subprocess.Popen[bytes]):
    """A process of a build. `overdue`: it was killed because it took too long."""

    overdue = False

    @contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """Kill the process if the block takes longer."""

        def end() -> None:
            self.overdue = True
            kill_group(self)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def make_plan(build: Build, arguments: Sequence[str], directory: Path, limit_s: float) -> None:
    """Let a build plan a run in `directory`. Raises BuildFailed, also if it takes longer than `limit_s`."""
    with _started(build, "mtbench plan", ["plan", *arguments, "-o", str(directory)], _log(directory), limit_s):
        pass


def generate(build: Build, run: RunDirectory, *, timed_only: bool, limit_s: float) -> None:
    """Let a build decode a plan. A cell that fails is stored in the run.

    Raises BuildFailed if the process fails, takes longer than `limit_s`, or writes files that cannot be read.
    """
    with _generating(build, run, timed_only=timed_only, limit_s=limit_s):
        pass


def generate_in_turns(builds: Sequence[Build], runs: Sequence[RunDirectory], first: int, limit_s: float) -> None:
    """Let two builds decode the same plan side by side: one block of one, then the same block of the other.

    Who begins changes with every block; `first` (0 or 1) begins the first one. Raises BuildFailed, also if a process
    takes longer than `limit_s` for a turn; of two that fail, it names base.
    """
    base, head = (
        _generating(build, run, timed_only=True, turns=True, limit_s=limit_s)
        for build, run in zip(builds, runs, strict=True)
    )
    with head as of_head, base as of_base:  # what ends the inner block is told
        processes = [of_base, of_head]
        waiting = [_is_ready(process, limit_s) for process in processes]
        while any(waiting):
            for place in (first, 1 - first):
                if waiting[place]:
                    _give_turn(processes[place])
                    waiting[place] = _is_ready(processes[place], limit_s)
            first = 1 - first


@contextmanager
def _generating(
    build: Build, run: RunDirectory, *, timed_only: bool, turns: bool = False, limit_s: float
) -> Iterator[Process]:
    arguments = ["generate", str(run.path)]
    arguments += ["--timed-only"] if timed_only else ["--peak-memory"]
    arguments += ["--turns"] if turns else []
    what = "mtbench generate"
    with _started(build, what, arguments, _log(run.path), limit_s, failing=run, turns=turns) as process:
        yield process
    try:
        _read_all(run)
    except UserError as error:
        raise BuildFailed(build, f"{what} of {build.label} wrote what cannot be read: {error}".rstrip(".")) from None


def _read_all(run: RunDirectory) -> None:
    """Read every file that a build wrote into a run. Raises UserError for one that is malformed."""
    run.read_lines("failures.jsonl", FailureLine)
    if run.has("memory.json"):
        run.read("memory.json", MemoryRecord)
    for folder, kind in (("generations", GenerationLine), ("timings", TimingLine)):
        for file in sorted((run.path / folder).glob("*.jsonl")):
            run.read_lines(f"{folder}/{file.name}", kind)


@contextmanager
def _started(
    build: Build,
    what: str,
    arguments: Sequence[str],
    log: Path,
    limit_s: float,
    failing: RunDirectory | None = None,
    turns: bool = False,
) -> Iterator[Process]:
    """Start a process of a build; wait for it at the end of the block, or kill it if an exception leaves the block.

    `failing`: a run whose failed cells explain exit code 1. `turns`: its standard input and output are pipes. Raises
    BuildFailed if it ends wrongly, or not within `limit_s` after the end of the block.
    """
    pipe = subprocess.PIPE if turns else subprocess.DEVNULL
    with files.write_errors(log):
        errors = log.open("wb")
    with errors:
        try:
            process = Process(
                launched(build.command(*arguments)),
                env=environment_of(build),
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{what} of {build.label} cannot be started: {error.strerror or error}.") from None
        watch = threading.Thread(target=_end_children, args=(process,), daemon=True)
        try:
            watch.start()
            yield process
            with process.limited(limit_s):
                watch.join()
        finally:
            kill_group(process)
            watch.join()
            code = process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # a turn that the process did not live to read
                        stream.close()
    explained = code == 1 and failing is not None and failing.read_lines("failures.jsonl", FailureLine)
    if code and not explained:
        said = last_line(log)
        ended = f"did not go on within {limit_s:,.0f} s" if process.overdue else _ended(code)
        raise BuildFailed(build, f"{what} of {build.label} {ended}" + (f": {said}" if said else ""))


def _ended(code: int) -> str:
    return f"was killed by signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"ended with exit code {code}"


def _end_children(process: Process) -> None:
    """Wait until a process has ended, then kill what it left alive. It is not reaped: its id stays its own."""
    with suppress(ChildProcessError):  # an interrupt ended `Thread.join`, and its group was killed and it was reaped
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        kill_group(process)


def _is_ready(process: Process, limit_s: float) -> bool:
    """Wait until the process asks for its turn; return False if it ends instead, or is killed after `limit_s`."""
    stream = process.stdout
    assert stream is not None
    with process.limited(limit_s):
        return any(line.strip() == READY for line in iter(lambda: stream.readline(LONGEST_LINE), b""))


def _give_turn(process: Process) -> None:
    """Let the process go on. One that has ended needs no turn; its exit code says why."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), b"\n")


def _log(directory: Path) -> Path:
    """Return where the standard error of a process goes: beside its run directory."""
    with files.write_errors(directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
    return directory.parent / f"{directory.name}.log"

"""Run `mtbench plan` and `mtbench generate` of a build as processes of their own. Their files are the result."""

import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from mtbench.errors import printable
from mtbench.gate.builds import Build, environment_of
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import FailureLine

READY = "ready"  # that `mtbench generate --turns` prints before every block
LONGEST_ERROR = 300  # characters of a build's message that are repeated


class BuildFailed(Exception):
    """A process of a build ended wrongly. The message says how, in one line."""

    def __init__(self, build: Build, what: str, code: int, log: Path) -> None:
        self.build, self.code = build, code
        ended = f"was killed by {_signal(-code)}" if code < 0 else f"ended with exit code {code}"
        said = _last_line(log)
        super().__init__(f"{what} of {build.label} {ended}" + (f": {said}" if said else ""))


def make_plan(build: Build, arguments: Sequence[str], directory: Path) -> None:
    """Let a build plan a run in `directory`. Raises BuildFailed."""
    with _started(build, "mtbench plan", ["plan", *arguments, "-o", str(directory)], _log(directory)):
        pass


def generate(build: Build, run: RunDirectory, *, timed_only: bool) -> None:
    """Let a build decode a plan. A cell that fails is stored in the run; raises BuildFailed if the process fails."""
    with _generating(build, run, timed_only=timed_only):
        pass


def generate_in_turns(builds: Sequence[Build], runs: Sequence[RunDirectory], first: int) -> None:
    """Let two builds decode the same plan side by side: one block of one, then the same block of the other.

    Who begins changes with every block; `first` (0 or 1) begins the first one. Raises BuildFailed.
    """
    with (
        _generating(builds[0], runs[0], timed_only=True, turns=True) as one,
        _generating(builds[1], runs[1], timed_only=True, turns=True) as other,
    ):
        processes = [one, other]
        waiting = [_is_ready(process) for process in processes]
        while any(waiting):
            for place in (first, 1 - first):
                if waiting[place]:
                    _give_turn(processes[place])
                    waiting[place] = _is_ready(processes[place])
            first = 1 - first


@contextmanager
def _generating(
    build: Build, run: RunDirectory, *, timed_only: bool, turns: bool = False
) -> Iterator[subprocess.Popen[str]]:
    arguments = ["generate", str(run.path)]
    arguments += ["--timed-only"] if timed_only else ["--peak-memory"]
    arguments += ["--turns"] if turns else []
    arguments += ["--server", build.url] if build.url else []
    with _started(build, "mtbench generate", arguments, _log(run.path), failing=run) as process:
        yield process


@contextmanager
def _started(
    build: Build, what: str, arguments: Sequence[str], log: Path, failing: RunDirectory | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start a process of a build and wait for its end. Raises BuildFailed if it ends wrongly.

    What it prints is read, so that it never waits for a reader. An exception in the block kills it.
    `failing`: a run whose failed cells explain exit code 1.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(
            build.command(*arguments),
            env=environment_of(build),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield process
            _drain(process.stdout)
            code = process.wait()
        except BaseException:
            process.kill()
            raise
        finally:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with suppress(BrokenPipeError):  # a turn that the process did not live to read
                        stream.close()
            process.wait()
    explained = code == 1 and failing is not None and failing.read_lines("failures.jsonl", FailureLine)
    if code and not explained:
        raise BuildFailed(build, what, code, log)


def _is_ready(process: subprocess.Popen[str]) -> bool:
    """Wait until the process asks for its turn; return False if it ends instead."""
    assert process.stdout is not None
    return any(line.strip() == READY for line in iter(process.stdout.readline, ""))


def _give_turn(process: subprocess.Popen[str]) -> None:
    """Let the process run a block. If it has died meanwhile, its end is found when its output is read."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write("\n")
        process.stdin.flush()


def _drain(stream: IO[str] | None) -> None:
    for _ in stream or ():
        pass


def _log(directory: Path) -> Path:
    """Return where the standard error of a process goes: beside its run directory."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    return directory.parent / f"{directory.name}.log"


def _last_line(log: Path) -> str:
    """Return the last line that a process wrote to standard error."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").strip().splitlines()
    return printable(lines[-1].strip())[:LONGEST_ERROR].rstrip(".") if lines else ""


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

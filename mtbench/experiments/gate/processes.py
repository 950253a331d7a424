"""Run `mtbench plan` and `mtbench generate` of a build as processes of their own. Their files are the result.

No process of a build, and no child of it, runs beside the next one, whose times it would disturb.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mtbench import files
from mtbench.errors import UserError
from mtbench.experiments.gate.builds import Build
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import FailureLine, GenerationLine, MemoryRecord, TimingLine
from mtbench.programs.processes import LOOK_S, has_ended, last_line, started

READY = b"ready"  # that `mtbench generate --turns` prints before every block
READ = 1 << 16  # bytes of standard output that are read at once


class BuildFailed(Exception):
    """A process of a build failed or wrote an unreadable file. The message says how, in one line."""

    def __init__(self, build: Build, how: str) -> None:
        self.build = build
        super().__init__(how)


class _Overdue(Exception):
    """A process, the argument, exceeded its time."""


def make_plan(build: Build, arguments: Sequence[str], directory: Path, limit_s: float) -> None:
    """Let a build plan a run in `directory`. Raises BuildFailed, also if it takes longer than `limit_s`."""
    with _started(build, ["plan", *arguments, "-o", str(directory)], directory, limit_s):
        pass


def generate(build: Build, run: RunDirectory, *, timed_only: bool, limit_s: float) -> None:
    """Let a build decode a plan. A cell that fails is stored in the run.

    Raises BuildFailed if the process fails, takes longer than `limit_s`, or writes files that cannot be read.
    """
    only = "--timed-only" if timed_only else "--peak-memory"
    with _started(build, [*_generate(run), only], run.path, limit_s):
        pass
    _read_all(build, run)


def _generate(run: RunDirectory) -> list[str]:
    """Return the command that decodes a plan. The gate has made it, so it may give engines options of their own."""
    request = json.loads((run.path / "plan.json").read_text(encoding="utf-8"))["request"]
    return ["generate", str(run.path), *(f"--engine-option={text}" for text in request.get("engine_option", ()))]


def generate_in_turns(builds: Sequence[Build], runs: Sequence[RunDirectory], first: int, limit_s: float) -> None:
    """Let two builds decode the same plan side by side: one block of one, then the same block of the other.

    The builds begin blocks in turn; `first` (0 or 1) begins the first one. Raises BuildFailed, also if a process
    takes longer than `limit_s` for a turn; of two that fail, it names base.
    """
    base, head = (
        _started(build, [*_generate(run), "--timed-only", "--turns"], run.path, limit_s)
        for build, run in zip(builds, runs, strict=True)
    )
    with head as of_head, base as of_base:  # the inner block's error is reported
        processes = [of_base, of_head]
        waiting = [_is_ready(process, limit_s) for process in processes]
        while any(waiting):
            for place in (first, 1 - first):
                if waiting[place]:
                    _give_turn(processes[place])
                    waiting[place] = _is_ready(processes[place], limit_s)
            first = 1 - first
    for build, run in zip(builds, runs, strict=True):
        _read_all(build, run)


def _read_all(build: Build, run: RunDirectory) -> None:
    """Read every file that a build wrote into a run. Raises BuildFailed for one that is malformed."""
    try:
        run.read_lines("failures.jsonl", FailureLine)
        if run.has("memory.json"):
            run.read("memory.json", MemoryRecord)
        for folder, kind in (("generations", GenerationLine), ("timings", TimingLine)):
            for file in sorted((run.path / folder).glob("*.jsonl")):
                run.read_lines(f"{folder}/{file.name}", kind)
    except UserError as error:
        how = f"mtbench generate of {build.label} wrote what cannot be read: {error}"
        raise BuildFailed(build, how.rstrip(".")) from None


@contextmanager
def _started(
    build: Build, arguments: Sequence[str], directory: Path, limit_s: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of a build; wait for it at the end of the block, or kill it if an exception leaves the block.

    With `--turns` its standard input and output are pipes. Raises BuildFailed if it ends wrongly, or not within
    `limit_s` after the end of the block. Failed cells in its run `directory` explain exit code 1.
    """
    log, turns = directory.with_name(f"{directory.name}.log"), "--turns" in arguments
    with files.write_errors(directory.parent):
        directory.parent.mkdir(parents=True, exist_ok=True)
    how = ""
    try:
        with started(build.command(*arguments), build.variables, log, Path.cwd(), pipes=turns) as process:
            yield process
            if not has_ended(process, limit_s):
                raise _Overdue(process)
    except _Overdue as overdue:
        if overdue.args[0] is not process:
            raise
        how = f"did not go on within {limit_s:,.0f} s"
    code = process.returncode
    if code and not (code == 1 and (directory / "failures.jsonl").is_file()):
        reason = last_line(log)
        what = f"mtbench {arguments[0]} of {build.label} {how or _ended(code)}"
        raise BuildFailed(build, what + (f": {reason}" if reason else ""))


def _ended(code: int) -> str:
    return f"was killed by signal {-code}, {signal.strsignal(-code)}" if code < 0 else f"ended with exit code {code}"


def _is_ready(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait until the process requests its turn; return False if it ends instead. Raises _Overdue after `limit_s`."""
    assert process.stdout is not None
    output, deadline = b"", time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if select.select([process.stdout], [], [], LOOK_S)[0]:
            part = os.read(process.stdout.fileno(), READ)
            output = (output + part)[-READ:]
            if READY in output.splitlines():
                return True
            if not part and has_ended(process, deadline - time.monotonic()):
                return False
        elif has_ended(process):
            return False
    raise _Overdue(process)


def _give_turn(process: subprocess.Popen[bytes]) -> None:
    """Let the process continue. An ended process needs no turn; its exit code says why."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), b"\n")

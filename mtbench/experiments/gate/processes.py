"""Run `mtbench plan` and `mtbench generate` of a build as processes of their own. Their files are the result.

No process of a build, and no child of it, runs beside the next one, whose times it would disturb.
"""

import json
import os
import select
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mtbench import files
from mtbench.experiments.gate.builds import Build
from mtbench.plan.directory import RunDirectory
from mtbench.programs.processes import LOOK_S, has_ended, last_line, started

READY = b"ready"  # that `mtbench generate --turns` prints before every block
READ = 1 << 16  # bytes of standard output that are read at once


class BuildFailed(Exception):
    """A process of a build failed. The message says how, in one line."""

    def __init__(self, build: Build, how: str) -> None:
        self.build = build
        super().__init__(how)


def make_plan(build: Build, arguments: Sequence[str], directory: Path, limit_s: float) -> None:
    """Let a build plan a run in `directory`. Raises BuildFailed, also if it takes longer than `limit_s`."""
    with _started(build, ["plan", *arguments, "-o", str(directory)], directory, limit_s):
        pass


def generate(build: Build, run: RunDirectory, *, timed_only: bool, limit_s: float) -> None:
    """Let a build decode a plan. A cell that fails is stored in the run.

    Raises BuildFailed if the process fails, or takes longer than `limit_s`.
    """
    only = "--timed-only" if timed_only else "--peak-memory"
    with _started(build, [*_generate(run), only], run.path, limit_s):
        pass


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
        waiting = list(map(_is_ready, builds, processes, (limit_s, limit_s)))
        while any(waiting):
            for place in (first, 1 - first):
                if waiting[place]:
                    _give_turn(processes[place])
                    waiting[place] = _is_ready(builds[place], processes[place], limit_s)
            first = 1 - first


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
    with started(build.command(*arguments), build.variables, log, Path.cwd(), pipes=turns) as process:
        yield process
        if not has_ended(process, limit_s):
            raise _overdue(build, limit_s)
    code = process.returncode
    if code and not (code == 1 and (directory / "failures.jsonl").is_file()):
        raise BuildFailed(
            build, f"mtbench {arguments[0]} of {build.label} ended with exit code {code}: {last_line(log)}"
        )


def _overdue(build: Build, limit_s: float) -> BuildFailed:
    return BuildFailed(build, f"mtbench of {build.label} did not go on within {limit_s:,.0f} s")


def _is_ready(build: Build, process: subprocess.Popen[bytes], limit_s: float) -> bool:
    """Wait until the process requests its turn; return False if it ends instead. Raises BuildFailed after `limit_s`."""
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
    raise _overdue(build, limit_s)


def _give_turn(process: subprocess.Popen[bytes]) -> None:
    """Let the process continue. An ended process needs no turn; its exit code says why."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        os.write(process.stdin.fileno(), b"\n")

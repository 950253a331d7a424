"""Run steps in processes of their own, and read what they found: an error, a hang or a crash ends one step only.

A step writes what it finds to DIR/NAME.json while it runs, and prints into DIR/logs/. Nothing here imports torch: a
second process on the GPU would make every timed batch a shared one.
"""

import fcntl
import json
import os
import re
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu_parts.figures import Figure
from mtbench import files
from mtbench.errors import UserError, first_line
from mtbench.programs import processes

RESERVE_S = 6.0  # of a step's time, for what follows its last measurement
GRACE_S = 3.0  # between SIGTERM and SIGKILL
LOOK_S = 0.1  # between two looks at what a process has done
CANNOT_RUN = 2  # exit code of a process that says that no step can run here
INNERMOST = re.compile(r'most recent call first\):\s+File "([^"]+)", line (\d+) in (\w+)')  # faulthandler

Found = dict[str, Any]


def file_of(out: Path, name: str) -> Path:
    """Return the file of a step."""
    return out / f"{name}.json"


def read(file: Path) -> Found:
    """Return the contents of a file; empty without one. Raises UserError for one that this script did not write."""
    try:
        return dict(json.loads(file.read_text())) if file.exists() else {}
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}); remove it, or choose another --out.") from None


def write(file: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    files.write_text(file, json.dumps(value, indent=1, default=str) + "\n")


class StepFile:
    """The file of the step that runs in this process. Each result and each message is written at once."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def begin(self, step: str, limit_s: float) -> None:
        """Begin a step. `limit_s`: when it is ended by force; `deadline` comes before."""
        self.began_at, self.step = time.monotonic(), _begun(step)
        self.deadline = self.began_at + max(limit_s - RESERVE_S, limit_s / 2)
        self.save()

    def end(self, reason: str | None) -> None:
        """End the step. `reason`: why it ended early."""
        self.step |= {"ended": reason, "wall_s": time.monotonic() - self.began_at}
        self.save()

    def save(self) -> None:
        write(file_of(self.out, self.step["step"]), self.step)

    def keep(self, name: str, value: Any) -> None:
        """Store a result."""
        self.step["found"][name] = value
        self.save()

    def say(self, text: str) -> None:
        """Add to the line of the step."""
        self.step["said"] += f"; {text}" if self.step["said"] else text
        self.save()
        print(f"  {text}", flush=True)

    def in_time(self, done: str) -> None:
        """Raise TimeoutError if the step's time is over. `done`: what it has by then."""
        if time.monotonic() > self.deadline:
            raise TimeoutError(f"its time ended after {done}")


def _begun(step: str) -> Found:
    """Return what a step's file has first. It has ended once `wall_s` is set; `ended`: why it did so early."""
    keys: Found = {"step": step, "started": processes.utc_now(), "said": "", "ended": "it was cut off", "wall_s": None}
    return keys | {"found": {}, "figures": []}


def is_complete(found: Found) -> bool:
    """Return whether a step ran to its end."""
    return bool(found) and found.get("ended", "") is None


def command(
    out: Path, name: str, words: Sequence[str], variables: Mapping[str, str], limit_s: float, result: Path
) -> Found:
    """Run a command of mtbench; keep what it prints, and when the first block was in its run directory, if it has one.

    `result`: a file that it has written if it did its work. Exit codes 1 and 3 are such findings, too.
    """
    log, began_at, block_s = _log(out, name), time.monotonic(), None
    with processes.started(words, variables, log, Path.cwd(), grace_s=GRACE_S) as process:
        while not (in_time := processes.has_ended(process, LOOK_S)) and time.monotonic() - began_at < limit_s:
            if not block_s and any(lines.stat().st_size for lines in result.parent.glob("timings/*.jsonl")):
                block_s = time.monotonic() - began_at
    code, said, wall_s = process.returncode, processes.last_line(log), time.monotonic() - began_at
    if block_s:
        said = f"first block after {block_s:.1f} s, all after {wall_s:.1f} s; {said}"
    kept = {"first_block_s": block_s, "exit_code": code, "printed": log.read_text().splitlines()}
    ended = None if in_time and code in (0, 1, 3) and result.exists() else _why(code, log, in_time, limit_s)
    found = _begun(name) | {"said": "" if said == ended else said, "ended": ended, "wall_s": wall_s, "found": kept}
    write(file_of(out, name), found)
    return found


def measured(out: Path, found: Found, figures: Sequence[Figure], said: str, *, toy: bool) -> Found:
    """Add its figures and its line to a step that was a command; return it. `toy`: they meet or miss no bar."""
    judged = [figure if toy else figure.judged(None) for figure in figures]
    found |= {"said": said or found["said"], "figures": [figure._asdict() for figure in judged]}
    write(file_of(out, found["step"]), found)
    return found


def work(out: Path, names: Sequence[str], words: Sequence[str], limit_s: float) -> Iterator[tuple[str, Found]]:
    """Run a process that goes through steps; yield each step when it has ended, up to the one that ended the process.

    Raises UserError if the process says that no step can run here.
    """
    log, left, in_time = _log(out, names[0]), list(names), False
    began_at = began_step_at = time.monotonic()
    earlier = {name: read(file_of(out, name)).get("started") for name in names}  # calls, whose figures stay until then

    def own(name: str) -> Found:
        """Return what this call found in a step; empty before it begins."""
        found = read(file_of(out, name))
        return {} if found.get("started") == earlier[name] else found

    with processes.started(words, os.environ, log, Path.cwd(), grace_s=GRACE_S) as process:
        while left and not in_time and time.monotonic() - began_at < limit_s:
            in_time = processes.has_ended(process, LOOK_S)
            while left and (found := own(left[0])).get("wall_s") is not None:
                began_step_at = time.monotonic()
                yield left.pop(0), found
    code = process.returncode
    if left and in_time and code == CANNOT_RUN:
        raise UserError(processes.last_line(log))
    if left and code:
        found = own(left[0]) or _begun(left[0])
        found |= {"ended": _why(code, log, in_time, limit_s), "wall_s": time.monotonic() - began_step_at}
        write(file_of(out, left[0]), found)
        yield left[0], found


def _log(out: Path, name: str) -> Path:
    """Return the empty log of a process whose first step is this one."""
    log = out / "logs" / f"{name}.txt"
    with files.write_errors(log):
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("")
    return log


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold the folder: two calls would disturb each other's times. Raises UserError if another one holds it."""
    with files.write_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        handle = (out / "lock").open("w")
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another call works in {out}; wait for it, or choose another --out.") from None
        yield


def _why(code: int, log: Path, in_time: bool, limit_s: float) -> str:
    """Return why a process ended before its step did: by whom, or the last line that it printed."""
    text = log.read_text(errors="replace")
    if "Timeout (" in text:
        where = INNERMOST.search(text, text.rindex("Timeout ("))
        return "no end in its time" + (f"; it was in {where[3]}, {Path(where[1]).name}:{where[2]}" if where else "")
    if not in_time:
        return f"no end within {limit_s:.0f} s"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}"
    return processes.last_line(log) or f"exit code {code}"

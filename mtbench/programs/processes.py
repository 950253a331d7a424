"""Processes of other programs: builds of the gate, servers and clients of a load.

Each leads a process group and ends with this command, however that ends.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mtbench import files
from mtbench.errors import UserError, printable
from mtbench.programs import launch

ERROR_LINES = 400  # of the end of a log, in which an exception is searched
# llama.cpp: "error loading model", and assertions, behind which it starts gdb.
EXCEPTION = re.compile(r"\b\w*(?:Error|Exception): |error loading model: |GGML_ASSERT\(")
ABOVE = re.compile(r"\babove\b|stack trace|check the (?:input|logs)")  # the cause is elsewhere in the log
REFERS = re.compile(rf"{ABOVE.pattern}|https?://|\(process \d+\) detached")
LONGEST_ERROR = 300  # characters of a process's message that are repeated
LOOK_S = 0.05  # between two looks whether a process has ended
LISTENING = "0A"  # state of a socket in /proc/net/tcp: proc_pid_net(5)
TAIL = 1 << 17  # bytes of the end of a log that are searched
COMMAND = "MTBENCH_COMMAND"  # environment variable: the process of the command that the user gave, for its children


@contextmanager
def started(
    command: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    folder: Path,
    grace_s: float = 0.0,
    pipes: bool = False,
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a running process, whose output goes to `log`; end it and its children when the block ends.

    `grace_s`: how long it may take to end after SIGTERM before it is killed. `pipes`: its standard input and output are
    pipes, and only its errors go to `log`.
    """
    with files.write_errors(log):
        output = log.open("ab")
    with output:
        try:
            process = subprocess.Popen(
                launched(command),
                env=dict(variables),
                stdin=subprocess.PIPE if pipes else subprocess.DEVNULL,
                stdout=subprocess.PIPE if pipes else output,
                stderr=output,
                cwd=folder,
                start_new_session=True,
            )
        except OSError as error:
            raise UserError(f"{command[0]} cannot be started: {error.strerror or error}.") from None
        try:
            yield process
        finally:
            _end(process, grace_s)
            for stream in filter(None, (process.stdin, process.stdout)):
                stream.close()


def launched(command: Sequence[str]) -> list[str]:
    """Return the command that starts another one so that the kernel kills it with this process."""
    return [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command]


def last_line(log: Path) -> str:
    """Return the last line with letters that a process wrote; empty if there is none.

    If it refers elsewhere (engines: to a cause above; pydantic: to an address; gdb: to its trace), the exception before
    it, with an indented line of detail.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.rstrip() for line in text.splitlines() if any(letter.isalpha() for letter in line)][-ERROR_LINES:]
    elsewhere = bool(lines) and REFERS.search(lines[-1]) is not None
    for place in reversed(range(len(lines) if elsewhere else 0)):
        if found := EXCEPTION.search(lines[place]):
            near = lines[place + 1 : place + (3 if "validation error" in lines[place] else 2)]  # a field before
            details = [line.strip() for line in near if line.startswith(" ")][:1]
            said = " ".join([lines[place][found.start() :], *details])
            if not ABOVE.search(said):
                return printable(said)[:LONGEST_ERROR].rstrip(".")
    return printable(lines[-1].strip())[:LONGEST_ERROR].rstrip(".") if lines else ""


def utc_now() -> str:
    """Return the UTC time as files store it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def has_ended(process: subprocess.Popen[bytes], within_s: float = 0.0) -> bool:
    """Return whether a process ends within a time. It is not reaped: its id is not reused until it is killed."""
    deadline = time.monotonic() + within_s
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(LOOK_S)
    return True


def listens(group: int, port: int) -> bool:
    """Return whether a process of a group listens on a TCP port; True without /proc."""
    tables = [table for table in map(Path, ("/proc/net/tcp", "/proc/net/tcp6")) if table.exists()]
    lines = [line.split() for table in tables for line in table.read_text().splitlines()[1:]]
    sockets = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(f":{port:04X}") and line[3] == LISTENING}
    for pid in _members(group, _stats()):
        with suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(file) in sockets for file in Path(f"/proc/{pid}/fd").iterdir()):
                return True
    return not tables


def processor_times(groups: Iterable[int]) -> dict[int, tuple[float, dict[str, tuple[int, int]]]]:
    """Return by group the processor time of its processes and their children, in seconds.

    Also each thread's time on a processor and its time of waiting for one, in nanoseconds, where /proc has them.
    """
    stats = _stats()
    return {group: _spent(_members(group, stats)) for group in groups}


def command() -> int:
    """Return the process of the command that the user gave: this one, or the ancestor that its environment names."""
    told, here = os.environ.get(COMMAND), os.getpid()
    return next((pid for pid in _ancestry(here) if str(pid) == told), here)


def name_command() -> None:
    """Tell the processes that this one starts which command they are of."""
    os.environ[COMMAND] = str(command())


def is_ours(pid: int) -> bool:
    """Return whether a process is this command's: its own, a worker, a server, or a child of one."""
    return command() in _ancestry(pid)


def _ancestry(pid: int) -> Iterator[int]:
    """Yield a process, its parent and so on, as far as they are known."""
    with suppress(OSError):  # it has ended, or is another user's
        while pid:
            yield pid
            pid = int(_stat(pid)[1])


def _spent(members: Mapping[int, Sequence[str]]) -> tuple[float, dict[str, tuple[int, int]]]:
    used_s, threads = 0.0, dict[str, tuple[int, int]]()
    for pid, stat in members.items():
        with suppress(OSError):  # it has ended
            used_s += time.clock_gettime(~pid << 3 | 2)  # the id of its clock: clock_getcpuclockid(3)
            used_s += sum(map(int, stat[13:15])) / os.sysconf("SC_CLK_TCK")  # of children that have ended
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(OSError):
                    computed, waited, _ = map(int, (thread / "schedstat").read_text().split())
                    threads[thread.name] = computed, waited
    return used_s, threads


def _stat(pid: int) -> list[str]:
    """Return the fields of proc_pid_stat(5) from the third on: state, parent, group, …"""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _stats() -> dict[int, list[str]]:
    stats = dict[int, list[str]]()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            stats[int(process.name)] = _stat(int(process.name))
    return stats


def _members(group: int, stats: Mapping[int, list[str]]) -> dict[int, list[str]]:
    """Return the processes of a group and their children."""
    found = {pid: stat for pid, stat in stats.items() if int(stat[2]) == group}
    while children := {pid: stat for pid, stat in stats.items() if int(stat[1]) in found and pid not in found}:
        found |= children
    return found


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    if grace_s and not has_ended(process):
        process.terminate()
        has_ended(process, grace_s)
    kill_group(process)
    process.wait()


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that is not reaped, and its group."""
    with suppress(ProcessLookupError, PermissionError):  # PermissionError: macOS raises it for a group of zombies
        os.killpg(process.pid, signal.SIGKILL)

"""A fork server for `mtbench`: one process imports everything; a forked child runs a command and can be disturbed.

A child runs in its own session and folder. Its changes of the disk are counted (Python's audit events and `os.fsync`).
Before each change a function may kill the child or raise the error of a disk.
"""

import os
import random
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from forked import leave_parent

HANG_S, HANGS = 300, 124  # a child that lives longer is ended; its code then
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.truncate", "os.link", "os.symlink"}
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Words = Sequence[str]


class Ended(NamedTuple):
    """How a child ended."""

    code: int  # exit code, or minus the signal
    text: str  # standard output and error
    changes: int  # of the disk; 0 if it was killed
    struck: bool  # whether it was disturbed
    wall_s: float


class Disk:
    """Counts this process's changes of the disk, and calls `act` before each."""

    def __init__(self, act: "Act") -> None:
        self.act, self.fsync = act, os.fsync
        self.count, self.struck, self.sizes = 0, False, dict[str, int]()

    def watch(self) -> None:
        sys.addaudithook(self._hook)  # cannot be removed, so only in a child
        setattr(os, "fsync", self._flush)  # noqa: B010

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, int) or not flags & WRITING or os.fsdecode(path).startswith(("/dev", "/proc")):
                return
            path = os.path.realpath(os.fsdecode(path))
            self.sizes[path] = os.path.getsize(path) if os.path.exists(path) else 0
        elif event not in CHANGES:
            return
        self._step(event)

    def _flush(self, file: int) -> None:
        self._step(f"flush {file}")
        self.fsync(file)

    def _step(self, what: str) -> None:
        self.count += 1
        self.act(self, what)

    def tear(self, what: str) -> None:
        """Cut a file somewhere in what was added since it was opened, as a crash of the machine does."""
        path = os.readlink(f"/proc/self/fd/{what.split()[1]}")
        os.truncate(path, random.randint(self.sizes.get(path, 0), os.path.getsize(path)))


Act = Callable[[Disk, str], None]


def run_child(
    words: Words,
    folder: Path,
    prepare: Callable[[], None] = lambda: None,
    disturb: Callable[[int, int], bool] = lambda pid, handle: False,
    act: Act = lambda disk, what: None,
) -> Ended:
    """Run `mtbench WORDS` in a child. `prepare` and `act` are called in it, `disturb` here, with its id and handle."""
    began, log = time.monotonic(), folder.with_suffix(".log")
    log.touch()
    receive, send = os.pipe()
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
    child = os.fork()
    if not child:
        _child(words, folder, log, prepare, Disk(act), send)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    os.close(send)
    handle = os.pidfd_open(child)
    struck = disturb(child, handle)
    hangs = not select.select([handle], [], [], HANG_S)[0]
    if hangs:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # its workers
    said = os.read(receive, 20).decode().split() or ["0", ""]
    os.close(receive)
    os.close(handle)
    code = HANGS if hangs else os.waitstatus_to_exitcode(status)
    struck = (struck and said[1] != "early") or said[1] == "True" or code == -signal.SIGKILL
    return Ended(code, log.read_text(errors="replace"), int(said[0]), struck, time.monotonic() - began)


def _child(words: Words, folder: Path, log: Path, prepare: Callable[[], None], disk: Disk, send: int) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ["XDG_CACHE_HOME"] = str(folder.with_suffix(".cache"))
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), stream)
    leave_parent(send)
    code: Any = 1
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    except KeyboardInterrupt:  # before the command began
        os.write(send, b"0 early")
        os._exit(0)
    try:
        prepare()
        disk.watch()
        code = in_process(words)
    except BaseException:
        traceback.print_exc()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os.write(send, f"{disk.count} {disk.struck}".encode())
    os._exit(code)


def in_process(words: Words) -> int:
    """Run `mtbench WORDS` here; return its exit code."""
    from mtbench.cli import main

    before, sys.argv = sys.argv, ["mtbench", *words]
    try:
        main.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0

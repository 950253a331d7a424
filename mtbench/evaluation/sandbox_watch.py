"""Bounds what all processes of a sandboxed program use together; the kernel's resource limits hold for one process.

A cgroup would do this, but few users may create one. So one thread looks at the processes of all running sandboxes ten
times a second. Resident memory says how many programs the machine can run side by side; address space is far more than
a program fills. It is bounded, too, because a process can hold shared memory that is resident in no process. A program
that does much within a tenth of a second can exceed a total for that long.
"""

import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from time import monotonic

INTERVAL_S = 0.1
LARGEST_SHARE = 0.2  # of one processor, for this thread: with many processes it looks less often


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The totals that all processes of one program use, or may use."""

    address_bytes: int = 2**32
    resident_bytes: int = 2**30
    processor_s: float = 10.0
    files: int = 10_000  # and folders, in the scratch folder
    sockets: int = 128

    def exceeded_by(self, used: "Totals") -> str:
        """Return the total that is exceeded, "" if none."""
        names = ("memory", "memory", "processor time", "files", "sockets")
        return next((n for n, most, now in zip(names, astuple(self), astuple(used), strict=True) if now > most), "")


@dataclass(eq=False, slots=True)
class Watched:
    """A process and all that descend from it. `exceeded`: the exceeded total, "" if none."""

    pid: int
    exceeded: str = ""


class Watch:
    """A thread that measures the watched programs until the `with` statement ends."""

    def __init__(self, totals: Totals, scratch: str) -> None:
        self._totals = totals
        self._scratch = scratch
        self._watched: set[Watched] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    @contextmanager
    def over(self, pid: int) -> Iterator[Watched]:
        """Watch this process and all that descend from it."""
        watched = Watched(pid)
        self._watched.add(watched)
        try:
            yield watched
        finally:
            self._watched.discard(watched)

    def _run(self) -> None:
        pause_s = INTERVAL_S
        before: set[Watched] = set()
        while not self._ended.wait(pause_s):
            started_at = monotonic()
            now = self._watched.copy()
            if lasting := now & before:  # most programs are too short to use much
                children = _children()
                for watched in lasting:
                    used = used_by(_family(watched.pid, children), self._scratch)
                    watched.exceeded = watched.exceeded or self._totals.exceeded_by(used)
            before = now
            pause_s = max(INTERVAL_S, (monotonic() - started_at) / LARGEST_SHARE)


def used_by(family: Sequence[int], scratch: str) -> Totals:
    """Return the totals of these processes; the first ones may be outside the sandbox."""
    address_bytes, resident_bytes, processor_s, files, sockets = 0, 0, 0.0, 0, 0
    for pid in family:
        with suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:  # an OSError: the process has ended
            address, resident = (int(pages) * os.sysconf("SC_PAGE_SIZE") for pages in file.read().split()[:2])
            address_bytes, resident_bytes = address_bytes + address, resident_bytes + resident
            # of this process in user and kernel mode, and of its children that have ended
            processor_s += sum(map(int, _stat(pid)[11:15])) / os.sysconf("SC_CLK_TCK")
    for pid in family:
        with suppress(OSError):
            root = f"/proc/{pid}/root"
            if os.stat(f"{root}/").st_dev != os.stat("/").st_dev:  # inside the sandbox
                space = os.statvfs(root + scratch)
                files = space.f_files - space.f_ffree
                sockets = _sockets(pid)
                break
    return Totals(
        address_bytes=address_bytes,
        resident_bytes=resident_bytes,
        processor_s=processor_s,
        files=files,
        sockets=sockets,
    )


def _stat(pid: int | str) -> list[bytes]:
    """Return the words of a process's statistics that follow its number and name, see proc(5); its name may be any."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _sockets(pid: int) -> int:
    with open(f"/proc/{pid}/net/sockstat", "rb") as file:
        return int(file.readline().split()[-1])  # "sockets: used 3"


def _children() -> Mapping[int, Sequence[int]]:
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with suppress(OSError):
                children[int(_stat(name)[1])].append(int(name))
    return children


def _family(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    family = [pid]
    for member in family:
        family += children.get(member, ())
    return family

"""This process's share of the machine: processors by its affinity and its cgroup, memory by its cgroup.

A container or a batch job often owns a small part of the machine. The kernel reports all processors and all memory
there, too. Sources: sched_setaffinity(2), cgroups(7), the kernel's documentation of cgroup v2.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_processors() -> int:
    """Return how many processors this process may keep busy, at least 1."""
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    quotas = [int(quota) / int(period) for quota, period in _limits("cpu.max")]
    return max(1, min([processors, *map(math.ceil, quotas)]))


def usable_memory_bytes() -> int:
    """Return the machine's memory, or less if a cgroup of this process may use less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(limit) for (limit,) in _limits("memory.max"))])


def available_memory_bytes() -> int:
    """Return the memory that new programs may use now, without swapping; the machine's where that is unknown."""
    with suppress(OSError):  # no Linux
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
        if known is not None:
            return min(int(known) * 1024, usable_memory_bytes())
    return usable_memory_bytes()


def _limits(file: str) -> Iterator[list[str]]:
    """Yield the words of this file in the cgroup of this process and in all groups above it, where they set a limit.

    A group above may have the smaller limit. In a container the path of a group can be the host's and not exist here;
    the container's own group is then the root folder.
    """
    with suppress(OSError):  # no Linux
        own = next((line for line in MEMBERSHIP.read_text(encoding="utf-8").splitlines() if line.startswith("0::")), "")
        group = CGROUPS / own.removeprefix("0::").lstrip("/")
        for folder in (group, *group.parents):
            with suppress(OSError):
                words = (folder / file).read_text(encoding="ascii").split()
                if words[0] != "max":
                    yield words

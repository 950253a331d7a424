"""This process's share of the machine: processors by its affinity and its cgroups, memory by its cgroups.

A container or a batch job often owns a small part of the machine. The kernel reports all processors and all memory
there, too. Sources: sched_setaffinity(2), cgroups(7), the kernel's documentation of cgroup v2 and sched-bwc (v1).
"""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def usable_processors() -> int:
    """Return how many processors this process may keep busy all the time, at least 1."""
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, int(min(processors, cpu_quota() or processors)))


def cpu_quota() -> float | None:
    """Return the processor seconds per second that this process's cgroups may use; None: there is no quota."""
    return min((quota for _, quota in _quotas()), default=None)


def throttled_s() -> float | None:
    """Return for how many seconds quotas stopped this process's cgroups, over all processors; None: no quota."""
    groups = [group for group, _ in _quotas()]
    return sum(map(_throttled_s, groups)) if groups else None


def usable_memory_bytes() -> int:
    """Return the machine's memory, or less if a cgroup of this process may use less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(limit for group in _groups("memory") for limit in _numbers(group, "memory.max"))])


def available_memory_bytes() -> int:
    """Return the memory that new programs may use now, without swapping; the machine's where that is unknown."""
    with suppress(OSError):  # no Linux
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        known = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
        if known is not None:
            return min(int(known) * 1024, usable_memory_bytes())
    return usable_memory_bytes()


def _quotas() -> Iterator[tuple[Path, float]]:
    """Yield the cgroups with a quota, and their processor seconds per second."""
    for group in _groups("cpu"):
        numbers = _numbers(group, "cpu.max") or _numbers(group, "cpu.cfs_quota_us", "cpu.cfs_period_us")
        if len(numbers) == 2 and min(numbers) > 0:  # v1 has a quota of -1 for none
            yield group, numbers[0] / numbers[1]


def _throttled_s(group: Path) -> float:
    """Return the total time of throttling in a cgroup's cpu.stat: microseconds in v2, nanoseconds in v1."""
    with suppress(OSError, ValueError):
        counts = dict(line.split() for line in (group / "cpu.stat").read_text(encoding="ascii").splitlines())
        return int(counts.get("throttled_usec", 0)) * 1e-6 + int(counts.get("throttled_time", 0)) * 1e-9
    return 0.0


def _numbers(group: Path, *files: str) -> list[int]:
    """Return the numbers in these files of a cgroup; none if one is missing, or has words such as `max`."""
    with suppress(OSError, ValueError):
        return [int(word) for file in files for word in (group / file).read_text(encoding="ascii").split()]
    return []


def _groups(controller: str) -> list[Path]:
    """Return the cgroup of this process and all groups above it, for one controller.

    A group above may have the smaller limit. In a container the path of a group can be the host's and not exist here;
    the container's own group is then the root folder. v1 has a tree for each controller or for some together. v2 has
    one tree, in a folder of its own beside those of v1.
    """
    found = []
    with suppress(OSError):  # no Linux
        for line in MEMBERSHIP.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            names, _, path = line.partition(":")[2].partition(":")
            trees = [names, controller] if controller in names.split(",") else [] if names else ["unified", "."]
            for tree in [CGROUPS / name for name in trees if (CGROUPS / name).is_dir()][:1]:
                group = tree / path.lstrip("/")
                found += [folder for folder in (group, *group.parents) if folder.is_relative_to(tree)]
    return found

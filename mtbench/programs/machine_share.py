"""This process's share of the machine: processors by its affinity and its cgroups, memory by its cgroups.

A container or a batch job often owns a small part of the machine. The kernel reports all processors and all memory
there, too. Sources: sched_setaffinity(2), cgroups(7), the kernel's documentation of cgroup v2 and sched-bwc (v1).
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
UNITS = {"usec": 1e-6, "time": 1e-9}  # of the time of throttling in cgroup v2 and v1, in seconds


def usable_processors() -> int:
    """Return how many processors this process may keep busy all the time, at least 1."""
    processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, int(min(processors, cpu_quota() or processors)))


def cpu_quota() -> float | None:
    """Return the processor seconds per second that this process's cgroups may use; None: there is no quota."""
    return min((quota for quota, _ in _quotas()), default=None)


def throttled_s() -> float | None:
    """Return for how many seconds quotas stopped this process's cgroups, over all processors; None: no quota."""
    stopped_s = [of_group for _, of_group in _quotas()]
    return sum(stopped_s) if stopped_s else None


def usable_memory_bytes() -> int:
    """Return the machine's memory, or less if a cgroup of this process may use less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_text(group, "memory.max") for group in _groups("memory")]
    return min([machine, *(int(limit) for limit in limits if limit.isdecimal())])


def available_memory_bytes() -> int:
    """Return the memory that new programs may use now, without swapping; the machine's where that is unknown."""
    with suppress(OSError):  # no Linux
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
        if kilobytes is not None:
            return min(int(kilobytes) * 1024, usable_memory_bytes())
    return usable_memory_bytes()


def _quotas() -> Iterator[tuple[float, float]]:
    """Yield, of each cgroup with a quota, its processor seconds per second and for how many seconds it was stopped."""
    for group in _groups("cpu"):
        limits = _text(group, "cpu.max") or _text(group, "cpu.cfs_quota_us", "cpu.cfs_period_us")  # v2, v1
        if quota := re.fullmatch(r"([1-9]\d*) ([1-9]\d*)", limits):  # without a quota `max` in v2, -1 in v1
            stops = re.findall(r"^throttled_(usec|time) (\d+)$", _text(group, "cpu.stat"), re.MULTILINE)
            yield int(quota[1]) / int(quota[2]), sum(int(n) * UNITS[name] for name, n in stops)


def _text(group: Path, *files: str) -> str:
    """Return the text of these files of a cgroup; empty if one is missing."""
    with suppress(OSError):
        return " ".join((group / file).read_text(encoding="ascii").strip() for file in files)
    return ""


def _groups(controller: str) -> list[Path]:
    """Return the cgroup of this process and all groups above it, which may have the smaller limit, for a controller.

    In a container a group's path may be the host's; the container's own group is then the root folder. v1 has a tree
    for each controller or for some together. v2 has one tree, beside those of v1 in a folder of its own.
    """
    folders = []
    with suppress(OSError):  # no Linux
        for line in MEMBERSHIP.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
            names, _, path = line.partition(":")[2].partition(":")
            trees = [names, controller] if controller in names.split(",") else [] if names else ["unified", "."]
            for tree in [CGROUPS / name for name in trees if (CGROUPS / name).is_dir()][:1]:
                group = tree / path.lstrip("/")
                folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(tree)]
    return folders

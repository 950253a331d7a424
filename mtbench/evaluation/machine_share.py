"""What this process may use of the machine: processors by its affinity and its cgroup, memory by its cgroup.

A container or a batch job often owns a small part of the machine. The kernel reports all processors and all memory
there, too. Sources: sched_setaffinity(2), cgroups(7), the kernel's documentation of cgroup v1 and v2.
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
    return max(1, min([processors, *(math.ceil(quota) for quota in _processor_quotas())]))


def usable_memory_bytes() -> int:
    """Return the machine's memory, or less if a cgroup of this process may use less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [*_numbers("memory.max", ""), *_numbers("memory.limit_in_bytes", "memory")]
    return min([machine, *(int(values[0]) for values in limits if values[0] != "max")])


def _processor_quotas() -> Iterator[float]:
    """Yield the quotas of this process's cgroups, in processors."""
    for quota, period in _numbers("cpu.max", ""):
        if quota != "max":
            yield int(quota) / int(period)
    for (quota,), (period,) in zip(
        _numbers("cpu.cfs_quota_us", "cpu"), _numbers("cpu.cfs_period_us", "cpu"), strict=True
    ):
        if int(quota) > 0:
            yield int(quota) / int(period)


def _numbers(file: str, controller: str) -> Iterator[list[str]]:
    """Yield the words of this file in the cgroup of this process and in all groups above it.

    `controller` is "" for cgroup v2. A group above may have the smaller limit. In a container the path of a group can
    be the host's and not exist here; the container's own group is then the root folder.
    """
    for folder in _folders(controller):
        with suppress(OSError):
            yield (folder / file).read_text(encoding="ascii").split()


def _folders(controller: str) -> list[Path]:
    try:
        lines = MEMBERSHIP.read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            roots = [CGROUPS / controllers, CGROUPS / controller] if controller else [CGROUPS, CGROUPS / "unified"]
            root = next((root for root in roots if root.is_dir()), CGROUPS)
            group = root / path.lstrip("/")
            return [group, *(parent for parent in group.parents if parent.is_relative_to(root))]
    return []

"""A folder that stands for /sys/fs/cgroup, with the cgroups of this process."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from mtbench.programs import machine_share


def plant(patch: pytest.MonkeyPatch, folder: Path, files: Mapping[str, str], groups: str = "0::/job/step") -> Path:
    """Let this process be in these cgroups, whose files these are; return the folder of the tree."""
    tree = folder / "cgroup"
    tree.mkdir(exist_ok=True)
    (folder / "membership").write_text(f"{groups}\n")
    patch.setattr(machine_share, "MEMBERSHIP", folder / "membership")
    patch.setattr(machine_share, "CGROUPS", tree)
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(f"{text}\n")
    return tree


def quota_of(patch: pytest.MonkeyPatch, folder: Path, percent: int, throttled_s: float = 0.0) -> None:
    """Give this process a quota by a cgroup of version 2 that was stopped for these seconds."""
    stat = f"usage_usec 7\nnr_periods 9\nnr_throttled 3\nthrottled_usec {round(throttled_s * 1e6)}"
    plant(patch, folder, {"job/cpu.max": f"{percent * 1000} 100000", "job/cpu.stat": stat})

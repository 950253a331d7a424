"""The part of a machine that a process owns: its processors, the quota of its cgroups, and how long that stopped it."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from cgroup_trees import plant, quota_of

from mtbench.errors import UserError
from mtbench.measure import model_pool
from mtbench.measure.model_pool import ModelPool, threads_for, use_threads
from mtbench.measure.worker_counts import refuse
from mtbench.plan.plan import RunRequest
from mtbench.programs.machine_share import cpu_quota, throttled_s, usable_memory_bytes, usable_processors

V1 = "9:memory:/other\n4:cpu,cpuacct:/docker/5ab\n0::/"
STAT_V1 = "nr_periods 9\nnr_throttled 3\nthrottled_time 2500000000"
STAT_V2 = "usage_usec 7\nnr_throttled 3\nthrottled_usec 1500000"


def of_v1(quota: str, period: str = "100000", group: str = "cpu,cpuacct/docker/5ab") -> dict[str, str]:
    return {f"{group}/cpu.cfs_quota_us": quota, f"{group}/cpu.cfs_period_us": period}


@pytest.mark.parametrize(
    ("groups", "files", "quota", "processors"),
    [
        ("0::/job/step", {"job/step/cpu.max": "60000 100000"}, 0.6, 1),
        ("0::/job/step", {"job/step/cpu.max": "100000 50000"}, 2.0, 2),
        ("0::/job/step", {"job/step/cpu.max": "max 100000"}, None, 64),
        ("0::/job/step", {"job/step/cpu.max": "400000 100000", "job/cpu.max": "300000 100000"}, 3.0, 3),
        ("0::/job/step", {"job/step/cpu.max": "9900000 100000"}, 99.0, 64),
        ("0::/../other", {"cpu.max": "200000 100000"}, 2.0, 2),
        (V1, of_v1("400000"), 4.0, 4),
        (V1, of_v1("-1"), None, 64),
        (V1, of_v1("400000", group="cpu"), 4.0, 4),
        ("1:name=systemd:/a\n0::/a", {"unified/a/cpu.max": "200000 100000"}, 2.0, 2),
        ("0::/job/step", {"job/step/cpu.max": "60000"}, None, 64),
    ],
    ids=[
        *("under a core", "another period", "no limit", "smaller above", "more than there are", "namespace"),
        *("v1", "v1 without", "v1 root", "v2 beside v1", "one number"),
    ],
)
def test_the_quota_is_the_smallest_on_the_way_up(
    groups: str,
    files: Mapping[str, str],
    quota: float | None,
    processors: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Whole processors below it may be kept busy, and one in any case."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    plant(monkeypatch, tmp_path, files, groups)
    assert (cpu_quota(), usable_processors()) == (quota, processors)


@pytest.mark.parametrize(
    ("groups", "files", "seconds"),
    [
        ("0::/job/step", {"job/step/cpu.max": "60000 100000", "job/step/cpu.stat": STAT_V2}, 1.5),
        (V1, of_v1("60000") | {"cpu,cpuacct/docker/5ab/cpu.stat": STAT_V1}, 2.5),
        ("0::/job/step", {"job/step/cpu.max": "max 100000", "job/step/cpu.stat": STAT_V2}, None),
        ("0::/job/step", {"job/step/cpu.max": "60000 100000"}, 0.0),
    ],
    ids=["v2", "v1", "no quota", "no counts"],
)
def test_the_time_for_which_a_quota_stopped_the_process(
    groups: str, files: Mapping[str, str], seconds: float | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """v2 counts microseconds and v1 nanoseconds. A group without a quota stops nothing."""
    plant(monkeypatch, tmp_path, files, groups)
    assert throttled_s() == (None if seconds is None else pytest.approx(seconds))


def test_without_cgroups_the_share_is_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant(monkeypatch, tmp_path, {})
    (tmp_path / "membership").unlink()
    assert (cpu_quota(), throttled_s()) == (None, None)
    assert usable_processors() == len(os.sched_getaffinity(0))
    assert usable_memory_bytes() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("percent", "torchs", "threads"), [(60, 8, 1), (250, 8, 2), (800, 4, 4)])
def test_threads_are_at_most_the_cores_of_the_quota(
    percent: int, torchs: int, threads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of mtbench's own loop and of the servers that it starts. More would be stopped again and again."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    quota_of(monkeypatch, tmp_path, percent)
    assert threads_for("cpu", [64_000_000]) == threads
    assert threads_for("cpu", [1_000]) == 1
    assert threads_for("cuda", [1_000]) == threads
    used = list[int]()
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    monkeypatch.setattr(model_pool, "parameters", lambda *_: 64_000_000)
    use_threads(ModelPool(RunRequest(device="cpu")), ["served"])
    assert used == [threads]


def test_workers_are_at_most_the_cores_of_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    quota_of(monkeypatch, tmp_path, 350)
    refuse(3, None, "cpu")
    with pytest.raises(UserError, match="--workers 4 is not allowed; it is from 1 to 3, the cores of this process"):
        refuse(4, None, "cpu")
    with pytest.raises(UserError, match=r"--ray '127\.0\.0\.1:1': no cluster"):
        refuse(1, "127.0.0.1:1", "cpu")

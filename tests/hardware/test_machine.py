"""The GPU's state in timed windows: how it is read, when a window is dropped, and runs without a GPU."""

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch
from cgroup_trees import plant, quota_of
from driver import Driver, processes

from mtbench.hardware import machine
from mtbench.hardware.machine import Sample

THERMAL_NS = [0, 50_000_000]  # 50 ms slowed by heat
POWER_NS = [50_000_000, 0]


def over(seconds: float, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the window between two states of the driver, `seconds` long."""
    samples = [Driver(**state).gpu.sample() for state in (before, after)]
    start, end = ({name: getattr(s, name) for name in Sample.__slots__} for s in samples)
    start |= {"at_s": 0.0, "cpu_s": 0.0}
    end |= {"at_s": seconds, "cpu_s": 1.5}
    return machine.window(Sample(**start), Sample(**end))


def test_names_and_bits_are_those_of_the_driver_library() -> None:
    """The test double has no others."""
    assert pynvml.nvmlClocksEventReasonSwPowerCap == machine.POWER_CAP
    assert pynvml.nvmlClocksEventReasonHwSlowdown | pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown == machine.HARDWARE
    thermal = pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    assert thermal == machine.THERMAL
    constants = [name for name in vars(Driver) if name.startswith("NVML_")]
    assert all(getattr(pynvml, name) == getattr(Driver, name) for name in constants)
    assert all(hasattr(pynvml, query) for query in Driver().state)


def test_an_undisturbed_window_is_valid() -> None:
    """It has the clock and temperature at its end and the mean power of the energy counter."""
    end = {"nvmlDeviceGetTotalEnergyConsumption": 1_300_000, "nvmlDeviceGetClockInfo": 1755}
    assert over(2.0, {}, end) == {
        "cpu_s": 1.5,
        "wanted_s": None,
        "clock_mhz": 1755,
        "temperature_c": 45,
        "power_w": 650.0,
        "throttle": 0,
        "shared": False,
        "dropped": None,
    }
    assert over(0.5, {}, end)["power_w"] == 400.0  # too short for the counter: the driver's mean


@pytest.mark.parametrize(
    ("before", "after", "dropped"),
    [
        ({}, {"nvmlDeviceGetCurrentClocksEventReasons": 0x48}, None),
        ({}, {"nvmlDeviceGetViolationStatus": THERMAL_NS}, None),
        ({}, {"nvmlDeviceGetCurrentClocksEventReasons": 0x08}, "hardware slowdown"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x88}, {}, "hardware slowdown"),
        ({"nvmlDeviceGetCurrentClocksEventReasons": 0x08}, {}, None),
        ({}, {"nvmlDeviceGetComputeRunningProcesses": processes(7, 8)}, "device shared with another process"),
        ({"nvmlDeviceGetComputeRunningProcesses": processes(7, 8)}, {}, "device shared with another process"),
    ],
    ids=["hot hardware", "hot inside", "slowed", "brake at the start", "clock rising at the start", "joined", "left"],
)
def test_a_disturbed_window_is_dropped_with_its_reason(
    before: dict[str, Any], after: dict[str, Any], dropped: str | None
) -> None:
    """Hardware or another process at either end. Heat drops nothing: the arm makes it."""
    assert over(2.0, before, after)["dropped"] == dropped


def test_the_power_cap_inside_a_window_is_recorded() -> None:
    """It drops no window: the cap is a setting of the machine."""
    window = over(2.0, {}, {"nvmlDeviceGetViolationStatus": POWER_NS})
    assert (window["throttle"], window["dropped"]) == (machine.POWER_CAP, None)


@pytest.mark.parametrize(
    ("in_turns", "looks", "shared"),
    [
        (False, "1:0 4:1 | 4:1 4:1 | 4:1 5:1 | 4:1 4:1", [False, False, True, False]),  # a server of three processes
        (False, "2:0 2:1 | 2:1 2:1 | 2:1 3:1", [True, False, True]),  # a stranger leaves while a server starts
        (False, "1:0 3:1 | 2:1 2:1 | 3:1 3:1", [False, False, True]),  # one comes meanwhile, leaves and comes again
        (False, "1:0 2:1 | 1:0 2:1 | 1:0 1:0 | 2:0 2:0", [False, False, False, True]),  # a server ends, another starts
        (True, "2:0 2:0 | 3:1 3:1 | 4:1 5:1 | 4:1 4:1", [False, False, True, False]),  # the other build's come and go
    ],
)
def test_numbers_tell_who_is_a_stranger_where_ids_are_of_another_namespace(
    in_turns: bool, looks: str, shared: list[bool]
) -> None:
    """looks: at both ends of each window, processes on the GPU and servers of this command."""
    strangers = machine.Strangers(in_turns=in_turns)

    def seen(look: str) -> Sample:
        holders, servers = map(int, look.split(":"))
        return Sample(at_s=0.0, cpu_s=0.0, holders=holders, servers=frozenset(range(servers)))

    assert [strangers.held(*map(seen, window.split())) for window in looks.split("|")] == shared


def test_a_single_process_is_not_sharing_whatever_its_id() -> None:
    """In a container the driver may report ids of another namespace, one process twice, or none: None."""
    shared = [
        over(1.0, {}, {"nvmlDeviceGetComputeRunningProcesses": found, "nvmlDeviceGetClockInfo": 1})["shared"]
        for found in (processes(os.getpid()), processes(99_999), processes(7, 7))
    ]
    assert shared == [False, False, False]
    hidden: dict[str, Any] = {"nvmlDeviceGetComputeRunningProcesses": []}
    assert over(1.0, hidden, hidden)["shared"] is None


def test_a_driver_that_supports_no_query_gives_null() -> None:
    """Every value is null, and the window is valid."""
    mute = dict.fromkeys(Driver().state)
    window = over(1.0, mute, mute)
    assert window.pop("cpu_s") == 1.5
    assert set(window.values()) == {None}


def test_a_run_on_the_cpu_does_not_read_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU all values are null."""
    monkeypatch.setattr(machine, "gpu", lambda: Driver(nvmlDeviceGetComputeRunningProcesses=processes(1, 2)).gpu)
    assert machine.sample("cuda").holders == 2
    assert machine.sample("cpu").holders is None
    monkeypatch.setattr(machine, "gpu", lambda: None)
    window = machine.window(machine.sample("cuda"), machine.sample("cuda"))
    assert window.pop("cpu_s") >= 0
    assert set(window.values()) == {None}


OURS = (False, None)


def usual(of: tuple[bool, str | None], *shares: float) -> float | None:
    """The usual share after windows with these shares."""
    seen = machine.ProcessorShares()
    for share in shares:
        seen.lacking({of: share})
    return seen.usual(of)


@pytest.mark.parametrize(
    ("cpu_s", "threads", "machine_s", "wanted_s"),
    [
        (4.0, [(2, 0), (2, 0)], 8.0, 4.0),  # another program has other cores
        (2.0, [(1, 1), (1, 1)], 4.0, 4.0),  # they had half of the processor that they wanted
        (2.0, [(1, 3), (1, 3)], 5.0, 5.0),  # they also wait for each other
        (1.25, [(1, 1), (0, 1), (0.25, 0.5)], 9.0, 2.5),  # one decodes; beside it others wait shortly for its answers
        (0.5, [(0, 2)], 2.5, 2.5),  # only the client had the processor
        (-1.0, [], 3.0, 0.0),  # a process of the server has ended
    ],
)
def test_a_server_wants_the_processor_while_it_computes_or_waits_for_others(
    cpu_s: float, threads: list[tuple[float, float]], machine_s: float, wanted_s: float
) -> None:
    """threads: seconds in which each computed and waited."""
    spent = {str(n): (round(1e9 * (5 + c)), round(1e9 * (3 + w))) for n, (c, w) in enumerate(threads)}
    known = dict.fromkeys(spent, (5_000_000_000, 3_000_000_000))
    before = Sample(at_s=0.0, cpu_s=1.0, machine_s=7.0, threads=known)
    after = Sample(at_s=2.0, cpu_s=1.0 + cpu_s, machine_s=7.0 + machine_s, threads=spent)
    window = machine.window(before, after)
    assert (window["cpu_s"], window["wanted_s"]) == (max(0.0, cpu_s), wanted_s)


@pytest.mark.parametrize(
    ("before", "share", "lacking"),
    [((1.0,), 0.74, True), ((1.0,), 0.76, False), ((), 0.0, False)],
)
def test_a_window_without_its_usual_share_of_the_processor_is_dropped(
    monkeypatch: pytest.MonkeyPatch, before: tuple[float, ...], share: float, lacking: bool
) -> None:
    """A quarter less, whatever is usual on this machine; without a usual share there is no evidence."""
    monkeypatch.setattr(machine, "COMPUTING_SHARE", 0.75)  # tests/helpers/common_fixtures.py sets 0
    seen = machine.ProcessorShares()
    for one in before:
        seen.lacking({OURS: one})
    assert seen.lacking({OURS: share}) == lacking
    start, end = Sample(at_s=0.0, cpu_s=1.0), Sample(at_s=20.0, cpu_s=1.0 + 20 * share)
    assert machine.processor_shares(start, end, None) == {OURS: pytest.approx(share)}
    reason = machine.window(start, end, lacking=lacking)["dropped"]
    assert reason == ("the process did not get the processor" if lacking else None)


@pytest.mark.parametrize(
    ("cpu_s", "throttled_s", "lacking", "dropped"),
    [
        (1.2, 0.8, True, machine.THROTTLED),
        (1.2, 0.8, False, machine.THROTTLED),  # every window of a permanent quota is like the others
        (1.2, 0.03, True, machine.NO_PROCESSOR),  # others had it
        (1.2, None, True, machine.NO_PROCESSOR),  # no quota
        (1.98, 5.0, False, None),  # other threads were stopped
        (1.0, -3.0, False, None),  # it is in another cgroup now
    ],
)
def test_a_window_that_a_quota_stopped_is_dropped_for_that_cause(
    monkeypatch: pytest.MonkeyPatch, cpu_s: float, throttled_s: float | None, lacking: bool, dropped: str | None
) -> None:
    """Of two seconds. Without a count of the kernel no quota is named; a stop is no longer than the thread's wait."""
    monkeypatch.setattr(machine, "THROTTLED_SHARE", 0.02)  # tests/helpers/common_fixtures.py has none
    before = Sample(at_s=0.0, cpu_s=1.0, throttled_s=None if throttled_s is None else 4.0)
    after = Sample(at_s=2.0, cpu_s=1.0 + cpu_s, throttled_s=None if throttled_s is None else 4.0 + throttled_s)
    assert machine.window(before, after, lacking=lacking)["dropped"] == dropped


@pytest.mark.parametrize(("waited_s", "throttled"), [(0.9, True), (0.01, False)])
def test_a_quota_stops_a_server_while_its_busiest_thread_waits(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, throttled: bool
) -> None:
    """Other programs need not compute meanwhile."""
    monkeypatch.setattr(machine, "THROTTLED_SHARE", 0.02)  # tests/helpers/common_fixtures.py has none
    before = Sample(at_s=0.0, cpu_s=1.0, machine_s=3.0, throttled_s=0.0, threads={"1": (0, 0)})
    spent = {"1": (1_000_000_000, round(waited_s * 1e9)), "2": (0, 500_000_000)}
    after = Sample(at_s=2.0, cpu_s=2.0, machine_s=4.0, throttled_s=1.7, threads=spent)
    assert machine.is_throttled(before, after) == throttled


def test_a_sample_reads_the_stops_of_the_quota(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment has the quota, and no such key without one."""
    quota_of(monkeypatch, tmp_path, 60, throttled_s=1.5)
    assert machine.sample("cpu").throttled_s == pytest.approx(1.5)
    assert machine.environment([])["cpu_quota"] == 0.6
    plant(monkeypatch, tmp_path, {"job/cpu.max": "max 100000"})
    assert machine.sample("cpu").throttled_s is None
    assert "cpu_quota" not in machine.environment([])


def test_the_usual_share_of_the_processor_is_low_on_a_busy_machine_and_none_where_threads_sleep() -> None:
    """Four of five windows reach it. Beside a GPU or a server it is evidence only if the thread never sleeps."""
    assert usual(OURS) is None
    assert usual(OURS, *[1.0] * 8, 0.01) == pytest.approx(1.0)
    assert usual(OURS, *[1.0, 0.5] * 10) == pytest.approx(0.5)
    assert usual(OURS, *[1.0] * 90, *[0.3] * 9) == pytest.approx(0.3)  # more load since
    assert usual((False, "ar"), *[0.98] * 9) == pytest.approx(0.98)
    assert usual((False, "ar"), *[0.6] * 9) is None


def test_a_stopped_server_neither_computes_nor_waits() -> None:
    """Its share of what it wanted is whole, and that of the window is small."""
    before = Sample(at_s=0.0, cpu_s=1.0, machine_s=3.0, threads={"1": (0, 0), "2": (0, 0)})
    after = Sample(at_s=4.0, cpu_s=2.0, machine_s=4.0, threads={"1": (900_000_000, 100_000_000), "2": (1, 0)})
    shares = machine.processor_shares(before, after, "ar")
    assert shares == {(True, None): pytest.approx(1.0), (True, "ar"): pytest.approx(0.25)}


@pytest.mark.parametrize(
    ("visible", "used", "handle"),
    [
        (None, None, 0),
        ("2,0", None, 2),
        ("GPU-1,GPU-0", None, "GPU-1"),
        ("MIG-1", None, "MIG-1"),
        ("", None, None),
        ("2,0", "1", "GPU-1"),  # torch counts GPUs in another order than the driver
        ("MIG-7", "7", "MIG-7"),
        (None, "9", None),
    ],
)
def test_the_gpu_that_is_read_is_that_of_torch(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, used: str | None, handle: str | int | None
) -> None:
    """`used`: the id of the GPU that torch computes on; None: of none yet, then it is the first visible one."""

    class Several(Driver):
        def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
            if uuid not in {"GPU-0", "GPU-1", "MIG-1", "MIG-7"}:
                raise self.NVMLError
            return uuid

        def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
            return index

    monkeypatch.setattr(machine, "_nvml", Several)
    monkeypatch.setattr(machine, "gpu_by_id", machine.gpu_by_id.__wrapped__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used is not None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=used))
    monkeypatch.delenv(machine.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(machine.VISIBLE, visible)
    found = machine.gpu()
    assert (found and found.handle) == handle


def test_the_commit_is_that_of_the_files_which_run(tmp_path: Path) -> None:
    """A tag does not stand for the commit. An environment inside a checkout is not of that commit."""
    package, environment = tmp_path / "mtbench", tmp_path / ".venv" / "mtbench"
    package.mkdir()
    environment.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert machine.git_commit(package) is None

    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["add", "mtbench"], ["commit", "-qm", "a"], ["tag", "-a", "v1", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], check=True, capture_output=True, text=True)
    assert machine.git_commit(package) == head.stdout.strip()
    assert machine.git_commit(environment) is None
    (package / "__init__.py").write_text("changed")
    assert machine.git_commit(package) == f"{head.stdout.strip()}-dirty"

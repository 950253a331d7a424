"""A GPU driver that says what a test tells it to: a stand-in for NVML, with the same names."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from living import is_alive

from mtbench.hardware import machine
from mtbench.hardware.machine import Gpu


class Driver:
    """Answers the queries of `mtbench.hardware.machine.Gpu` from `state`.

    A function there is asked each time; a None is a query that this driver does not support.
    """

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = {
            "nvmlDeviceGetClockInfo": 1980,
            "nvmlDeviceGetTemperature": 45,
            "nvmlDeviceGetPowerUsage": 400_000,
            "nvmlDeviceGetCurrentClocksEventReasons": 0,
            "nvmlDeviceGetTotalEnergyConsumption": 0,
            "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=7)],
            "nvmlDeviceGetViolationStatus": [0, 0],  # nanoseconds by policy: power, heat
            **state,
        }

    def __getattr__(self, query: str) -> Any:
        if not query.startswith("nvml"):
            raise AttributeError(query)

        def answer(handle: Any = None, *args: Any) -> Any:
            value = self.state.get(query)
            value = value() if callable(value) else value
            if value is None:
                raise self.NVMLError(f"{query}: not supported")
            return SimpleNamespace(violationTime=value[args[0]]) if query.endswith("ViolationStatus") else value

        return answer

    @property
    def gpu(self) -> Gpu:
        return Gpu(self, handle="the GPU")


def processes(*pids: int) -> list[Any]:
    return [SimpleNamespace(pid=pid) for pid in pids]


@dataclass
class SharedGpu:
    """The GPUs of a machine, each with a table of the processes on it, in runs that decode on a CPU.

    Each process of mtbench that reads its GPU uses it, and so do the scripted servers that have written their ids to
    `folder` (`holds` of their script), while they live.
    """

    folder: Path
    others: Callable[[], Collection[int]] = tuple  # asked at each look
    shift: int = 0  # of ids: those of another namespace
    lists: bool = True
    state: dict[str, Any] = field(default_factory=dict)  # of the driver

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Let samples be read from it."""
        gpu = Driver(nvmlDeviceGetComputeRunningProcesses=self.listed, **self.state).gpu
        patch.setattr(machine, "gpu", lambda: gpu)
        sample, unseen = machine.sample, machine.unseen
        patch.setattr(machine, "sample", lambda _, *groups: sample("cuda", *groups))
        patch.setattr(machine, "unseen", lambda _: unseen("cuda"))

    def listed(self) -> list[Any]:
        """What the driver lists in this process."""
        written = [int(file.name) for file in (self.folder / os.environ.get(machine.VISIBLE, "")).glob("[0-9]*")]
        found = {os.getpid(), *filter(is_alive, written), *self.others()} if self.lists else ()
        return processes(*(pid + self.shift for pid in found))


def begun_with(connection: Any, *_: Any) -> None:
    """In the place of a worker's process: say with which variables this one began. Imports nothing large."""
    while True:
        connection.recv()
        connection.send(Path("/proc/self/environ").read_text().split("\0"))

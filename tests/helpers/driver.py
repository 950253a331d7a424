"""A GPU driver that says what a test tells it to: a stand-in for NVML, with the same names."""

from types import SimpleNamespace
from typing import Any

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

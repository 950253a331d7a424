"""The machine a run ran on, and what its GPU went through in every timed window. What cannot be had is None.

The GPU is asked through NVML (docs.nvidia.com/deploy/nvml-api), never set.
"""

import atexit
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mtbench

PACKAGES = ("torch", "triton", "transformers", "lm_eval", "datasets", "numpy", "scipy", "pandas", "tokenizers")


def environment(command: Sequence[str]) -> dict[str, Any]:
    """What environment.json says; light, since it is written before anything else."""
    found = gpu()
    return {
        "command": list(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "mtbench": mtbench.__version__,
        "git": _git(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": None if found is None else found.describe(),
    }


POWER_CAP = 0x04  # NVML's reasons, nvmlClocksEventReason…: SwPowerCap
BRAKE = 0x80  # HwPowerBrakeSlowdown
HARDWARE = 0x08 | BRAKE  # HwSlowdown, which is also told of a clock that just changes
HEAT = 0x20  # SwThermalSlowdown
THERMAL = HEAT | 0x40  # HwThermalSlowdown
NOTICED = 1e-3  # share of a window: drivers count thermal slowdowns of "0.0 seconds", which move nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A GPU at one moment; None is what cannot be had. Totals count from when the driver was loaded."""

    at_s: float
    clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None  # the driver's reading, on most GPUs the mean of the last second
    reasons: int | None = None  # NVML's bits
    processes: int | None = None  # that compute on it, this one included
    energy_j: float | None = None  # total
    capped_s: float | None = None  # total time slowed by the power cap
    thermal_s: float | None = None  # total time slowed by heat


class Gpu:
    """One GPU as its driver tells it through `nvml`: pynvml, or a stand-in with the same functions."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def read(self, query: str, *args: Any) -> Any:
        """One query about this GPU; None where the driver does not answer it."""
        return _ask(self.nvml, query, self.handle, *args)

    def sample(self) -> Sample:
        """Its state now: a dozen queries, about a millisecond, so never inside a timed window."""
        reasons = self.read("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # its name before driver 535
            reasons = self.read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return Sample(
            at_s=time.perf_counter(),
            clock_mhz=self.read("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM),
            temperature_c=self.read("nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU),
            power_w=_scaled(self.read("nvmlDeviceGetPowerUsage"), 1e-3),
            reasons=reasons,
            processes=self._processes(),
            energy_j=self.energy_j(),
            capped_s=self._slowed_s(self.nvml.NVML_PERF_POLICY_POWER),
            thermal_s=self._slowed_s(self.nvml.NVML_PERF_POLICY_THERMAL),
        )

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded; the counter moves every 20 to 100 ms."""
        return _scaled(self.read("nvmlDeviceGetTotalEnergyConsumption"), 1e-3)

    def describe(self) -> dict[str, Any]:
        """What environment.json says of it."""
        memory = self.read("nvmlDeviceGetMemoryInfo")
        cap_mw = self.read("nvmlDeviceGetEnforcedPowerLimit")
        if cap_mw is None:
            cap_mw = self.read("nvmlDeviceGetPowerManagementLimit")
        return {
            "name": self.read("nvmlDeviceGetName"),
            "driver": _ask(self.nvml, "nvmlSystemGetDriverVersion"),
            "memory_bytes": None if memory is None else int(memory.total),
            "power_cap_w": _scaled(cap_mw, 1e-3),
            "max_clock_mhz": self.read("nvmlDeviceGetMaxClockInfo", self.nvml.NVML_CLOCK_SM),
        }

    def _processes(self) -> int | None:
        """How many processes compute on it.

        They are counted, never compared with our own id: inside a container the driver may give ids of another
        namespace. It may also give none at all, and a list without even us says nothing: None.
        """
        found = self.read("nvmlDeviceGetComputeRunningProcesses")
        return len({p.pid for p in found}) if found else None

    def _slowed_s(self, policy: int) -> float | None:
        """Total seconds under a perf policy's slowdown.

        By this older query and not by field values: the field ids of the newer counters differ between drivers.
        """
        status = self.read("nvmlDeviceGetViolationStatus", policy)
        return None if status is None else float(status.violationTime) * 1e-9


def sample(device: str) -> Sample:
    """The state of the GPU that `device` names; nothing is known, nor matters, of a CPU's."""
    found = gpu() if device == "cuda" else None
    return Sample(at_s=time.perf_counter()) if found is None else found.sample()


def window(before: Sample, after: Sample) -> dict[str, Any]:
    """What a timing line says of the GPU between two samples, and in `dropped` why the time cannot be trusted.

    Clock and temperature are those at its end, before the device has cooled. Power is the counter's mean over a window
    of at least a second; a shorter one gets the driver's reading, which is a mean of the last second. `throttle` holds
    the bits at the end, slowdowns that were on at the start, and those that the driver's counters saw in between.
    """
    wall_s = after.at_s - before.at_s
    energy_j = _growth(before.energy_j, after.energy_j)
    capped_s, thermal_s = _growth(before.capped_s, after.capped_s), _growth(before.thermal_s, after.thermal_s)
    told = [s for s in (before.reasons, after.reasons, capped_s, thermal_s) if s is not None]
    throttle = (after.reasons or 0) | ((before.reasons or 0) & (BRAKE | THERMAL))
    throttle |= POWER_CAP * ((capped_s or 0.0) > NOTICED * wall_s)
    throttle |= HEAT * ((thermal_s or 0.0) > NOTICED * wall_s)
    processes = [s.processes for s in (before, after) if s.processes is not None]
    shared = max(processes) > 1 if processes else None
    return {
        "clock_mhz": after.clock_mhz,
        "temperature_c": after.temperature_c,
        "power_w": after.power_w if energy_j is None or wall_s < 1 else energy_j / wall_s,
        "throttle": throttle if told else None,
        "shared": shared,
        "dropped": _contamination(throttle, bool(shared)),
    }


def _contamination(throttle: int, shared: bool) -> str | None:
    if shared:
        return "device shared with another process"
    if throttle & THERMAL:
        return "thermal slowdown"
    return "hardware slowdown" if throttle & HARDWARE else None


def gpu() -> Gpu | None:
    """The GPU that torch uses; before torch is imported, the first one. None where there is none, or no NVML."""
    torch = sys.modules.get("torch")
    if _nvml() is None or (torch is not None and not torch.cuda.is_available()):
        return None
    return _gpu(None if torch is None else f"GPU-{torch.cuda.get_device_properties(0).uuid}")


@cache
def _gpu(uuid: str | None) -> Gpu | None:
    """By its id: NVML counts all GPUs of the machine, torch those it is shown."""
    nvml = _nvml()
    handle = _ask(nvml, "nvmlDeviceGetHandleByUUID", uuid) if uuid else None
    if handle is None and (uuid is None or _ask(nvml, "nvmlDeviceGetCount") == 1):
        handle = _ask(nvml, "nvmlDeviceGetHandleByIndex", 0)
    return None if handle is None else Gpu(nvml, handle)


@cache
def _nvml() -> Any:
    """NVML, started once for the life of the process; None without the library, a driver or a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # whatever is missing: the same answer
        return None
    atexit.register(pynvml.nvmlShutdown)
    return pynvml


def _ask(nvml: Any, query: str, *args: Any) -> Any:
    try:
        return getattr(nvml, query)(*args)
    except (nvml.NVMLError, AttributeError):
        return None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _growth(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> str | None:
    """The commit mtbench runs from, with `-dirty` if the tree differs; None outside a checkout."""
    here = Path(mtbench.__file__).parent
    command = ["git", "--no-optional-locks", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

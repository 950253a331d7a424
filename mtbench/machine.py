"""The machine a run ran on: versions, processor, GPU with its clocks and limits. What cannot be had is None."""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import mtbench

PACKAGES = ("torch", "transformers", "lm_eval", "datasets", "numpy", "scipy", "pandas", "tokenizers")


def environment(command: list[str]) -> dict[str, Any]:
    """What environment.json says; light, since it is written before anything else."""
    return {
        "command": command,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "mtbench": mtbench.__version__,
        "git": _git(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "gpu": _gpu(),
    }


def sample() -> dict[str, Any]:
    """The GPU's state at this moment, under the names of a timing line; all None without one."""
    empty = {"clock_mhz": None, "temperature_c": None, "power_w": None, "throttle": None}
    with _nvml() as nvml:
        if nvml is None:
            return empty
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "clock_mhz": nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM),
            "temperature_c": nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            "power_w": nvml.nvmlDeviceGetPowerUsage(device) / 1000,
            "throttle": nvml.nvmlDeviceGetCurrentClocksEventReasons(device),
        }
    return empty


def contamination(state: dict[str, Any]) -> str | None:
    """Why a timed window with this GPU state cannot be trusted, or None."""
    reasons = state["throttle"] or 0
    if reasons & 0x40 or reasons & 0x20:  # NVML: hardware thermal, software thermal slowdown
        return "thermal slowdown"
    if reasons & 0x08 or reasons & 0x80:  # NVML: hardware slowdown, power brake
        return "hardware slowdown"
    return None


@contextmanager
def _nvml() -> Iterator[Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, no GPU: the same answer
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpu() -> dict[str, Any] | None:
    with _nvml() as nvml:
        if nvml is None:
            return None
        device = nvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "name": nvml.nvmlDeviceGetName(device),
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "memory_bytes": int(nvml.nvmlDeviceGetMemoryInfo(device).total),
            "power_cap_w": nvml.nvmlDeviceGetPowerManagementLimit(device) / 1000,
            "max_clock_mhz": nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM),
        }
    return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git() -> str | None:
    """The commit mtbench runs from, with `-dirty` if the tree differs; None outside a checkout."""
    here = Path(mtbench.__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
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

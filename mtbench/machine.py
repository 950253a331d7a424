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


POWER_CAP = 0x04  # NVML's reason bits
HARDWARE, THERMAL = 0x08 | 0x80, 0x20 | 0x40


def sample() -> dict[str, Any]:
    """The GPU's state at this moment, under the names of a timing line; None for what cannot be had."""
    with _gpu_handle() as (nvml, device):
        if nvml is None:
            return {"clock_mhz": None, "temperature_c": None, "power_w": None, "throttle": None, "shared": None}
        power_mw = _read(nvml, "nvmlDeviceGetPowerUsage", device)
        processes = _read(nvml, "nvmlDeviceGetComputeRunningProcesses", device)
        return {
            "clock_mhz": _read(nvml, "nvmlDeviceGetClockInfo", device, nvml.NVML_CLOCK_SM),
            "temperature_c": _read(nvml, "nvmlDeviceGetTemperature", device, nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power_mw is None else power_mw / 1000,
            "throttle": _read(nvml, "nvmlDeviceGetCurrentClocksEventReasons", device),
            "shared": None if processes is None else len({p.pid for p in processes}) > 1,
        }


def contamination(state: dict[str, Any]) -> str | None:
    """Why a timed window with this GPU state cannot be trusted, or None."""
    reasons = state["throttle"] or 0
    if state["shared"]:
        return "device shared with another process"
    if reasons & THERMAL:
        return "thermal slowdown"
    return "hardware slowdown" if reasons & HARDWARE else None


@contextmanager
def _gpu_handle() -> Iterator[tuple[Any, Any]]:
    """NVML and the handle of the GPU torch uses; (None, None) without one."""
    with _nvml() as nvml:
        torch = sys.modules.get("torch")
        if nvml is None or (torch is not None and not torch.cuda.is_available()):
            yield None, None
            return
        uuid = None if torch is None else f"GPU-{torch.cuda.get_device_properties(0).uuid}"
        device = _read(nvml, "nvmlDeviceGetHandleByUUID", uuid) if uuid else None
        yield nvml, device or nvml.nvmlDeviceGetHandleByIndex(0)


def _read(nvml: Any, query: str, *args: Any) -> Any:
    """One NVML query; None where the driver does not answer it."""
    try:
        return getattr(nvml, query)(*args)
    except (nvml.NVMLError, AttributeError):
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
    with _gpu_handle() as (nvml, device):
        if nvml is None:
            return None
        memory = _read(nvml, "nvmlDeviceGetMemoryInfo", device)
        cap_mw = _read(nvml, "nvmlDeviceGetPowerManagementLimit", device)
        return {
            "name": _read(nvml, "nvmlDeviceGetName", device),
            "driver": _read(nvml, "nvmlSystemGetDriverVersion"),
            "memory_bytes": None if memory is None else int(memory.total),
            "power_cap_w": None if cap_mw is None else cap_mw / 1000,
            "max_clock_mhz": _read(nvml, "nvmlDeviceGetMaxClockInfo", device, nvml.NVML_CLOCK_SM),
        }


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

"""The checks of a GPU: its limits, its clock and who else uses it under load, its speed."""

import os
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch

from mtbench.doctor.checks import REPORT, Figures, Finding, Subject, check
from mtbench.document.formatting import count, listed, memory, percent
from mtbench.hardware import machine, probe

LEAST_RATED, USUAL_RATED, MOST_RATED = 0.5, 0.75, 1.05  # of the speed that the memory is rated for
UNKNOWN = "the driver does not tell"


def _gpu(_: Subject) -> Figures:
    found: Any = torch.cuda.get_device_properties(0)
    driver = machine.gpu()
    return {
        "name": found.name,
        "driver": None if driver is None else driver.describe()["driver"],
        "capability": 10 * found.major + found.minor,
        "shared_bytes": found.shared_memory_per_block_optin,
        "free_bytes": torch.cuda.mem_get_info()[0],
    }


@check("GPU", _gpu, gpu=True)
def gpu(name: str, driver: str | None, capability: int, shared_bytes: int, free_bytes: int) -> Finding:
    """A run cannot use values that the driver does not report, such as those of a part of a GPU (MIG)."""
    text = f"{name}, driver {driver or 'unknown'}, sm_{capability}, {memory(shared_bytes)} shared memory per block, "
    text += f"{memory(free_bytes)} free"
    if capability < 80:
        return Finding("warn", f"{text}; it has no bfloat16", "pass `--dtype float16`")
    if "MIG" in name.split():
        return Finding("warn", f"{text}; a part (MIG): its clock and neighbours are unknown", "take a whole GPU")
    if driver is None:
        text += "; NVML does not answer: its clock and other processes are unknown"
        return Finding("warn", text, "install libnvidia-ml; containers: NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    return Finding("pass", text)


def _compilers(_: Subject) -> Figures:
    c = next(filter(None, map(which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    return {"missing": [*([] if find_spec("triton") else ["Triton"]), *([] if c else ["a C compiler"])]}


@check("compilers", _compilers, gpu=True)
def compilers(missing: Sequence[str]) -> Finding:
    """Triton compiles kernels, a C compiler what launches them."""
    if not missing:
        return Finding("pass", "Triton and a C compiler")
    text = f"missing: {listed(missing)}. PyTorch's operations run in place of mtbench's kernels, slower"
    return Finding("warn", text, "`pip install triton`, `apt install gcc`")


@cache
def under_load() -> tuple[dict[str, Any], probe.Probe | None, str | None]:
    """Return the machine's state while the probe keeps the GPU busy, and the probe's figures."""
    before = machine.sample("cuda")
    probed, reason = probe.probe("cuda", torch.bfloat16)
    return machine.window(before, machine.sample("cuda")), probed, reason


def _clock(_: Subject) -> Figures | str:
    window, driver = under_load()[0], machine.gpu()
    if driver is None or window["throttle"] is None:
        return UNKNOWN
    figures = {name: window[name] for name in ("clock_mhz", "temperature_c", "throttle", "shared")}
    return figures | {"most_mhz": driver.describe()["max_clock_mhz"]}


@check("clock", _clock, gpu=True)
def clock(
    clock_mhz: int | None, most_mhz: int | None, temperature_c: int | None, throttle: int, shared: bool | None
) -> Finding:
    """`throttle`: NVML's bits. A driver that slows hot hardware sets the bit for hardware, too."""
    text = f"{count(clock_mhz)} of {count(most_mhz)} MHz under load, {temperature_c} °C"
    if throttle & machine.THERMAL:
        return Finding("fail", f"{text}, slowed by heat", "cool it: `nvidia-smi -q -d TEMPERATURE,PERFORMANCE`")
    if throttle & machine.HARDWARE:
        return Finding("fail", f"{text}, slowed by the hardware", "check the power: `nvidia-smi -q -d PERFORMANCE`")
    if shared:
        return Finding("fail", f"{text}; another process uses it", "`nvidia-smi` lists processes: end them")
    return Finding("pass", f"{text}, at the power cap" if throttle & machine.POWER_CAP else text)


def _speed(_: Subject) -> Figures | str:
    probed, reason = under_load()[1:]
    driver = machine.gpu()
    if probed is None:
        return str(reason)
    rated = None if driver is None else driver.rated_bytes_per_s()
    rates = {"bytes_per_s": probed.most_bytes_per_s, "matmul_flop_per_s": probed.matmul_flop_per_s}
    return rates | {"rated_bytes_per_s": rated}


@check("GPU's speed", _speed, gpu=True)
def speed(bytes_per_s: float, matmul_flop_per_s: float, rated_bytes_per_s: float | None) -> Finding:
    """The roofline of a run rests on the measured speeds of memory and of a large product."""
    text = f"products {matmul_flop_per_s / 1e12:,.0f} TFLOP/s in bfloat16; memory {bytes_per_s / 1e12:.2f} TB/s"
    if not rated_bytes_per_s:
        return Finding("pass", f"{text}; what it is rated for, the driver does not tell")
    share = bytes_per_s / rated_bytes_per_s
    text += f", {percent(share, 0)} % of what it is rated for"
    if not LEAST_RATED <= share <= MOST_RATED:
        return Finding("fail", text, f"end other processes, reset clocks (`nvidia-smi -rmc`); if it stays, {REPORT}")
    return Finding("pass", text) if share >= USUAL_RATED else Finding("warn", text, "reset clocks: `nvidia-smi -rmc`")

"""The machine of a run, and its GPU's state during each timed window. Unavailable values are None.

The GPU is read through NVML (docs.nvidia.com/deploy/nvml-api); no setting is changed.
"""

import atexit
import json
import os
import platform
import subprocess
import sys
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mtbench.programs.machine_share import cpu_quota, throttled_s
from mtbench.programs.processes import is_ours, processor_times
from mtbench.version import __version__

IMPORTED_S = time.monotonic()  # about when the command began
PACKAGES = ("torch", "triton", "transformers", "lm_eval", "datasets", "numpy", "scipy", "pandas", "tokenizers")


def environment(command: Sequence[str]) -> dict[str, Any]:
    """Return the contents of environment.json. Imports nothing large, since every run begins with it."""
    device, quota = gpu(), cpu_quota()
    return {
        "command": list(command),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "since_import_s": time.monotonic() - IMPORTED_S,
        "mtbench": __version__,
        "git": git_commit(Path(__file__).parent),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        **host(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        **({} if quota is None else {"cpu_quota": quota}),
        **({"load_of_others": float(seen), "waiting": waiting()} if (seen := os.environ.get(SEEN)) else {}),
        "gpu": None if device is None else device.describe(),
    }


def host() -> dict[str, str]:
    """Return the operating system with its kernel, and the name of the processor."""
    return {"platform": platform.platform(), "processor": _processor()}


# Bits of NVML's reasons for a reduced clock, nvmlClocksEventReason…
POWER_CAP = 0x04  # SwPowerCap
BRAKE = 0x80  # HwPowerBrakeSlowdown
HARDWARE = 0x08 | BRAKE  # HwSlowdown, which drivers also report while a clock changes
HEAT = 0x20  # SwThermalSlowdown
THERMAL = HEAT | 0x40  # HwThermalSlowdown
COMPUTING_SHARE = 0.75  # of the usual share of processor time: with less, a window was disturbed
POLLING_SHARE = 0.9  # of processor time, from which a thread that waits for a GPU does not sleep
RECENT = 40  # windows that define the usual share
MOST_OTHERS = 0.10  # share of the cores that other programs may use
BUSY_OTHERS = 0.25  # share of the cores that others use, from which on threads that sleep are faster
LOOK_S = 0.1  # in which the load of others is seen before a command decodes or trains
SEEN = "MTBENCH_LOAD_OF_OTHERS"  # environment variable: the load that a command saw, or nothing, for its children
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # variables: how OpenMP's threads wait for each other
PASSIVE = "OMP_WAIT_POLICY=PASSIVE"
VISIBLE = "CUDA_VISIBLE_DEVICES"  # variable: the GPUs of a process, read when something first asks CUDA
NO_PROCESSOR = "the process did not get the processor"
THROTTLED = "the CPU quota stopped the process"
MORE_QUOTA = "raise the quota, or end other programs that share it"
THROTTLED_SHARE = 0.02  # of a window that a quota may stop it: speeds that differ by less are the same
UNPAUSED = "a server that should wait computed"
UNPAUSED_S, UNPAUSED_SHARE = 0.02, 0.02  # a pause takes milliseconds; share of a window that processes may use idly
NOTICEABLE_SHARE = 1e-3  # of a window: drivers also count thermal slowdowns of "0.0 seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The state of a GPU at one time. Totals count from the start of the driver. Unavailable values are None."""

    at_s: float
    cpu_s: float  # processor time of this thread, or of this process and a server, total
    threads: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # of a server (`processor_times`)
    machine_s: float | None = None  # processor time of all programs, total; only beside a server
    throttled_s: float | None = None  # for which a CPU quota stopped this process's cgroups, total over all processors
    clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None  # the driver's reading, on most GPUs the mean of the last second
    reasons: int | None = None  # NVML's bits for a reduced clock
    holders: int | None = None  # processes that use the GPU for compute
    ours: int | None = None  # of them this command's; None: the driver does not list this process by its id
    waiting_s: Mapping[int, float] = field(default_factory=dict)  # processor time of servers that wait, by group, total
    servers: frozenset[int] = frozenset()  # groups of all that run
    energy_j: float | None = None  # total
    capped_s: float | None = None  # total time slowed by the power cap
    thermal_s: float | None = None  # total time slowed by heat


class Gpu:
    """One GPU, read through `nvml`: pynvml, or a test double with the same functions."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    def read(self, query: str, *args: Any) -> Any:
        """Return the answer to one query about this GPU; None if the driver does not support it."""
        return _ask(self.nvml, query, self.handle, *args)

    def sample(self) -> Sample:
        """Return its current state. Takes a dozen queries (about 1 ms); never call it in a timed window."""
        holders = self.holders()
        return Sample(
            at_s=time.perf_counter(),
            cpu_s=time.thread_time(),
            clock_mhz=self.read("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM),
            temperature_c=self.read("nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU),
            power_w=_scaled(self.read("nvmlDeviceGetPowerUsage"), 1e-3),
            reasons=self.read("nvmlDeviceGetCurrentClocksEventReasons"),
            holders=None if holders is None else len(holders),
            ours=sum(map(is_ours, holders)) if holders and os.getpid() in holders else None,
            energy_j=self.energy_j(),
            capped_s=self._slowed_s(self.nvml.NVML_PERF_POLICY_POWER),
            thermal_s=self._slowed_s(self.nvml.NVML_PERF_POLICY_THERMAL),
        )

    def energy_j(self) -> float | None:
        """Return the joules since the start of the driver. The counter updates every 20 to 100 ms."""
        return _scaled(self.read("nvmlDeviceGetTotalEnergyConsumption"), 1e-3)

    def rated_bytes_per_s(self) -> float | None:
        """Return the speed of its memory by clock and bus, two transfers a clock; None if the driver has none."""
        clock_mhz = self.read("nvmlDeviceGetMaxClockInfo", self.nvml.NVML_CLOCK_MEM)
        bus_bits = self.read("nvmlDeviceGetMemoryBusWidth")
        return 2e6 * clock_mhz * bus_bits / 8 if clock_mhz and bus_bits else None

    def describe(self) -> dict[str, Any]:
        """Return its entry in environment.json."""
        memory = self.read("nvmlDeviceGetMemoryInfo")
        return {
            "name": self.read("nvmlDeviceGetName"),
            "uuid": self.read("nvmlDeviceGetUUID"),
            "driver": _ask(self.nvml, "nvmlSystemGetDriverVersion"),
            "memory_bytes": None if memory is None else int(memory.total),
            "power_cap_w": _scaled(self.read("nvmlDeviceGetEnforcedPowerLimit"), 1e-3),
            "max_clock_mhz": self.read("nvmlDeviceGetMaxClockInfo", self.nvml.NVML_CLOCK_SM),
        }

    def holders(self) -> set[int] | None:
        """Return the processes that use the GPU for compute. In a container maybe none, or ids of another namespace."""
        found = self.read("nvmlDeviceGetComputeRunningProcesses")
        return None if found is None else {process.pid for process in found}

    def _slowed_s(self, policy: int) -> float | None:
        # An older query than field values: the field ids of the newer counters differ between drivers.
        status = self.read("nvmlDeviceGetViolationStatus", policy)
        return None if status is None else float(status.violationTime) * 1e-9


def sample(device: str, servers: Collection[int] | None = None, waiting: Collection[int] = ()) -> Sample:
    """Return the state of the GPU if `device` is `cuda`; for a CPU, only the times.

    `servers`: groups of the processes that compute for this one, none before they start; None: this thread computes.
    `waiting`: groups of servers that are paused.
    """
    device_read = gpu() if device == "cuda" else None
    state = Sample(at_s=time.perf_counter(), cpu_s=time.thread_time()) if device_read is None else device_read.sample()
    state = replace(state, throttled_s=throttled_s(), servers=frozenset([*(servers or ()), *waiting]))
    if not Path("/proc/stat").exists():
        return state
    of_groups = processor_times(state.servers) if state.servers else {}
    state = replace(state, waiting_s={group: of_groups[group][0] for group in waiting})
    if servers is None:
        return state
    times = [(time.process_time(), {}), *(of_groups[group] for group in servers)]
    threads = {name: spent for _, of_group in times for name, spent in of_group.items()}
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    machine_s = (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
    return replace(state, cpu_s=sum(used_s for used_s, _ in times), threads=threads, machine_s=machine_s)


def load_of_others(seconds: float) -> tuple[float, float] | None:
    """Return the shares of the cores that other programs, and other virtual machines, use in the next seconds.

    None if that is not known.
    """
    if not Path("/proc/stat").exists():
        return None
    before, own_s = _ticks(), time.process_time()
    time.sleep(seconds)
    total, idle, stolen = (b - a for a, b in zip(before, _ticks(), strict=True))
    own = (time.process_time() - own_s) * os.sysconf("SC_CLK_TCK")
    return (max(0.0, total - idle - stolen - own) / total, stolen / total) if total > 0 else None


def choose_waiting(resumed: Path | None = None) -> None:
    """Choose how OpenMP's threads wait for each other, in this process and its children, before torch is imported.

    By default they spin, which is fastest on a quiet machine. Beside other programs they sleep: a thread that spins
    takes the processor from the one it waits for. A choice of the user is kept, and that of the run in the directory
    `resumed`, so that its blocks compare. Nothing changes if torch is imported, or if the load is not known.
    """
    if SEEN in os.environ:
        return
    shares = None if "torch" in sys.modules else load_of_others(LOOK_S)
    os.environ[SEEN] = "" if shares is None else f"{shares[0]:.2f}"
    before = _stored_waiting(resumed)
    if shares is not None and not waiting() and (shares[0] >= BUSY_OTHERS if before is None else PASSIVE in before):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def waiting() -> str:
    """Return the variables that say how OpenMP's threads wait for each other; empty: there is none, and they spin."""
    return " ".join(f"{name}={os.environ[name]}" for name in WAITING if name in os.environ)


def waits_passively(waiting: str | None, threads: int | None) -> bool:
    """Return whether so many threads with these variables sleep while they wait for each other."""
    return PASSIVE in (waiting or "").upper() and (threads or 1) > 1


def _stored_waiting(directory: Path | None) -> str | None:
    """Return how threads waited in a run, by default as OpenMP does; None: nothing ran. Files are checked later."""
    for file in () if directory is None else directory.rglob("environment.json"):  # a gate has them in its folders
        with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
            stored = json.loads(file.read_text(encoding="utf-8"))
            begun = stored.get("sessions") or ([stored] if "waiting" in stored else [])
            return str(begun[0].get("waiting", ""))
    return None


def _ticks() -> tuple[int, int, int]:
    """Return the ticks of the cores that this process may use: all, idle, stolen (proc(5))."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in Path("/proc/stat").read_text(encoding="ascii").splitlines()]
    ticks = [[int(count) for count in counts[:8]] for name, *counts in lines if name in cores]
    return sum(map(sum, ticks)), sum(core[3] + core[4] for core in ticks), sum(core[7] for core in ticks)


def processor(before: Sample, after: Sample) -> tuple[float, float]:
    """Return the processor time between two samples, and the time in which the processor was wanted.

    A thread that decodes wants it all the time. In a server that is the thread which computed and waited longest: in
    its proportion the server's time is what the server wanted. But at most what other programs had is missing, since
    its threads also wait for each other.
    """
    cpu_s = max(0.0, after.cpu_s - before.cpu_s)  # that of a process which has ended is missing
    if (used_s := _growth(before.machine_s, after.machine_s)) is None:
        return cpu_s, after.at_s - before.at_s
    computed, waited = _decoding_thread(before, after)
    return cpu_s, cpu_s + max(0.0, min(cpu_s * waited / max(computed, 1), used_s - cpu_s))


def is_throttled(before: Sample, after: Sample) -> bool:
    """Return whether a CPU quota stopped the thread that decodes for a noticeable part of the time between samples.

    The kernel adds up the stops on all processors. Those of this thread are at most the time for which it waited.
    """
    wall_s, (cpu_s, _) = after.at_s - before.at_s, processor(before, after)
    waited_s = wall_s - cpu_s if after.machine_s is None else _decoding_thread(before, after)[1] * 1e-9
    return min(waited_s, _growth(before.throttled_s, after.throttled_s) or 0.0) > THROTTLED_SHARE * wall_s


def _decoding_thread(before: Sample, after: Sample) -> tuple[int, int]:
    """Return the time on a processor and that of waiting for one, in nanoseconds, of a server's busiest thread."""
    grown = [(c - c0, w - w0) for t, (c, w) in after.threads.items() for c0, w0 in [before.threads.get(t, (0, 0))]]
    return max(grown, key=sum, default=(1, 0))


def processor_shares(before: Sample, after: Sample, cell: str | None) -> dict[tuple[bool, str | None], float]:
    """Return shares of processor time between two samples: of what was wanted and, of a server, of the whole window.

    The keys tell what is compared: windows of servers or of this process; of one cell, or of all (None), which is
    right for threads that never sleep. `cell`: of the windows; None: its thread never sleeps.
    """
    cpu_s, wanted_s = processor(before, after)
    served = after.machine_s is not None  # time for which a server waited for the processor
    shares = {(served, None if served else cell): cpu_s / max(wanted_s, 1e-9)}
    if served and cell is not None:  # a server that is stopped neither computes nor waits
        shares[True, cell] = min(1.0, sum(_decoding_thread(before, after)) * 1e-9 / (after.at_s - before.at_s))
    return shares


class ProcessorShares:
    """The shares of processor time that windows got, by what is compared (`processor_shares`).

    On a CPU a thread that decodes wants the processor all the time, whatever it decodes. Beside a GPU or another's
    server it may sleep while it waits: there a share is evidence only if the same cell's windows show that it does not.
    """

    def __init__(self) -> None:
        self._recent: dict[tuple[bool, str | None], deque[float]] = {}

    def usual(self, of: tuple[bool, str | None], least: float = POLLING_SHARE) -> float | None:
        """Return the share that four of five recent windows reach; None if it is no evidence.

        least: share of a cell's windows that is evidence.

        Low, so that on a machine that is busy all the time few windows lie far below it.
        """
        recent = sorted(self._recent.get(of, ()))
        share = recent[len(recent) // 5] if recent else None
        return None if share is None or (of[1] is not None and share < least) else share

    def lacking(self, shares: Mapping[tuple[bool, str | None], float], least: float = POLLING_SHARE) -> bool:
        """Return whether a window had far less than a usual share; remember its shares."""
        usual = {of: self.usual(of, least) for of in shares}
        for of, share in shares.items():
            self._recent.setdefault(of, deque(maxlen=RECENT)).append(share)
        return any(least is not None and shares[of] < COMPUTING_SHARE * least for of, least in usual.items())


class Strangers:
    """Tells whether processes that are not of this command hold the GPU, in windows one after the other.

    Where the driver lists ids of another namespace, numbers tell. This process holds the GPU, and so does each of its
    servers. What comes or goes while one of them starts or ends belongs to it; what else comes is a stranger.

    `in_turns`: another process of this command decodes between the windows. By numbers all is ours that it leaves.
    """

    def __init__(self, *, in_turns: bool = False) -> None:
        self.in_turns, self._ours, self._last = in_turns, 1, Sample(at_s=0.0, cpu_s=0.0)

    def held(self, before: Sample, after: Sample) -> bool | None:
        """Return whether a stranger held the GPU at an end of the window; None: no process is listed."""
        if self.in_turns:
            self._last, self._ours = before, before.holders or 0
        known = [self._is_held(sample) for sample in (before, after) if sample.holders]
        return any(known) if known else None

    def _is_held(self, sample: Sample) -> bool:
        last, self._last, holders = self._last, sample, sample.holders or 0
        if sample.servers != last.servers:
            self._ours += holders - (last.holders or 0)
        self._ours = max(1 + len(sample.servers), min(self._ours, holders))
        return holders > (sample.ours or self._ours)


def unseen(device: str) -> str | None:
    """Return why it is not known who else uses the GPU, once this process uses it; None: it is known, or on a CPU."""
    if device != "cuda" or ((found := gpu()) is not None and found.holders()):
        return None
    return "NVML does not answer" if found is None else "NVML lists no process, as in some containers"


def window(before: Sample, after: Sample, *, lacking: bool = False, others: Strangers | None = None) -> dict[str, Any]:
    """Return a timing line's entries about the machine for the window between two samples.

    `others`: as the windows before saw them; None: there was none, and no server runs.
    `lacking`: it had far less than its usual share of processor time (`ProcessorShares`).
    `dropped`: why the time is not valid, or None. Clock and temperature are those at the end, before the GPU cools.
    Power is the energy counter's mean if the window has at least a second, else the driver's reading, which is a mean
    of the last second. `throttle`: bits set at the end, slowdowns active at the start, and those that the driver's
    counters recorded in between.
    """
    wall_s = after.at_s - before.at_s
    energy_j = _growth(before.energy_j, after.energy_j)
    capped_s, thermal_s = _growth(before.capped_s, after.capped_s), _growth(before.thermal_s, after.thermal_s)
    throttle_known = any(value is not None for value in (before.reasons, after.reasons, capped_s, thermal_s))
    throttle = (after.reasons or 0) | ((before.reasons or 0) & (BRAKE | THERMAL))
    if capped_s is not None and capped_s > NOTICEABLE_SHARE * wall_s:
        throttle |= POWER_CAP
    if thermal_s is not None and thermal_s > NOTICEABLE_SHARE * wall_s:
        throttle |= HEAT
    shared = (others or Strangers()).held(before, after)
    cpu_s, wanted_s = processor(before, after)
    causes = {UNPAUSED: _unpaused(before, after), THROTTLED: is_throttled(before, after), NO_PROCESSOR: lacking}
    stopped = next((cause for cause, holds in causes.items() if holds), None)
    return {
        "cpu_s": cpu_s,
        "wanted_s": None if after.machine_s is None else wanted_s,
        "clock_mhz": after.clock_mhz,
        "temperature_c": after.temperature_c,
        "power_w": after.power_w if energy_j is None or wall_s < 1 else energy_j / wall_s,
        "throttle": throttle if throttle_known else None,
        "shared": shared,
        "dropped": stopped or _contamination(throttle, bool(shared)),
    }


def _unpaused(before: Sample, after: Sample) -> bool:
    """Return whether a server that waited for the whole window computed. A kernel on a GPU needs a thread, too."""
    spent_s = [used_s - before.waiting_s.get(group, used_s) for group, used_s in after.waiting_s.items()]
    return max(spent_s, default=0.0) > max(UNPAUSED_S, UNPAUSED_SHARE * (after.at_s - before.at_s))


def _contamination(throttle: int, shared: bool) -> str | None:
    """Return which cause from outside makes the time of a window invalid, or None.

    Heat is no such cause: an arm that works the device hard makes it itself, so the cell is flagged instead. A driver
    that slows hot hardware sets the bit for hardware, too.
    """
    if shared:
        return "device shared with another process"
    hot = bool(throttle & THERMAL)
    return "hardware slowdown" if throttle & (BRAKE if hot else HARDWARE) else None


def gpu() -> Gpu | None:
    """Return the GPU that torch uses; before torch uses one, the first visible one. None without a GPU or NVML."""
    torch = sys.modules.get("torch")
    if _nvml() is None or (torch is not None and not torch.cuda.is_available()):
        return None
    if torch is None or not torch.cuda.is_initialized():  # to ask for its id would make a context
        return gpu_by_id(os.environ.get(VISIBLE, "0").partition(",")[0])
    uuid = torch.cuda.get_device_properties(0).uuid
    return gpu_by_id(f"GPU-{uuid}") or gpu_by_id(f"MIG-{uuid}")  # a part has an id of its own


@cache
def gpu_by_id(name: str) -> Gpu | None:
    """Return the GPU with this id, or index among all GPUs; None if the driver knows no such GPU."""
    nvml, which = _nvml(), int(name) if name.isdecimal() else name
    query = "nvmlDeviceGetHandleByUUID" if which == name else "nvmlDeviceGetHandleByIndex"
    handle = None if nvml is None else _ask(nvml, query, which)
    return None if handle is None else Gpu(nvml, handle)


@cache
def _nvml() -> Any:
    """Return NVML, initialised once per process; None without the library, a driver or a GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # ImportError, or any error of NVML
        return None
    atexit.register(pynvml.nvmlShutdown)
    return pynvml


def _ask(nvml: Any, query: str, *args: Any) -> Any:
    """Return the answer to a query; None if the driver or the library does not support it."""
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


def git_commit(folder: Path) -> str | None:
    """Return the commit of the checkout that `folder` is part of, with `-dirty` if files differ from it.

    None outside a checkout, or if git does not track the folder: an environment may lie inside a checkout.
    """
    describe = ("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")  # exclude: no tag instead of a commit
    return _git(folder, *describe) if _git(folder, "ls-files", "--", ".") else None


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (done.stdout.strip() or None) if done.returncode == 0 else None


def _processor() -> str:
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

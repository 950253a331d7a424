"""The checks of every machine: versions, processor, the load of others, steady times."""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from mtbench.doctor.checks import Figures, Finding, Subject, check
from mtbench.document.formatting import counted, percent, seconds
from mtbench.hardware import machine, probe
from mtbench.measure.model_pool import usable_threads
from mtbench.models.auto import computes_bfloat16
from mtbench.programs.machine_share import cpu_quota, usable_processors
from mtbench.version import __version__

LOAD_S = 2.0  # over which the load of others is counted
MOST_STOLEN, NOTICEABLE_OTHERS = 0.02, 0.03  # shares of the cores
LAPS, PRODUCTS = 100, {"cpu": 2, "cuda": 100}  # laps, and products of matrices in each
MOST_UNCOMPILED = 0.05  # share of the imported modules
SLOW = 1.1  # times the median
MOST_SLOW, NOTICEABLE_SLOW = 0.20, 0.05  # shares of the laps
QUIET = "stop other programs, or use another machine; then run `mtbench doctor` again"


def _software(subject: Subject) -> Figures:
    gpu = machine.gpu_by_id("0") if subject.device == "cpu" and subject.option != "cpu" else None
    specs = [getattr(module, "__spec__", None) for module in [*sys.modules.values()]]
    compiled = [Path(spec.cached).is_file() for spec in specs if spec is not None and spec.cached]
    figures = {"unused": gpu and gpu.describe()["name"], "uncompiled": compiled.count(False) / len(compiled)}
    return {"versions": f"mtbench {__version__}, torch {torch.__version__}", **figures}


@check("versions", _software)
def software(versions: str, unused: str | None, uncompiled: float) -> Finding:
    """`unused`: a GPU that the driver knows, not torch. `uncompiled`: share of modules without bytecode."""
    if unused is not None:
        advice = "install torch's build for CUDA, or unset CUDA_VISIBLE_DEVICES; `--device cpu` measures the processor"
        return Finding("fail", f"{versions} does not use the {unused}: a run would measure the processor", advice)
    if uncompiled <= MOST_UNCOMPILED:
        return Finding("pass", versions)
    text = f"{versions}; every start compiles {percent(uncompiled, 0)} % of the modules, which have no bytecode"
    return Finding("warn", text, "unset PYTHONDONTWRITEBYTECODE, or set PYTHONPYCACHEPREFIX to a folder of yours")


def _processor(_: Subject) -> Figures:
    counts = {"cores": usable_processors(), "threads": usable_threads(), "quota": cpu_quota()}
    return {"name": machine.host()["processor"], **counts, "bfloat16": computes_bfloat16()}


@check("processor", _processor)
def processor(name: str, cores: int, threads: int, bfloat16: bool, quota: float | None) -> Finding:
    """A quota of less than one core stops every thread again and again."""
    has = "with" if bfloat16 else "without"
    text = f"{name}, {has} bfloat16; {counted(cores, 'core')}, {counted(threads, 'thread')}"
    text += "" if quota is None else f", CPU quota of {quota:g} cores"
    if quota is not None and quota < 1:
        return Finding("fail", text, "raise the quota to one core or more: samples that it stops do not count")
    return Finding("pass", text)


def _load(_: Subject) -> Figures | str:
    shares = machine.load_of_others(LOAD_S)
    if shares is None:
        return "the load of others is known on Linux only, where /proc/stat counts it"
    return dict(zip(("others", "stolen"), shares, strict=True))


@check("other load", _load)
def load(others: float, stolen: float) -> Finding:
    """Other programs lengthen times. `stolen`: by other virtual machines on the same hardware."""
    text = f"others use {percent(others)} % of the cores; {percent(stolen)} % are stolen by other virtual machines"
    if stolen > MOST_STOLEN:
        return Finding("fail", text, "use a machine that shares its cores with nobody")
    return _graded(others, NOTICEABLE_OTHERS, machine.MOST_OTHERS, text)


def _graded(share: float, noticeable: float, most: float, text: str) -> Finding:
    if share <= noticeable:
        return Finding("pass", text)
    return Finding("fail" if share > most else "warn", text, QUIET)


def _laps(subject: Subject) -> Figures:
    square, products = torch.randn(512, 512, device=subject.device), range(PRODUCTS[subject.device])
    torch.set_num_threads(usable_threads())  # as in a run
    before = machine.sample("cpu")
    laps_s = probe.laps_s(square.device, lambda: [square @ square for _ in products], LAPS)
    return {"laps_s": laps_s, "throttled": machine.is_throttled(before, machine.sample("cpu"))}


@check("steady times", _laps)
def laps(laps_s: Sequence[float], throttled: bool) -> Finding:
    """Equal work must take equal time."""
    usual_s = median(laps_s)
    share = sum(lap_s > SLOW * usual_s for lap_s in laps_s) / len(laps_s)
    text = f"{percent(share)} % of {len(laps_s)} equal laps of {seconds(usual_s)} are over {SLOW:g} times the median"
    if throttled:
        return Finding("fail", f"{text}: {machine.THROTTLED}", machine.MORE_QUOTA)
    return _graded(share, NOTICEABLE_SLOW, MOST_SLOW, text)

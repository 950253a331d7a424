"""The checks of the installation: the cache folder's disk, the sandbox, the suites' data, serving engines."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shutil import disk_usage

from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.doctor.checks import Figures, Finding, Subject, check
from mtbench.document.formatting import listed, memory
from mtbench.evaluation import sandbox
from mtbench.evaluation.registry import SUITES
from mtbench.files import cache_home

FEW_BYTES = 10 << 30  # of free disk


def _disk(_: Subject) -> Figures:
    there = next(path for path in (cache_home(), *cache_home().parents) if path.is_dir())
    return {"folder": str(cache_home()), "free_bytes": disk_usage(there).free, "writable": os.access(there, os.W_OK)}


@check("cache folder", _disk)
def disk(folder: str, free_bytes: int, writable: bool) -> Finding:
    """Models and engines need gigabytes."""
    text = f"{folder}, {memory(free_bytes)} free"
    if not writable:
        return Finding("warn", f"{text}, cannot be written", "set XDG_CACHE_HOME to a folder of yours")
    if free_bytes < FEW_BYTES:
        return Finding("warn", text, "make room, or set XDG_CACHE_HOME to a folder on a larger disk")
    return Finding("pass", text)


@check("sandbox", lambda _: {"reason": sandbox.unavailable()})
def sandboxed(reason: str | None) -> Finding:
    """Suites of code run programs that a model wrote. `reason`: why there is no sandbox."""
    text, _, advice = (reason or "").partition(": ")
    return Finding("warn", text, advice) if reason else Finding("pass", "bubblewrap confines generated programs")


def _data(subject: Subject) -> Figures | str:
    if subject.data_dir is None:
        return "no --data-dir: suites are read from the hub's cache, or downloaded"
    folder = Path(subject.data_dir)
    return {"folder": str(folder), "suites": [name for name in SUITES if (folder / name).is_dir()]}


@check("data folder", _data)
def data(folder: str, suites: Sequence[str]) -> Finding:
    """It has a folder for each suite."""
    if suites:
        return Finding("pass", f"{folder} has {listed(suites)}")
    return Finding("warn", f"{folder} has no suite's folder", "`mtbench ls suites NAME` names the files of a suite")


def _engines(_: Subject) -> Figures | str:
    there = {name: SERVING_ENGINES[name].state() for name in SERVING_ENGINES if SERVING_ENGINES[name].installed()}
    return {"releases": there} if there else "none is installed; `mtbench fetch engine NAME` installs one"


@check("serving engines", _engines)
def engines(releases: Mapping[str, str]) -> Finding:
    """They are optional."""
    return Finding("pass", listed(f"{name} {release}" for name, release in releases.items()))

"""Whole runs, from plan to results.json, and their parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import stages
from rich.console import Console
from stages import assemble, begin_run, generate, score

from mtbench import plugins
from mtbench.hardware import machine
from mtbench.lineup.planner import make_plan
from mtbench.measure import workers
from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Cell, Plan, RunRequest
from mtbench.plan.request import Execution
from mtbench.records import dump
from mtbench.report.progress import RunProgress


def whole_run(folder: Path, request: RunRequest) -> RunDirectory:
    """Do what `mtbench run` does, without the pages."""
    run = start(folder / "run", request)
    with RunProgress(Console(quiet=True)) as progress:
        stages.finish(run, Execution(), progress)
    return run


def start(path: Path, request: RunRequest) -> RunDirectory:
    return begin_run(path, make_plan(request), ["mtbench", "run"])


def finish(run: RunDirectory) -> dict[str, Any]:
    """Generate, score and aggregate; return results.json."""
    generate(run, Quiet())
    score(run)
    return dump(assemble(run))


def cells_of(results: Any, batch_size: int = 3) -> dict[str, Any]:
    """The cells of one batch size, by arm."""
    return {c["arm"]: c for c in results["cells"] if c["batch_size"] == batch_size}


def forget_plugin_files() -> None:
    """Leave what another process has: our own methods and suites, and those of installed packages."""
    for file in plugins.loaded():
        plugins._forget(file)


def plan_of(limit: int) -> Plan:
    """The embedded family on its own suite, batch size 1."""
    return make_plan(RunRequest(limit=limit, batch_size=(1,), method=("ar", "mars")))


@dataclass
class Quiet:
    """Progress that shows nothing and raises KeyboardInterrupt after `until` batches."""

    until: int = -1
    batches: int = 0

    def begin(self, cells: int, work: int, until: float, *_: Any) -> None: ...
    def skip(self, work: int) -> None: ...

    def decoded(self, cell: Cell, index: int, rows: int, timing: Mapping[str, Any] | None) -> None:
        self.batches += 1
        if self.batches == self.until:
            raise KeyboardInterrupt

    def note(self, text: str) -> None: ...
    def show(self, text: str) -> None: ...


TIMES = {"command", "environment", "tokens_per_s", "parts", "factors", "peak_memory_bytes"}
TIMES |= {"stops_paying", "plain", "run_id", "decode"}
SPEEDUPS = {"value", "ci_low", "ci_high", "ci_repeat", "rate_ratio", "rate_ratio_ci", "verdict"}


def figures(value: Any) -> Any:
    """Return results without the figures that a clock or a memory gauge measures."""
    if isinstance(value, dict):
        if "flags" in value:
            value = value | {"flags": [flag for flag in value["flags"] if not flag.startswith("shared processor")]}
        timed = TIMES | (SPEEDUPS if "verdict" in value and "difference" not in value else set())  # not of accuracies
        return {k: figures(v) for k, v in value.items() if k not in timed and not k.endswith("_s")}
    return [figures(v) for v in value] if isinstance(value, list) else value


def serve_busily(*arguments: Any) -> None:
    """A worker's process on a busy machine: no sample is dropped because it had to wait."""
    machine.COMPUTING_SHARE = 0.0
    machine.THROTTLED_SHARE = float("inf")
    workers._serve(*arguments)

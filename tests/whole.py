"""A whole run, from plan to results.json, without its pass for peak memory (a process for each cell)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from mtbench.report.progress import RunProgress
from mtbench.results.aggregate import assemble
from mtbench.runs.directory import RunDirectory
from mtbench.runs.executor import generate
from mtbench.runs.plan import Cell, RunRequest
from mtbench.runs.planner import begin_run, make_plan
from mtbench.runs.score import score


def whole_run(folder: Path, request: RunRequest) -> RunDirectory:
    """As `mtbench run` makes it; its figures of peak memory are null."""
    plan = make_plan(request)
    run = begin_run(folder / "run", plan, ["mtbench", "run"])
    run.write_json("memory.json", {cell.cell: None for cell in plan.cells})
    with RunProgress(Console(quiet=True)) as progress:
        generate(run, progress)
    score(run)
    assemble(run)
    return run


@dataclass
class Quiet:
    """Progress that says nothing and, after `until` batches, dies."""

    until: int = -1

    def begin(self, cells: int, work: int) -> None: ...

    def decoded(self, cell: Cell, index: int, rows: int, timing: Mapping[str, Any] | None) -> None:
        self.until -= 1
        if self.until == 0:
            raise KeyboardInterrupt

    def note(self, text: str) -> None: ...


TIMES = {"command", "environment", "tokens_per_s", "decode_tokens_per_s", "parts", "factors", "peak_memory_bytes"}
TIMES |= {"stops_paying", "plain"}
SPEEDUPS = {"value", "ci_low", "ci_high", "ci_repeat", "rate_ratio", "rate_ratio_ci", "verdict"}


def figures(value: Any) -> Any:
    """Results without whatever a clock or a memory gauge decides."""
    if isinstance(value, dict):
        timed = TIMES | (SPEEDUPS if "length_ratio" in value else set())
        return {k: figures(v) for k, v in value.items() if k not in timed and not k.endswith("_s")}
    return [figures(v) for v in value] if isinstance(value, list) else value

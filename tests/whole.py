"""A whole run, from plan to results.json, without its pass for peak memory (a process for each cell)."""

from pathlib import Path

from rich.console import Console

from mtbench.generate import generate
from mtbench.machine import environment
from mtbench.plan import Request
from mtbench.planning import make_plan
from mtbench.progress import RunProgress
from mtbench.results import assemble
from mtbench.rundir import RunDirectory
from mtbench.score import score


def whole_run(folder: Path, request: Request) -> RunDirectory:
    """As `mtbench run` makes it; its figures of peak memory are null."""
    plan, run = make_plan(request), RunDirectory.create(folder / "run")
    run.write_json("environment.json", environment(["mtbench", "run"]))
    run.write_json("plan.json", plan.to_json())
    run.write_json("memory.json", {cell.cell: None for cell in plan.cells})
    with RunProgress(Console(quiet=True)) as progress:
        generate(run, progress)
    score(run)
    assemble(run)
    return run

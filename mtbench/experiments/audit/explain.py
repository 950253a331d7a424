"""What other experiments say beside the word divergent, or changed: an audit of the two arms, in one sentence."""

import shutil
from collections.abc import Callable
from pathlib import Path

from mtbench.document.console import Terminal
from mtbench.errors import UserError
from mtbench.experiments.audit.experiment import EXPERIMENT
from mtbench.experiments.audit.request import AuditSession
from mtbench.experiments.experiment import begin, carry_out
from mtbench.records import dump
from mtbench.report.phrases import breaks_promise
from mtbench.results.format import Results
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import RescoringRecord
from mtbench.runs.plan_checks import read_plan

FOLDER = "audits"  # of a run or a gate; an audit for each cell


def why(a: str, b: str, out: Path, *, device: str = "auto", offline: bool = False) -> str:
    """Audit A and B in a new directory `out`; return what was found and where it stands, or why it could not be."""
    shutil.rmtree(out, ignore_errors=True)
    given = {"a": a, "b": b, "device": device, "offline": offline}
    quiet = Terminal(stderr=True, quiet=True)
    try:
        job = begin(EXPERIMENT, given, AuditSession(out=str(out)), quiet, lambda _: None, ["mtbench", "audit", a, b])
        found = carry_out(EXPERIMENT, job)
    except UserError as error:
        return f"`mtbench audit {a} {b}` cannot say why: {error}"
    what = "no fault" if found.explained else "a fault, or what nothing explains"
    return f"an audit finds {what}: {found.sentence} See {out.parent.name}/{out.name}/{EXPERIMENT.page}."


def explain(run: RunDirectory, results: Results, note: Callable[[str], None]) -> bool:
    """Audit the cells that break their promise and are not audited yet; return whether there were any."""
    due = [cell for cell in results.cells if breaks_promise(cell) and cell.lossless and cell.lossless.why is None]
    for cell in due:
        assert cell.lossless is not None
        name = f"lossless/{cell.cell}.json"
        if not run.has(name):
            continue
        note(f"{cell.cell} is divergent; `mtbench audit` looks for the reason")
        asked = read_plan(run).request
        sides = f"{run.path}:{cell.lossless.against}", f"{run.path}:{cell.cell}"
        found = why(*sides, run.path / FOLDER / cell.cell, device=asked.device, offline=asked.offline)
        run.write_json(name, dump(run.read(name, RescoringRecord).changed(why=found)))
    return bool(due)

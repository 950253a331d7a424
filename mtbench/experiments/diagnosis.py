"""The sentence of run, choose and gate on a divergent or changed cell: an audit of its two arms.

The audit is looked up by name, so that only a process with such a cell imports it.
"""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from mtbench.document.console import Terminal
from mtbench.experiments.experiment import begin, carry_out
from mtbench.experiments.registry import experiment_of
from mtbench.plan.formats import RescoringRecord
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.report.phrases import breaks_promise
from mtbench.results.format import Results

FOLDER = "audits"  # of a run or a gate; an audit for each cell


def why(a: str, b: str, out: Path, *, device: str = "auto", offline: bool = False) -> str:
    """Audit A and B in the directory `out`; return the finding and its path, or why there is none.

    An interrupted audit there is resumed.
    """
    audit = experiment_of("audit")
    given = {"a": a, "b": b, "device": device, "offline": offline}
    quiet, argv = Terminal(stderr=True, quiet=True), ["mtbench", "audit", a, b]
    try:
        session = audit.session(out=str(out), resume=out.is_dir())
        found = carry_out(audit, begin(audit, given, session, quiet, lambda _: None, argv))
    except Exception as error:  # also any fault of the model's code
        return f"`mtbench audit {a} {b}` cannot say why: {error}"
    what = "no fault" if found.explained else "a fault, or what nothing explains"
    return f"an audit finds {what}: {found.sentence} See {out.parent.name}/{out.name}/{audit.page}."


def explain(run: Run, results: Results, note: Callable[[str], None], deadline: float = float("inf")) -> bool:
    """Audit the complete cells that break their promise and are not audited yet; return whether there were any.

    deadline: by time.monotonic; no audit begins later.
    """
    audited, files, request = False, run.directory, run.plan.request
    for cell in results.cells:
        name = f"lossless/{cell.cell}.json"
        if not breaks_promise(cell) or cell.lossless is None or cell.lossless.why or cell.status == "partial":
            continue
        if not files.has(name) or time.monotonic() > deadline:
            continue  # it was not rescored, or there is no time
        note(f"{cell.cell} is divergent; `mtbench audit` looks for the reason")
        sides = f"{files.path}:{cell.lossless.against}", f"{files.path}:{cell.cell}"
        out = files.path / FOLDER / cell.cell
        shutil.rmtree(out, ignore_errors=True)  # of answers that the run has decoded again
        found = why(*sides, out, device=request.device, offline=request.offline)
        files.write_json(name, dump(files.read(name, RescoringRecord).changed(why=found)))
        audited = True
    return audited

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
from mtbench.measure.score import faults
from mtbench.plan.formats import RescoringRecord
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.report.phrases import breaks_promise
from mtbench.results.format import ResultCell, Results

AUDIT_S = 30.0  # of a small model on a CPU
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
        findings = carry_out(audit, begin(audit, given, session, quiet, lambda _: None, argv))
    except Exception as error:  # also any fault of the model's code
        return f"`mtbench audit {a} {b}` cannot say why: {error}"
    what = "no fault" if findings.explained else "a fault, or what nothing explains"
    return f"an audit finds {what}: {findings.sentence} See {out.parent.name}/{out.name}/{audit.page}."


def explain(run: Run, results: Results, note: Callable[[str], None], deadline: float = float("inf")) -> bool:
    """Audit the complete cells that break their promise and are not audited yet; return whether there were any.

    A lossless arm with an invalid answer where plain decoding has a valid one is audited, too.

    deadline: by time.monotonic; an audit begins only if it has AUDIT_S before that.
    """
    audited, files, request = False, run.directory, run.plan.request
    for cell in results.cells:
        name = f"lossless/{cell.cell}.json"
        invalid = _invalid(run, cell)
        if cell.lossless is None or cell.lossless.why or cell.status == "partial":
            continue
        if not (invalid or breaks_promise(cell)):
            continue
        if not files.has(name) or time.monotonic() + AUDIT_S > deadline:
            continue  # it was not rescored, or there is no time
        note(f"{cell.cell}: {invalid or 'divergent: '}`mtbench audit` looks for the reason")
        sides = f"{files.path}:{cell.lossless.against}", f"{files.path}:{cell.cell}"
        out = files.path / FOLDER / cell.cell
        shutil.rmtree(out, ignore_errors=True)  # of answers that the run has decoded again
        reason = invalid + why(*sides, out, device=request.device, offline=request.offline)
        files.write_json(name, dump(files.read(name, RescoringRecord).changed(why=reason)))
        audited = True
    return audited


def _invalid(run: Run, cell: ResultCell) -> str:
    """Return which answer of a lossless arm is not valid while plain decoding's is, and why; empty: there is none."""
    lost = [versus.baseline for versus in cell.valid_vs if versus.lost and cell.claims == "lossless"]
    beside = map(run.plan.cell, run.plan.group(cell.cell).cells)
    faults_of = {other.arm: faults(run, other) for other in beside if other.arm in (cell.arm, *lost[:1]) and lost}
    wrong = [(item, fault) for item, fault in faults_of.get(cell.arm, {}).items() if fault]
    wrong = [(item, fault) for item, fault in wrong if faults_of[lost[0]].get(item, fault) is None]
    forced = any(one.json_schema is not None for one in run.plan.suite(cell.suite).answer_formats)
    unknown = ", and the audit does not know which tokens a schema forces" if forced else ""
    return f"{wrong[0][0]} is not valid ({wrong[0][1]}), and plain decoding's answer is{unknown}: " if wrong else ""

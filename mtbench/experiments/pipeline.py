"""The steps of a planned run: generate → score → aggregate → report. The experiments that run a plan share them."""

from mtbench.measure.block_writer import Progress
from mtbench.measure.executor import generate
from mtbench.measure.score import due, score, validate
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.results.aggregate import assemble
from mtbench.results.format import Results


def finish(run: Run, execution: Execution, progress: Progress) -> Results:
    """Run the rest of a plan; return the results."""
    generate(run, progress, execution)
    if due(run):
        score(run, execution.data_dir, unsandboxed=execution.allow_unsandboxed_code)
    validate(run)
    return assemble(run)


def report(run: Run, *, price_per_hour: float | None = None) -> Results:
    """Write results.json, report.md and report.html; return the results. price_per_hour: in place of the plan's."""
    results = assemble(run, price_per_hour=price_per_hour)
    write_pages(run, results)
    return results


def write_pages(run: Run, results: Results) -> None:
    """Write report.md and report.html."""
    from mtbench.report.document import write_report  # imports matplotlib, which only pages need

    write_report(run, results)

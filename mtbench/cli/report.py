"""What `mtbench run` and `mtbench report` do with a planned run, and what they print of its results."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mtbench.cli.session import FAILED, INCOMPLETE, beside_json, err, say, write_json
from mtbench.errors import UserError, unknown
from mtbench.experiments.choose import pipeline as racing
from mtbench.records import HIGHEST_PRICE
from mtbench.report import pipeline
from mtbench.report.decided import read_decision
from mtbench.report.phrases import breaks_promise
from mtbench.report.progress import RunProgress
from mtbench.report.terminal import decision_lines, results_tables
from mtbench.results.format import ResultCell, Results
from mtbench.runs.directory import RunDirectory
from mtbench.runs.run_request import Execution

CAUSES: Mapping[str, Callable[[ResultCell], bool]] = {  # what may end a finished run with FAILED
    "divergent": breaks_promise,
    "void": lambda cell: bool(cell.void),
    "failed": lambda cell: cell.status == "failed",
}


def causes(text: str) -> list[str]:
    """Return the causes in text such as `void,failed`; `none` is none. Raises UserError for another word."""
    words = [] if text == "none" else text.split(",")
    for word in words:
        if word not in CAUSES:
            raise unknown("cause in --fail-on", word, [*CAUSES, "none"], "mtbench run --help")
    return words


def finish(run: RunDirectory, settings: Execution, json_to: Path | None, fail_on: Sequence[str]) -> int:
    """Run what is missing and print the results; return the exit code. `fail_on`: keys of CAUSES."""
    with RunProgress(err) as progress:
        results = pipeline.finish(run, settings, progress)
    _print_results(run, results, json_to)
    if any(CAUSES[cause](cell) for cause in fail_on for cell in results.cells):
        return FAILED
    return INCOMPLETE if any(cell.status == "partial" for cell in results.cells) else 0


def report(directory: Path, json_to: Path | None, price_per_hour: float | None) -> None:
    """Rebuild the results and the pages, and print them. Raises UserError for a price that is not above 0."""
    if price_per_hour is not None and not 0 < price_per_hour <= HIGHEST_PRICE:
        raise UserError(
            f"--price-per-hour {price_per_hour:g} is not allowed; it is a number above 0, at most {HIGHEST_PRICE:g}."
        )
    run = RunDirectory.open(directory)
    rebuild = racing.report if run.has("race.json") else pipeline.report
    _print_results(run, rebuild(run, price_per_hour=price_per_hour), json_to)


def _print_results(run: RunDirectory, results: Results, json_to: Path | None) -> None:
    """Print the tables, the decision and the page's path, in this order.

    With `--json -`, standard output is only the JSON.
    """
    console = beside_json(json_to)
    for table in results_tables(results, console.width):
        console.print(table)
    for line in decision_lines(results, read_decision(run)):
        say(line, console)
    written = run.path / "results.json"
    write_json(json_to, written.read_text(), f"the run is complete, and {written} has the same.")
    say(run.path / "report.html", console)

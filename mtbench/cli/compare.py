"""`mtbench compare`: open the runs, compare each with the first, print the tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mtbench.cli.parameters import command
from mtbench.cli.session import beside_json, refuse_twice, write_json
from mtbench.document.terminal import show
from mtbench.errors import UserError
from mtbench.files import refuse_existing
from mtbench.options import common
from mtbench.options.common import COMPARED
from mtbench.options.fields import option
from mtbench.plan.directory import RunDirectory
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.report.run_comparison import comparison_document
from mtbench.results.across_runs import ComparedRun, Comparison, RunComparison, compare_runs
from mtbench.results.aggregate import Stored, read_stored, statuses

app = typer.Typer()


@app.command()
@command
def compare(
    runs: Annotated[
        Sequence[Path], option("Finished run directories; the first one is compared with.", COMPARED, argument=True)
    ],
    json_to: common.JsonTo = None,
    plugin: common.Plugins = (),
) -> None:
    """Compare finished runs, cell by cell: tokens, accuracy and tokens per forward on the same items."""
    refuse_existing(json_to)
    if len(runs) < 2:
        raise UserError("one run has nothing to be compared with; give two or more: `mtbench compare RUN RUN`.")
    refuse_twice(runs, "directory", "give two different runs")
    base, *heads = map(_open, runs)
    comparison = Comparison(
        schema_version=3,
        runs=[_described(stored) for stored in (base, *heads)],
        comparisons=[_compared(base, head) for head in heads],
    )
    show(comparison_document(comparison), beside_json(json_to))
    write_json(json_to, json.dumps(dump(comparison), indent=1, allow_nan=False) + "\n")


def _open(directory: Path) -> Stored:
    """Read a finished run. Raises UserError for another directory, and for a run with missing blocks."""
    stored = read_stored(Run.open(RunDirectory.open(directory)))
    partial = [name for name, status in statuses(stored).items() if status == "partial"]
    if partial:
        command = "choose" if stored.race else "run"
        raise UserError(
            f"{str(directory)!r} is not finished: blocks are missing in {len(partial)} of {len(stored.cells)} cells, "
            f"for example {partial[0]}; finish it with `mtbench {command} -o {directory} --resume`."
        )
    return stored


def _described(stored: Stored) -> ComparedRun:
    return ComparedRun(
        directory=str(stored.directory.path),
        run_id=stored.run_id,
        started=stored.environment.started,
        plan_sha256=stored.plan_sha256,
    )


def _compared(base: Stored, head: Stored) -> RunComparison:
    found = compare_runs(base, head)
    if not found.cells:
        raise UserError(
            f"{str(base.directory.path)!r} and {str(head.directory.path)!r} have no cell in common; for example, they "
            f"have {found.only_base[0]} and {found.only_head[0]}. Run both with the same suite, method and batch size."
        )
    return found

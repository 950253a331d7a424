"""`mtbench compare`: its arguments. The work is in mtbench/cli/comparison.py, which imports torch."""

from pathlib import Path
from typing import Annotated

import typer

from mtbench.cli.parameters import command
from mtbench.files import refuse_existing
from mtbench.runs import options

app = typer.Typer()

RunsArgument = Annotated[list[Path], typer.Argument(help="Finished run directories; the first one is compared with.")]
ComparisonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write the comparison to this file; `-` is standard output.")
]


@app.command()
@command
def compare(
    runs: RunsArgument,
    json_to: ComparisonOption = None,
    plugin: options.Plugins = (),
) -> None:
    """Compare finished runs, cell by cell: tokens, accuracy and tokens per forward on the same items."""
    from mtbench.cli import comparison

    refuse_existing(json_to)
    comparison.compare(runs, json_to)

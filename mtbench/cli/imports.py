"""`mtbench import`: its arguments. The work is in mtbench/cli/importing.py, which imports torch."""

from pathlib import Path
from typing import Annotated

import typer

from mtbench.cli.request_options import PluginOption
from mtbench.files import refuse_existing

app = typer.Typer()

FilesArgument = Annotated[list[Path], typer.Argument(help="Result files of other tools; recognised by content.")]
BesideOption = Annotated[
    Path | None,
    typer.Option(
        "--beside", help="Run directory: its figures stand in the same rows where the definition is the same."
    ),
]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="Also write JSON to this file; `-` is standard output.")
]
OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", help="Also write imported.json and imported.md to this directory.")
]


@app.command("import")
def import_files(
    files: FilesArgument,
    beside: BesideOption = None,
    json_to: JsonOption = None,
    out: OutOption = None,
    plugin: PluginOption = [],  # noqa: B006
) -> None:
    """Lay results of other tools side by side, each figure under its owner's definition.

    Reads Spec-Bench, specdec_bench, SpecForge, vLLM `bench serve`, SGLang bench_serving, guidellm, aiperf and lm-eval.
    """
    from mtbench.cli import importing

    refuse_existing(json_to)
    importing.import_files(files, beside, json_to, out)

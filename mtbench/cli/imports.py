"""`mtbench import`: read the files, print the tables, write JSON and Markdown. `--help` needs no torch."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mtbench.cli.parameters import command
from mtbench.cli.session import beside_json, refuse_twice, show, write_json
from mtbench.files import refuse_existing, write_text
from mtbench.runs import options

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
@command
def import_files(
    files: FilesArgument,
    beside: BesideOption = None,
    json_to: JsonOption = None,
    out: OutOption = None,
    plugin: options.Plugins = (),
) -> None:
    """Lay results of other tools side by side, each figure under its owner's definition.

    Reads Spec-Bench, specdec_bench, SpecForge, vLLM `bench serve`, SGLang bench_serving, guidellm, aiperf and lm-eval.
    """
    from mtbench.imports.beside import our_cells
    from mtbench.imports.registry import read_file, side_by_side
    from mtbench.records import cleaned, dump
    from mtbench.report.imported import imported_blocks, imported_markdown

    refuse_existing(json_to)
    refuse_twice(files, "file", "give each file once")
    imported = side_by_side([result for file in files for result in read_file(file)])
    if beside is not None:
        imported = imported.changed(beside=our_cells(beside, imported.results))
    imported = cleaned(imported)
    show(imported_blocks(imported), beside_json(json_to))
    text = json.dumps(dump(imported), indent=1, allow_nan=False) + "\n"
    if out is not None:
        write_text(out / "imported.json", text)
        write_text(out / "imported.md", imported_markdown(imported))
    write_json(json_to, text)

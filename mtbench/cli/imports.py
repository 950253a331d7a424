"""`mtbench import`: read the files, print the tables, write JSON and Markdown. `--help` needs no torch."""

import json
from pathlib import Path
from typing import Annotated

import typer

from mtbench.cli.parameters import command
from mtbench.cli.session import beside_json, refuse_twice, write_json
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

    Reads results of vLLM `bench serve`, guidellm, aiperf and lm-eval.
    """
    from mtbench.document.markdown_text import markdown
    from mtbench.document.terminal import show
    from mtbench.records import cleaned, dump
    from mtbench.report.imported import imported_document
    from mtbench.results.imports.format import SCHEMA_VERSION, Imported
    from mtbench.results.imports.registry import our_cells, read_file

    refuse_existing(json_to)
    refuse_twice(files, "file", "give each file once")
    results = [result for file in files for result in read_file(file)]
    ours = [] if beside is None else our_cells(beside, results)
    imported = cleaned(Imported(schema_version=SCHEMA_VERSION, results=results, beside=ours))
    page = imported_document(imported)
    show(page, beside_json(json_to))
    text = json.dumps(dump(imported), indent=1, allow_nan=False) + "\n"
    if out is not None:
        write_text(out / "imported.json", text)
        write_text(out / "imported.md", markdown(page))
    write_json(json_to, text)

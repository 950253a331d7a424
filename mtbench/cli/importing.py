"""What `mtbench import` does: read the files, print the tables, write JSON and Markdown."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from mtbench.cli.session import beside_json, show, write_json
from mtbench.errors import UserError
from mtbench.files import write_text
from mtbench.imports.beside import our_cells
from mtbench.imports.registry import read_file, side_by_side
from mtbench.records import cleaned, dump
from mtbench.report.imported import imported_blocks, imported_markdown

NAME = "imported"


def import_files(files: Sequence[Path], beside: Path | None, json_to: Path | None, directory: Path | None) -> None:
    """Print the results in the files, and write them where it was asked for."""
    _refuse_twice(files)
    read = [result for file in files for result in read_file(file)]
    imported = side_by_side(read)
    if beside is not None:
        imported = imported.changed(beside=our_cells(beside, imported.results))
    imported = cleaned(imported)
    show(imported_blocks(imported), beside_json(json_to))
    text = json.dumps(dump(imported), indent=1, allow_nan=False) + "\n"
    if directory is not None:
        write_text(directory / f"{NAME}.json", text)
        write_text(directory / f"{NAME}.md", imported_markdown(imported))
    write_json(json_to, text)


def _refuse_twice(files: Sequence[Path]) -> None:
    seen: dict[str, Path] = {}
    for file in files:
        other = seen.setdefault(os.path.realpath(file), file)
        if other is not file:
            raise UserError(f"{str(file)!r} is the same file as {str(other)!r}; give each file once.")

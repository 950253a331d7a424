"""All importers, how a file finds its own (by content, never by name), and which figures of ours equal theirs."""

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mtbench import files
from mtbench.errors import UserError, first_line, printable
from mtbench.results.format import ResultCell, Results
from mtbench.results.imports import aiperf, guidellm, lm_eval, vllm
from mtbench.results.imports.format import ImportedResult, OurCell, OurFigure
from mtbench.results.imports.importer import MOST_FIGURES, OURS, Meaning
from mtbench.runs.directory import RunDirectory

LARGEST_FILE = 1 << 27  # bytes: a report with every request of a long benchmark
MOST_RESULTS = 1000  # of a file
IMPORTERS = (vllm.IMPORTER, guidellm.IMPORTER, aiperf.IMPORTER, lm_eval.IMPORTER)


def read_file(path: Path) -> list[ImportedResult]:
    """Return the results in a file of another tool. Raises UserError in one line."""
    where = printable(str(path))
    try:
        data = files.read_bytes(path, LARGEST_FILE)
    except FileNotFoundError:
        raise UserError(f"{where} is missing; give the result file of a benchmark.") from None
    documents = _documents(data, where)
    importer = next((known for known in IMPORTERS if known.recognises(documents)), None)
    if importer is None:
        raise UserError(f"{where}: no known format; mtbench imports {_formats()}.")
    found = importer.read(where, documents)
    if not found or not all(result.figures for result in found):
        raise UserError(f"{where}: it holds no figure, so there is nothing to import.")
    if len(found) > MOST_RESULTS or any(len(result.figures) > MOST_FIGURES for result in found):
        raise UserError(f"{where}: over {MOST_RESULTS:,} results, or over {MOST_FIGURES:,} figures in one of them.")
    digest = hashlib.sha256(data).hexdigest()
    return [
        ImportedResult(file=where, sha256=digest, format=importer.format, tool=importer.tool, **vars(result))
        for result in found
    ]


def our_cells(directory: Path, results: Sequence[ImportedResult]) -> list[OurCell]:
    """Return the cells of a run, with the figures that equal one of the imported results by definition.

    Raises UserError if the directory holds no finished run.
    """
    run = RunDirectory.open(directory)
    if not run.has("results.json"):
        raise UserError(
            f"{str(directory)!r} holds no results.json; finish the run with `mtbench run -o {directory} --resume`."
        )
    stored = run.read("results.json", Results)
    imported = dict.fromkeys(figure.meaning for result in results for figure in result.figures)
    return [
        OurCell(
            run=str(directory),
            run_id=stored.run_id,
            cell=cell.cell,
            suite=cell.suite,
            arm=cell.arm,
            batch_size=cell.batch_size,
            simulated=cell.simulated is not None,
            figures=list(_figures(cell, [OURS[key] for key in imported if key in OURS])),
        )
        for cell in stored.cells
        if cell.status != "failed"
    ]


def _figures(cell: ResultCell, wanted: Sequence[Meaning]) -> Iterator[OurFigure]:
    for meaning in wanted:
        value: Any = cell
        for name in str(meaning.ours).split("."):
            value = getattr(value, name, None)  # a field that is null ends the path
        if isinstance(value, int | float):
            yield OurFigure(name=str(meaning.ours), value=value * meaning.scale, unit=meaning.unit, meaning=meaning.key)


def _documents(data: bytes, where: str) -> list[Any]:
    """Return the JSON values of a file: one for the whole file, or one for each line."""
    with contextlib.suppress(ValueError, RecursionError):
        return [from_json(data)]
    lines = [(number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
    documents = []
    for number, line in lines or [(1, b"")]:
        try:
            documents.append(from_json(line))
        except (ValueError, RecursionError) as error:
            place = f"{where}, line {number}" if len(lines) > 1 else where
            raise UserError(f"{place}: not JSON ({first_line(error)}); mtbench imports {_formats()}.") from None
    return documents


def _formats() -> str:
    return ", ".join(importer.format for importer in IMPORTERS)

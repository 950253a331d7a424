"""Cells of our run that stand beside imported results: only figures that an imported one equals by definition."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtbench.errors import UserError
from mtbench.imports import meanings
from mtbench.imports.format import ImportedResult, OurCell, OurFigure
from mtbench.imports.importer import Meaning
from mtbench.results.format import ResultCell, Results
from mtbench.runs.directory import RunDirectory

SAME: dict[str, Meaning] = {
    meaning.key: meaning for meaning in vars(meanings).values() if isinstance(meaning, Meaning) and meaning.ours
}


def our_cells(directory: Path, results: Sequence[ImportedResult]) -> list[OurCell]:
    """Return the cells of a run with the figures that one of the imported results has, too.

    Raises UserError if the directory holds no finished run.
    """
    run = RunDirectory.open(directory)
    if not run.has("results.json"):
        raise UserError(
            f"{str(directory)!r} holds no results.json; finish the run with `mtbench run -o {directory} --resume`."
        )
    stored = run.read("results.json", Results)
    imported = dict.fromkeys(figure.meaning for result in results for figure in result.figures)
    wanted = [SAME[key] for key in imported if key in SAME]
    return [
        OurCell(
            run=str(directory),
            run_id=stored.run_id,
            cell=cell.cell,
            suite=cell.suite,
            arm=cell.arm,
            batch_size=cell.batch_size,
            simulated=cell.simulated is not None,
            figures=list(_figures(cell, wanted)),
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

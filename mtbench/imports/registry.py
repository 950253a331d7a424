"""All importers, and how a file finds its own: by content, never by name."""

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mtbench import files
from mtbench.errors import UserError, first_line, printable
from mtbench.imports import aiperf, guidellm, lm_eval, sglang, spec_bench, specdec_bench, specforge, vllm
from mtbench.imports.format import SCHEMA_VERSION, Imported, ImportedResult, OurCell, PairedSamples
from mtbench.imports.importer import MOST_FIGURES, Content, Found, Importer

LARGEST_FILE = 1 << 27  # bytes: a report with every request of a long benchmark
MOST_RESULTS = 1000  # of a file
IMPORTERS: Sequence[Importer] = (
    spec_bench.IMPORTER,
    specdec_bench.IMPORTER,
    specforge.IMPORTER,
    vllm.IMPORTER,
    sglang.IMPORTER,
    guidellm.IMPORTER,
    aiperf.IMPORTER,
    lm_eval.RESULTS,
    lm_eval.SAMPLES,
)

Read = tuple[ImportedResult, Found]


def read_file(path: Path) -> list[Read]:
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
    found = importer.read(Content(where, documents))
    if not found or not all(result.figures for result in found):
        raise UserError(f"{where}: it holds no figure, so there is nothing to import.")
    if len(found) > MOST_RESULTS or any(len(result.figures) > MOST_FIGURES for result in found):
        raise UserError(f"{where}: over {MOST_RESULTS:,} results, or over {MOST_FIGURES:,} figures in one of them.")
    digest = hashlib.sha256(data).hexdigest()
    return [(_record(result, importer, where, digest), result) for result in found]


def side_by_side(read: Sequence[Read], beside: Sequence[OurCell] = ()) -> Imported:
    """Return the results of all files, with the pairs of lm-eval's samples among them."""
    return Imported(
        schema_version=SCHEMA_VERSION,
        results=[result for result, _ in read],
        beside=list(beside),
        paired_samples=[
            _paired(first, second, metric, read[first][1], read[second][1])
            for first, second in itertools.combinations(range(len(read)), 2)
            for metric in read[first][1].samples
            if metric in read[second][1].samples
        ],
    )


def _documents(data: bytes, where: str) -> list[Any]:
    """Return the JSON values of a file: one for the whole file, or one for each line."""
    try:
        return [from_json(data)]
    except (ValueError, RecursionError) as error:
        lines = [(number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
        if len(lines) < 2:
            raise UserError(f"{where}: not JSON ({first_line(error)}); mtbench imports {_formats()}.") from None
    documents = []
    for number, line in lines:
        try:
            documents.append(from_json(line))
        except (ValueError, RecursionError) as error:
            problem = f"{where}, line {number}: not JSON ({first_line(error)})"
            raise UserError(f"{problem}; mtbench imports {_formats()}.") from None
    return documents


def _formats() -> str:
    return ", ".join(importer.format for importer in IMPORTERS)


def _record(found: Found, importer: Importer, where: str, digest: str) -> ImportedResult:
    return ImportedResult(
        file=where,
        sha256=digest,
        format=importer.format,
        tool=importer.tool,
        version=found.version,
        model=found.model,
        part=found.part,
        settings=dict(found.settings),
        figures=list(found.figures),
    )


def _paired(first: int, second: int, metric: str, one: Found, other: Found) -> PairedSamples:
    left, right = one.samples[metric], other.samples[metric]
    common = [item for item in left if item in right]
    return PairedSamples(
        first=first + 1,
        second=second + 1,
        metric=metric,
        items=len(common),
        mean_first=sum(left[item] for item in common) / len(common) if common else None,
        mean_second=sum(right[item] for item in common) / len(common) if common else None,
        higher_first=sum(left[item] > right[item] for item in common),
        higher_second=sum(left[item] < right[item] for item in common),
    )

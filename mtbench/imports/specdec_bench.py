"""specdec_bench: acceptance_rate.json and timing.json (NVIDIA/Model-Optimizer, examples/specdec_bench, metrics/).

Each file is a JSON list, to which every run appends an object. Statistics of timing.json are texts with four decimals.
Neither file records a version.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtbench.errors import UserError
from mtbench.imports.format import ImportedFigure
from mtbench.imports.importer import Content, Found, Importer, Meaning, figure, has, member, number, shown, text, within
from mtbench.imports.meanings import MEAN_CHUNK

TOOL = "specdec_bench"
ACCEPTANCE, TIMING = "Average_AL", "Output TPS"
MEAN_OF_REQUESTS = Meaning(  # metrics/specbench.py, metrics/mtbench.py
    "chunk length, mean of requests",
    "tokens",
    "Tokens per streamed chunk of each request, the chunks of its turns together and prefill's chunk of one token "
    "included, averaged over requests with equal weight.",
)
CONDITIONAL = (
    "Chunks with at least this many tokens / chunks with at least the next smaller length that occurs, prefill's "
    "chunks of one token included."
)
JOINT = "Chunks with at least this many tokens / all chunks, prefill's chunks of one token included."
RATES = {
    "Output TPS": "Output tokens of all requests / time from the first request's start to the last token.",
    "Output TPS/gpu": "`Output TPS` / tensor-parallel size.",
}
STATISTICS = {  # name -> unit, what it is
    "E2E Request Time": ("s", "time from a request's start to its last chunk"),
    "TTFT Time": ("s", "time from a request's start to its first chunk"),
    "Request Generation Step Time": ("s", "time between two chunks of a request, the time to its first one included"),
    "Request Generation Tokens Per Second": (
        "tokens/s",
        "(tokens − 1) / time from the first to the last chunk of a request",
    ),
    "Number of Output Tokens": ("tokens", "output tokens of a request"),
}


def _recognises(documents: Sequence[Any]) -> bool:
    entries = documents[0]
    return isinstance(entries, list) and bool(entries) and (has(entries[0], ACCEPTANCE) or has(entries[0], TIMING))


def _read(content: Content) -> list[Found]:
    entries = content.documents[0]
    found = []
    for place, entry in enumerate(entries, start=1):
        where = f"{content.where}, entry {place}"
        if not isinstance(entry, dict):
            raise UserError(f"{where}: it is {shown(entry)}; it must be an object.")
        if ACCEPTANCE not in entry and TIMING not in entry:
            raise UserError(
                f"{where}: neither {ACCEPTANCE!r} nor {TIMING!r} is there, so this is no layout that mtbench reads."
            )
        figures = [*(_acceptance(entry, where) if ACCEPTANCE in entry else _timing(entry, where))]
        found.append(Found(figures=figures, part=f"entry {place}" if len(entries) > 1 else None))
    return found


def _acceptance(entry: Mapping[str, Any], where: str) -> Iterator[ImportedFigure]:
    by_request = member(entry, "Request_AL", dict, where)
    turns = all(isinstance(lengths, dict) for lengths in by_request.values())  # the other metrics store one number
    average = MEAN_CHUNK if turns and "Category_AL" not in entry else MEAN_OF_REQUESTS
    yield figure(average, ACCEPTANCE, entry[ACCEPTANCE], where)
    for category, value in _optional(entry, "Category_AL", where).items():
        name = f"Category_AL[{text(category)}]"
        meaning = Meaning(f"{TOOL}: {name}", "tokens", f"`Average_AL` over the requests of {text(category)} only.")
        yield figure(meaning, name, value, where)
    for group, definition in (("Conditional_Acceptance_Rate", CONDITIONAL), ("Joint_Acceptance_Rate", JOINT)):
        for length, value in _optional(entry, group, where).items():
            name = f"{group}[{text(length)}]"
            yield figure(Meaning(f"{TOOL}: {name}", "share", definition), name, value, where)


def _optional(entry: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return an object that not every metric of the tool writes."""
    found: dict[str, Any] = {} if entry.get(name) is None else member(entry, name, dict, where)
    return found


def _timing(entry: Mapping[str, Any], where: str) -> Iterator[ImportedFigure]:
    for name, definition in RATES.items():
        if name in entry:
            yield figure(Meaning(f"{TOOL}: {name}", "tokens/s", definition), name, entry[name], where)
    for group, (unit, what) in STATISTICS.items():
        if group in entry:
            summary = member(entry, group, dict, where)
            for statistic, value in (("mean", summary.get("mean")), ("median", within(summary, "quantiles", "0.5"))):
                name = f"{group}, {statistic}"
                meaning = Meaning(f"{TOOL}: {name}", unit, f"{statistic.capitalize()} of the {what}.")
                yield figure(meaning, name, _written(value, name, where), where)


def _written(value: Any, name: str, where: str) -> float:
    """Return a number that the tool wrote as a text of at most some digits."""
    try:
        return number(float(value) if isinstance(value, str) and len(value) < 40 else value, name, where)
    except ValueError:
        raise UserError(f"{where}: {name} is {shown(value)}; it must be a finite number.") from None


IMPORTER = Importer("specdec_bench acceptance_rate.json or timing.json", TOOL, _recognises, _read)

"""SpecForge: results of benchmarks/bench_eagle3.py (sgl-project/SpecForge; figures: benchmarks/benchmarker/utils.py).

One object: `model` is the draft's path; every other key is a benchmark with a list of configurations, each with one
`metrics` entry per repetition. The file ends in .jsonl but is one JSON value. It records no version.
"""

from collections.abc import Sequence
from typing import Any

from mtbench.errors import UserError
from mtbench.imports.importer import (
    Content,
    Found,
    Importer,
    Meaning,
    has,
    member,
    number,
    optional_text,
    settings,
    shown,
    taken,
    text,
)
from mtbench.imports.meanings import PER_VERIFICATION

FIGURES = {
    "accept_length": PER_VERIFICATION,
    "accuracy": Meaning("specforge: accuracy", "share", "Share of correct answers by SpecForge's own scoring."),
    "output_throughput": Meaning(
        "specforge: output_throughput",
        "tokens/s",
        "Completion tokens of all questions / wall time of the whole batch of questions, seen by the client.",
    ),
    "latency": Meaning("specforge: latency", "s", "Wall time of the whole batch of questions, not of a request."),
}
CONFIGURATION = ("batch_size", "steps", "topk", "num_draft_tokens", "num_samples")


def _recognises(documents: Sequence[Any]) -> bool:
    first = documents[0]
    if not isinstance(first, dict) or len(documents) > 1:
        return False
    lists = [value for value in first.values() if isinstance(value, list) and value]
    return any(has(entries[0], "metrics", "topk", "num_draft_tokens") for entries in lists)


def _read(content: Content) -> list[Found]:
    document = content.documents[0]
    found = []
    for benchmark, configurations in document.items():
        if benchmark == "model":
            continue
        if not isinstance(configurations, list):
            raise UserError(f"{content.where}: {text(benchmark)} is {shown(configurations)}; it must be an array.")
        for place, configuration in enumerate(configurations):
            where = f"{content.where}: {text(benchmark)}[{place}]"
            repetitions = member(configuration, "metrics", list, where)
            given = settings(configuration, CONFIGURATION)
            for run, metrics in enumerate(repetitions, start=1):
                which = f", repetition {run}" if len(repetitions) > 1 else ""
                _require(metrics, f"{where}.metrics[{run - 1}]")
                found.append(
                    Found(
                        figures=taken(metrics, FIGURES, f"{where}.metrics[{run - 1}]"),
                        model=optional_text(document.get("model")),
                        part=f"{text(benchmark)}{which}",
                        settings=given | settings(metrics, ("num_questions", "num_valid_predictions")),
                    )
                )
    return found


def _require(metrics: Any, where: str) -> None:
    if not isinstance(metrics, dict):
        raise UserError(f"{where} is {shown(metrics)}; it must be an object.")
    for name in ("latency", "output_throughput", "accept_length"):
        number(metrics.get(name), name, where)


IMPORTER = Importer("SpecForge results", "SpecForge", _recognises, _read)

"""guidellm: benchmarks.json, version 2 (vllm-project/guidellm, src/guidellm/benchmark/schemas).

One result for each load. The figures are those that guidellm's console prints: latencies over the completed requests,
throughput over all requests, of which cancelled and failed ones count with the tokens that they had.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from mtbench.errors import UserError
from mtbench.results.imports.format import ImportedFigure
from mtbench.results.imports.importer import (
    Found,
    Importer,
    Meaning,
    figure,
    has,
    member,
    optional_text,
    other_version,
    settings,
    shown,
    text,
    within,
)

VERSION = 2
RATES = {  # over all requests: metric -> unit, definition
    "requests_per_second": ("requests/s", "Requests that ended, over the time of the measurement"),
    "output_tokens_per_second": (
        "tokens/s",
        "Output tokens, over the time of the measurement; without `usage` in the stream a message counts as a token",
    ),
    "tokens_per_second": ("tokens/s", "Prompt and output tokens, over the time of the measurement"),
    "request_concurrency": ("requests", "Requests that run at a time, over the time of the measurement"),
}
LATENCIES = {  # over the completed requests: metric -> unit, definition
    "request_latency": ("s", "time from a request's start to its end, in seconds"),
    "time_to_first_token_ms": ("ms", "time from a request's start to its first token"),
    "inter_token_latency_ms": (
        "ms",
        "time from the first to the last token / (output tokens − 1) of a request, weighted by these tokens",
    ),
    "time_per_output_token_ms": (
        "ms",
        "time from a request's start to its last token / output tokens, the first one included, weighted by tokens",
    ),
    "output_tokens_per_iteration": ("tokens", "output tokens of a streamed message, the first one included"),
}
STATISTICS = {"mean": "Mean", "median": "Median", "p95": "95th percentile"}
STRATEGY = ("streams", "rate", "max_concurrency", "worker_count")


def _recognises(documents: Sequence[Any]) -> bool:
    first = documents[0]
    benchmarks = within(first, "benchmarks")
    if not isinstance(benchmarks, list):
        return False
    return has(first.get("metadata"), "guidellm_version") or any(has(entry, "type_", "metrics") for entry in benchmarks)


def _read(where: str, documents: Sequence[Any]) -> list[Found]:
    report = documents[0]
    version = within(report, "metadata", "version")
    if version != VERSION or isinstance(version, bool | float):
        raise other_version(where, "guidellm's metadata.version", version, f"version {VERSION}")
    benchmarks = member(report, "benchmarks", list, where)
    if not benchmarks:
        raise UserError(f"{where}: benchmarks is empty, so there is nothing to import.")
    release = optional_text(within(report, "metadata", "guidellm_version"))
    model = optional_text(within(report, "config", "spec", "backend", "model"))  # null: the server chose it
    return [_result(entry, f"{where}: benchmarks[{place}]", release, model) for place, entry in enumerate(benchmarks)]


def _result(benchmark: Any, where: str, version: str | None, model: str | None) -> Found:
    metrics = member(benchmark, "metrics", dict, where)
    config = benchmark.get("config")
    strategy = within(config, "strategy")
    load = settings(strategy, STRATEGY)
    kind = text(strategy["type_"]) if has(strategy, "type_") else "load"
    words = [f"{name} {value}" for name, value in load.items() if name in ("streams", "rate")]
    return Found(
        figures=[*_totals(metrics, where), *_statistics(metrics, where)],
        version=version,
        model=model,
        part=", ".join([kind, *words]),
        settings={"strategy": kind} | load | settings(config, ("prefer_response_metrics",)),
    )


def _totals(metrics: dict[str, Any], where: str) -> Iterator[ImportedFigure]:
    totals = member(metrics, "request_totals", dict, where)
    for status in ("successful", "incomplete", "errored"):
        name = f"request_totals.{status}"
        meaning = Meaning(f"guidellm: {name}", "requests", f"Requests of the status `{status}`.")
        yield figure(meaning, name, totals.get(status), where)


def _statistics(metrics: dict[str, Any], where: str) -> Iterator[ImportedFigure]:
    """Yield the statistics that the console prints. A null summary was not measured."""
    for group, status in ((RATES, "total"), (LATENCIES, "successful")):
        for metric, (unit, what) in group.items():
            summaries = metrics.get(metric)
            if summaries is None:
                continue
            at = f"{where}.metrics.{metric}"
            summary = summaries.get(status) if isinstance(summaries, dict) else shown(summaries)
            if summary is None:
                continue
            if not isinstance(summary, dict):
                raise UserError(f"{at}: {status} is {shown(summary)}; it must be an object.")
            wanted = {"mean": summary.get("mean")}
            if status == "successful":
                percentiles = member(summary, "percentiles", dict, at)
                wanted |= {"median": summary.get("median"), "p95": percentiles.get("p95")}
            for statistic, value in wanted.items():
                name = f"{metric}.{status}.{statistic}"
                definition = f"{what}, {statistic}." if status == "total" else f"{STATISTICS[statistic]} of the {what}."
                yield figure(Meaning(f"guidellm: {name}", unit, definition), name, value, at)


IMPORTER = Importer("guidellm benchmarks.json (version 2)", "guidellm", _recognises, _read)

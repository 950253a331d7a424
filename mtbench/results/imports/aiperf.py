"""aiperf: profile_export_aiperf.json, schema 1.4 (ai-dynamo/aiperf; figures: src/aiperf/metrics/types and
docs/metrics-reference.md).

A metric is an object with its unit and statistics. A metric over requests has percentiles; a metric of the whole run
has `avg` only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mtbench.errors import UserError
from mtbench.results.imports.format import ImportedFigure
from mtbench.results.imports.importer import (
    LENGTH_OF_REQUESTS,
    POOLED_LENGTH,
    POOLED_RATE,
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

VERSION = "1.4"


class Metric(NamedTuple):
    """A metric of aiperf. meaning: of its `avg`, where another tool or mtbench has the same figure."""

    unit: str
    definition: str
    meaning: Meaning | None = None


METRICS = {
    "spec_decode_token_weighted_acceptance_length": Metric("ratio", "", POOLED_LENGTH),
    "spec_decode_acceptance_length": Metric(
        "ratio", "1 + accepted draft tokens / verification steps of each request.", LENGTH_OF_REQUESTS
    ),
    "spec_decode_overall_draft_acceptance_rate": Metric("%", "", POOLED_RATE),
    "spec_decode_draft_acceptance_rate": Metric(
        "%", "Accepted / proposed draft tokens of each request, in percent; requests count equally."
    ),
    "spec_decode_accepted_per_verified": Metric(
        "ratio", "(accepted draft tokens + steps) / (proposed draft tokens + steps) of each request."
    ),
    "total_spec_decode_steps": Metric("count", "Verification steps of all requests."),
    "total_accepted_draft_tokens": Metric("tokens", "Accepted draft tokens of all requests."),
    "total_draft_tokens": Metric("tokens", "Proposed draft tokens of all requests."),
    "output_token_throughput": Metric(
        "tokens/sec", "Output tokens of all requests / time from the first request to the last response."
    ),
    "output_token_throughput_per_user": Metric("tokens/sec/user", "1 / inter-token latency of each request."),
    "request_throughput": Metric("requests/sec", "Requests / time from the first request to the last response."),
    "goodput": Metric("requests/sec", "Requests within all service levels / time of the benchmark."),
    "request_latency": Metric("ms", "Time from a request's start to its last response."),
    "time_to_first_token": Metric("ms", "Time from a request's start to its first response."),
    "inter_token_latency": Metric(
        "ms",
        "(request latency − time to first token) / (output tokens − 1) of each request; with usage in every message, "
        "over output tokens − those of the first message.",
    ),
    "inter_chunk_latency": Metric("ms", "Gap between two responses of a stream, averaged for each request."),
    "request_count": Metric("requests", "Requests that were answered without an error."),
    "error_request_count": Metric("requests", "Requests that ended with an error."),
    "benchmark_duration": Metric("sec", "Time from the first request to the last response."),
}
STATISTICS = {"avg": "Mean", "p50": "Median", "p95": "95th percentile", "p99": "99th percentile"}


def _recognises(documents: Sequence[Any]) -> bool:
    first = documents[0]
    return has(first, "aiperf_version") or has(first, "schema_version", "input_config", "request_latency")


def _read(where: str, documents: Sequence[Any]) -> list[Found]:
    export = documents[0]
    if export.get("schema_version") != VERSION:
        raise other_version(where, "aiperf's schema_version", export.get("schema_version"), f"version {VERSION}")
    figures = [found for name in METRICS if export.get(name) is not None for found in _metric(export, name, where)]
    if not figures:
        raise UserError(f"{where}: it holds no metric that mtbench knows, so there is nothing to import.")
    config = export.get("input_config")
    return [
        Found(
            figures=figures,
            version=optional_text(export.get("aiperf_version")),
            model=_model(config),
            settings=_load(config) | settings(export, ("was_cancelled", "is_complete")),
        )
    ]


def _metric(export: Mapping[str, Any], name: str, where: str) -> Iterator[ImportedFigure]:
    known, stored = METRICS[name], member(export, name, dict, where)
    if stored.get("unit") != known.unit:
        raise UserError(f"{where}: the unit of {name} is {shown(stored.get('unit'))}; mtbench knows {known.unit!r}.")
    if known.meaning is not None:
        yield figure(known.meaning, name, stored.get("avg"), where)
    for statistic, words in STATISTICS.items():
        if statistic in stored and (known.meaning is None or statistic != "avg"):
            over_requests = "p50" in stored
            said = known.definition[:1].lower() + known.definition[1:]
            definition = f"{words} of: {said}" if over_requests else known.definition
            full = f"{name}, {statistic}" if over_requests else name
            yield figure(Meaning(f"aiperf: {full}", known.unit, definition), full, stored[statistic], where)


def _model(config: Any) -> str | None:
    items = within(config, "models", "items")
    names = [text(item["name"]) for item in items if has(item, "name")] if isinstance(items, list) else []
    return ", ".join(names) or None


def _load(config: Any) -> dict[str, str]:
    """Return the settings of the profiled phase and of the endpoint."""
    phases = within(config, "phases")
    last = phases[-1] if isinstance(phases, list) and phases else None
    endpoint = settings(within(config, "endpoint"), ("type", "streaming", "use_server_token_count"))
    load = settings(last, ("type", "requests", "concurrency", "rate"))
    return {f"endpoint {name}": value for name, value in endpoint.items()} | {
        f"load {name}": value for name, value in load.items()
    }


IMPORTER = Importer("aiperf profile_export_aiperf.json (schema 1.4)", "aiperf", _recognises, _read)

"""SGLang: the JSONL of bench_serving (sgl-project/sglang, python/sglang/benchmark/serving.py), a line per benchmark.

Without a request rate the tool writes `Infinity`, which is no JSON. The file records the version of the server, if that
was SGLang, but not that of the client.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mtbench.imports.importer import (
    Content,
    Found,
    Importer,
    Meaning,
    each_benchmark,
    has,
    latencies,
    number,
    optional_text,
    settings,
    taken,
    text,
    within,
)
from mtbench.imports.meanings import OUTPUT_RATE, REQUEST_RATE, REQUESTS, TIME_PER_TOKEN, TOTAL_RATE

FIGURES = {
    "accept_length": Meaning(  # srt: update_spec_metrics adds one token per verification, over the server's lifetime
        "sglang: accept_length",
        "tokens",
        "(accepted draft tokens + verifications) / verifications since the server's start, so warm-up and earlier "
        "requests count; the target's own token counts, that of prefill does not.",
    ),
    "output_throughput": OUTPUT_RATE,
    "total_throughput": TOTAL_RATE,
    "request_throughput": REQUEST_RATE,
    "input_throughput": Meaning(
        "sglang: input_throughput", "tokens/s", "Prompt tokens of the completed requests / wall time of the benchmark."
    ),
    "max_output_tokens_per_s": Meaning(
        "sglang: max_output_tokens_per_s",
        "tokens/s",
        "Most tokens in one second of the benchmark, counted as for the inter-token latency.",
    ),
    "concurrency": Meaning(
        "sglang: concurrency", "requests", "Sum of the requests' latencies / wall time of the benchmark."
    ),
    "completed": REQUESTS,
    "duration": Meaning(
        "sglang: duration", "s", "Time from the first request to the last answer and the query of the server's state."
    ),
}
REQUIRED = ("duration", "completed", "request_throughput", "output_throughput")
SETTINGS = (
    *("backend", "tag", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len"),
    *("random_input_len", "random_output_len", "random_range_ratio"),
)
LATENCIES = {
    "ttft": "time from sending a request to its first message with text",
    "tpot": TIME_PER_TOKEN,
    "itl": "gap between two tokens, where the gap before a message of n tokens counts as n equal gaps on SGLang's own "
    "interface",
    "e2e_latency": "time from sending a request to the end of its stream",
}


def _recognises(documents: Sequence[Any]) -> bool:
    return has(documents[0], "backend", "accept_length", "total_output_tokens", "request_throughput")


def _read(content: Content) -> list[Found]:
    return each_benchmark(content, _result)


def _result(document: Mapping[str, Any], where: str, part: str | None) -> Found:
    for name in REQUIRED:
        number(document.get(name), name, where)
    version = within(document, "server_info", "version")
    model = (within(document, "server_info", name) for name in ("served_model_name", "model_path"))
    return Found(
        figures=[*taken(document, FIGURES, where), *latencies(document, "sglang", LATENCIES, where)],
        model=optional_text(next(filter(None, model), None)),
        part=part,
        settings=({"server version": text(version)} if version else {}) | settings(document, SETTINGS),
    )


IMPORTER = Importer("SGLang bench_serving JSONL", "SGLang", _recognises, _read)

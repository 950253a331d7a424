"""vLLM: the JSON of `vllm bench serve --save-result` (vllm-project/vllm, vllm/benchmarks/serve.py).

`--append-result` adds a line to the file for each benchmark. The file records no version of vLLM. Results of pooling
models have no output throughput and are refused.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtbench.errors import UserError
from mtbench.results.imports.format import ImportedFigure
from mtbench.results.imports.importer import (
    POOLED_LENGTH,
    POOLED_RATE,
    Found,
    Importer,
    Meaning,
    figure,
    has,
    number,
    optional_text,
    settings,
    shown,
)

FIGURES = {
    "spec_decode_acceptance_length": POOLED_LENGTH,
    "spec_decode_acceptance_rate": POOLED_RATE,
    "spec_decode_num_drafts": Meaning("vllm: drafts", "drafts", "Drafts that the server verified in the benchmark."),
    "spec_decode_draft_tokens": Meaning("vllm: draft tokens", "tokens", "Draft tokens proposed in the benchmark."),
    "spec_decode_accepted_tokens": Meaning(
        "vllm: accepted tokens", "tokens", "Draft tokens accepted in the benchmark."
    ),
    "output_throughput": Meaning(
        "vllm: output_throughput",
        "tokens/s",
        "Output tokens of the requests answered without an error / wall time of the benchmark, seen by the client.",
    ),
    "total_token_throughput": Meaning(
        "vllm: total_token_throughput",
        "tokens/s",
        "Prompt and output tokens of the requests answered without an error / wall time of the benchmark.",
    ),
    "request_throughput": Meaning(
        "vllm: request_throughput", "requests/s", "Requests answered without an error / wall time of the benchmark."
    ),
    "request_goodput": Meaning(
        "vllm: request_goodput", "requests/s", "Requests within all `--goodput` limits / wall time of the benchmark."
    ),
    "max_output_tokens_per_s": Meaning(
        "vllm: max_output_tokens_per_s",
        "tokens/s",
        "Most streamed messages in one second of the benchmark, a message counted as one token.",
    ),
    "completed": Meaning("vllm: completed", "requests", "Requests that were answered without an error."),
    "failed": Meaning("vllm: failed", "requests", "Requests that ended with an error."),
    "duration": Meaning("vllm: duration", "s", "Time from the first request to the last answer."),
}
REQUIRED = ("duration", "completed", "request_throughput", "output_throughput", "total_token_throughput")
SETTINGS = ("backend", "label", "date", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency")
LATENCIES = {
    "ttft": "time from sending a request to its first streamed message",
    "tpot": "(request latency − time to first token) / (output tokens − 1) of each request with two or more tokens",
    "itl": "gap between two streamed messages, over all gaps of all requests: a message of several tokens is one gap",
    "e2el": "time from sending a request to its last streamed message",
}
STATISTICS = {"mean": "Mean", "median": "Median", "std": "Standard deviation", "max": "Maximum"}
LATENCY = re.compile(rf"(mean|median|std|max|p\d{{1,2}}(?:\.\d{{1,4}})?)_({'|'.join(LATENCIES)})_ms")


def _recognises(documents: Sequence[Any]) -> bool:
    return has(documents[0], "model_id", "tokenizer_id", "request_throughput", "total_token_throughput")


def _read(where: str, documents: Sequence[Any]) -> list[Found]:
    several = len(documents) > 1
    found = []
    for line, document in enumerate(documents, start=1):
        place = f"{where}, line {line}" if several else where
        if not isinstance(document, dict):
            raise UserError(f"{place}: it is {shown(document)}; it must be an object.")
        found.append(_result(document, place, f"line {line}" if several else None))
    return found


def _result(document: Mapping[str, Any], where: str, part: str | None) -> Found:
    for name in REQUIRED:
        number(document.get(name), name, where)
    return Found(
        figures=[
            *(figure(FIGURES[name], name, document[name], where) for name in FIGURES if document.get(name) is not None),
            *_positions(document, where),
            *_latencies(document, where),
        ],
        model=optional_text(document.get("model_id")),
        part=part,
        settings=settings(document, SETTINGS),
    )


def _positions(document: Mapping[str, Any], where: str) -> Iterator[ImportedFigure]:
    name = "spec_decode_per_position_acceptance_rates"
    rates = document.get(name) or []
    if not isinstance(rates, list):
        raise UserError(f"{where}: {name} is {shown(rates)}; it must be an array of numbers.")
    for place, rate in enumerate(rates):
        meaning = Meaning(
            f"vllm: {name}[{place}]",
            "share",
            f"Drafts of which at least {place + 1} tokens were accepted / all drafts; a share, although "
            "spec_decode_acceptance_rate is in percent.",
        )
        yield figure(meaning, f"{name}[{place}]", rate, where)


def _latencies(document: Mapping[str, Any], where: str) -> Iterator[ImportedFigure]:
    """Yield the statistics of latencies that the file has; any percentile may be in it."""
    for name, value in document.items():
        matched = LATENCY.fullmatch(name)
        if matched and value is not None:
            statistic, what = matched.groups()
            of_what = STATISTICS.get(statistic, f"{statistic[1:]}th percentile")
            yield figure(Meaning(f"vllm: {name}", "ms", f"{of_what} of: {LATENCIES[what]}."), name, value, where)


IMPORTER = Importer("vLLM `bench serve` JSON", "vLLM", _recognises, _read)

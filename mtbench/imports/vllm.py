"""vLLM: the JSON of `vllm bench serve --save-result` (vllm-project/vllm, vllm/benchmarks/serve.py).

`--append-result` adds a line to the file for each benchmark. The file records no version of vLLM. Results of pooling
models have no output throughput and are refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mtbench.imports.format import ImportedFigure
from mtbench.imports.importer import (
    Content,
    Found,
    Importer,
    Meaning,
    each_benchmark,
    figure,
    has,
    latencies,
    number,
    numbers,
    optional_text,
    settings,
    taken,
)
from mtbench.imports.meanings import (
    OUTPUT_RATE,
    POOLED_LENGTH,
    POOLED_RATE,
    REQUEST_RATE,
    REQUESTS,
    TIME_PER_TOKEN,
    TOTAL_RATE,
)

FIGURES = {
    "spec_decode_acceptance_length": POOLED_LENGTH,
    "spec_decode_acceptance_rate": POOLED_RATE,
    "spec_decode_num_drafts": Meaning("vllm: drafts", "drafts", "Drafts that the server verified in the benchmark."),
    "spec_decode_draft_tokens": Meaning("vllm: draft tokens", "tokens", "Draft tokens proposed in the benchmark."),
    "spec_decode_accepted_tokens": Meaning(
        "vllm: accepted tokens", "tokens", "Draft tokens accepted in the benchmark."
    ),
    "output_throughput": OUTPUT_RATE,
    "total_token_throughput": TOTAL_RATE,
    "request_throughput": REQUEST_RATE,
    "request_goodput": Meaning(
        "vllm: request_goodput", "requests/s", "Requests within all `--goodput` limits / wall time of the benchmark."
    ),
    "max_output_tokens_per_s": Meaning(
        "vllm: max_output_tokens_per_s",
        "tokens/s",
        "Most streamed messages in one second of the benchmark, a message counted as one token.",
    ),
    "completed": REQUESTS,
    "failed": Meaning("vllm: failed", "requests", "Requests that ended with an error."),
    "duration": Meaning("vllm: duration", "s", "Time from the first request to the last answer."),
}
REQUIRED = ("duration", "completed", "request_throughput", "output_throughput", "total_token_throughput")
SETTINGS = ("backend", "label", "date", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency")
LATENCIES = {
    "ttft": "time from sending a request to its first streamed message",
    "tpot": TIME_PER_TOKEN,
    "itl": "gap between two streamed messages, over all gaps of all requests: a message of several tokens is one gap",
    "e2el": "time from sending a request to its last streamed message",
}


def _recognises(documents: Sequence[Any]) -> bool:
    return has(documents[0], "model_id", "tokenizer_id", "request_throughput", "total_token_throughput")


def _read(content: Content) -> list[Found]:
    return each_benchmark(content, _result)


def _result(document: Mapping[str, Any], where: str, part: str | None) -> Found:
    for name in REQUIRED:
        number(document.get(name), name, where)
    return Found(
        figures=[
            *taken(document, FIGURES, where),
            *_positions(document, where),
            *latencies(document, "vllm", LATENCIES, where),
        ],
        model=optional_text(document.get("model_id")),
        part=part,
        settings=settings(document, SETTINGS),
    )


def _positions(document: Mapping[str, Any], where: str) -> Iterator[ImportedFigure]:
    name = "spec_decode_per_position_acceptance_rates"
    for place, rate in enumerate(numbers(document.get(name) or [], name, where)):
        meaning = Meaning(
            f"vllm: {name}[{place}]",
            "share",
            f"Drafts of which at least {place + 1} tokens were accepted / all drafts; a share, although "
            "spec_decode_acceptance_rate is in percent.",
        )
        yield figure(meaning, f"{name}[{place}]", rate, where)


IMPORTER = Importer("vLLM `bench serve` JSON", "vLLM", _recognises, _read)

"""Definitions that more than one tool shares, or that equal a figure of ours. Each was read in its owner's code.

`mtbench/results/acceptance.py` holds our side of the formulas. Our answers are cut at the end token; a tool that counts
tokens accepted after it (vllm issue 56101) gets a larger figure by the same formula.
"""

from mtbench.imports.importer import Meaning

POOLED_LENGTH = Meaning(  # vLLM: vllm/benchmarks/serve.py; aiperf: metrics/types/spec_decode_metrics.py
    "acceptance length, pooled",
    "tokens",
    "1 + accepted draft tokens / verified drafts, over all requests: the target's own token counts, that of prefill "
    "does not.",
    "acceptance.derived.vllm",
)
POOLED_RATE = Meaning(
    "acceptance rate, pooled",
    "percent",
    "Accepted draft tokens / proposed draft tokens, over all requests, in percent; the target's own token counts "
    "nowhere.",
    "acceptance.rate",
    100.0,
)
LENGTH_OF_REQUESTS = Meaning(
    "acceptance length, mean of requests",
    "tokens",
    "1 + accepted draft tokens / verification steps of each request, averaged over requests with equal weight; the "
    "target's own token counts, that of prefill does not.",
    "acceptance.derived.aiperf",
)
PER_VERIFICATION = Meaning(  # SpecForge: benchmarks/benchmarker/utils.py
    "completion tokens per verification",
    "tokens",
    "Completion tokens / verifications, over all requests: each request's token from prefill counts and has no "
    "verification; 1 where the server reports none.",
    "acceptance.derived.sglang",
)
MEAN_CHUNK = Meaning(  # specdec_bench: metrics/acceptance_rate.py
    "chunk length, mean of turns",
    "tokens",
    "Tokens per streamed chunk of each turn, prefill's chunk of one token included, averaged over turns with equal "
    "weight.",
    "acceptance.derived.specdec_bench",
)
MEAN_STEP = Meaning(  # Spec-Bench: evaluation/speed.py
    "accept lengths, mean of steps",
    "tokens",
    "Mean of all `accept_lengths` of all questions, one for each step: most methods store the tokens that the step "
    "added, the target's own token included.",
    "acceptance.derived.spec_bench",
)
REQUESTS = Meaning("requests, completed", "requests", "Requests that were answered without an error.")
REQUEST_RATE = Meaning(  # vLLM and SGLang: calculate_metrics, completed / dur_s
    "request throughput, client", "requests/s", "Requests answered without an error / wall time of the benchmark."
)
OUTPUT_RATE = Meaning(
    "output throughput, client",
    "tokens/s",
    "Output tokens of the requests answered without an error / wall time of the benchmark, seen by the client.",
)
TOTAL_RATE = Meaning(
    "total throughput, client",
    "tokens/s",
    "Prompt and output tokens of the requests answered without an error / wall time of the benchmark.",
)
TIME_PER_TOKEN = "(request latency − time to first token) / (output tokens − 1) of each request with two or more tokens"

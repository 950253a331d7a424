"""Result files of other tools. Those of aiperf, guidellm and lm-eval are reduced copies of what the tools wrote here.

The others are written after the code that writes them:
Spec-Bench: hemingkx/Spec-Bench fd2c1cd7, evaluation/eval.py and speed.py
specdec_bench: NVIDIA/Model-Optimizer a2fbac7b, examples/specdec_bench/specdec_bench/metrics/
SpecForge: sgl-project/SpecForge a6b6b023, benchmarks/bench_eagle3.py and benchmarker/utils.py
vLLM: vllm-project/vllm 009e6d4a, vllm/benchmarks/serve.py
SGLang: sgl-project/sglang 00f9ec47, python/sglang/benchmark/serving.py

`RECORDED` has what aiperf 0.13.0 and guidellm 0.8.1 wrote when `mtbench load` sent six prompts, five at a time, to
`mtbench serve --family tiny --method mars:tau=0.8 --max-num-seqs 1 --max-queue 1 --max-new-tokens 24`: two answers and
four refusals each. Ids, headers, payloads, tracebacks and connection metrics were taken out.
"""

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "imports"
RECORDED = Path(__file__).parents[1] / "load" / "recorded"


def answer(question: int, category: str, lengths: list[int], tokens: list[int], wall_s: list[float]) -> dict[str, Any]:
    """A question's line as Spec-Bench writes it."""
    choice = {"index": 0, "turns": ["a"], "decoding_steps": [len(lengths)], "new_tokens": tokens, "wall_time": wall_s}
    return {
        "question_id": question,
        "category": category,
        "answer_id": "x",
        "model_id": "vicuna-7b-v1.3-eagle",
        "choices": [choice | {"accept_lengths": lengths}],
        "tstamp": 1.0,
    }


SPEC_BENCH = [
    answer(81, "writing", [1, 3, 4], [5, 3], [0.2, 0.2]),
    answer(241, "translation", [2, 2], [4], [0.1]),
    answer(321, "qa", [1, 1, 4], [6], [0.25]),
]

# The chunks of four turns of two requests: [1, 3, 2], [1, 1]; [1, 4], [1, 2, 2, 1].
SPECDEC_ACCEPTANCE = [
    {
        "Request_AL": {"0": {"0": 2.0, "1": 1.0}, "1": {"0": 2.5, "1": 1.5}},
        "Average_AL": 1.75,
        "Acceptance_Length_Histogram": {"1": 6, "2": 3, "3": 1, "4": 1},
        "Conditional_Acceptance_Rate": {"1": 1.0, "2": 0.45454545454545453, "3": 0.4, "4": 0.5},
        "Joint_Acceptance_Rate": {
            "1": 1.0,
            "2": 0.45454545454545453,
            "3": 0.18181818181818182,
            "4": 0.09090909090909091,
        },
    }
]
SPECDEC_TIMING = [
    {
        "Output TPS": 118.75,
        "Output TPS/gpu": 59.375,
        "E2E Request Time": {
            "min": "0.1000",
            "max": "0.3000",
            "mean": "0.2000",
            "std": "0.1000",
            "quantiles": {"0.25": "0.1500", "0.5": "0.2100", "0.75": "0.2500"},
        },
        "Number of Output Tokens": {
            "min": "2.0000",
            "max": "6.0000",
            "mean": "4.7500",
            "std": "1.6394",
            "quantiles": {"0.25": "4.2500", "0.5": "5.5000", "0.75": "6.0000"},
        },
    }
]


def forged(accept_length: float, accuracy: float | None) -> dict[str, Any]:
    """A repetition as SpecForge writes it."""
    return {
        "latency": 12.5,
        "output_throughput": 480.0,
        "accept_length": accept_length,
        "accuracy": accuracy,
        "num_questions": 80,
        "num_valid_predictions": 0,
        "categorical_performance": None,
    }


SPECFORGE = {
    "model": "my/draft",
    "mtbench": [
        {
            "batch_size": 1,
            "steps": 3,
            "topk": 1,
            "num_draft_tokens": 4,
            "metrics": [forged(2.75, None)],
            "num_samples": 80,
        }
    ],
    "gsm8k": [
        {
            "batch_size": 8,
            "steps": 3,
            "topk": 1,
            "num_draft_tokens": 4,
            "metrics": [forged(3.25, 0.5), forged(3.5, 0.625)],
            "num_samples": 80,
        }
    ],
}

VLLM = {
    "date": "20261101-120000",
    "endpoint_type": "openai",
    "backend": "openai",
    "label": "openai",
    "model_id": "Qwen/Qwen3-8B",
    "tokenizer_id": "Qwen/Qwen3-8B",
    "num_prompts": 8,
    "request_rate": "inf",
    "burstiness": 1.0,
    "max_concurrency": 2,
    "duration": 4.0,
    "completed": 8,
    "failed": 0,
    "total_input_tokens": 96,
    "total_output_tokens": 480,
    "request_throughput": 2.0,
    "request_goodput": None,
    "output_throughput": 120.0,
    "total_token_throughput": 144.0,
    "max_output_tokens_per_s": 150.0,
    "max_concurrent_requests": 2,
    "rtfx": 0.0,
    "spec_decode_acceptance_rate": 46.666666666666664,
    "spec_decode_acceptance_length": 2.4,
    "spec_decode_num_drafts": 25,
    "spec_decode_draft_tokens": 75,
    "spec_decode_accepted_tokens": 35,
    "spec_decode_per_position_acceptance_rates": [0.9, 0.375, 0.125],
    "mean_ttft_ms": 18.5,
    "median_ttft_ms": 18.0,
    "std_ttft_ms": 1.5,
    "p99_ttft_ms": 27.5,
    "mean_tpot_ms": 4.25,
    "median_tpot_ms": 4.0,
    "p99.9_itl_ms": 30.25,
}

SGLANG = {
    "tag": None,
    "backend": "sglang",
    "dataset_name": "random",
    "request_rate": float("inf"),
    "max_concurrency": None,
    "sharegpt_output_len": None,
    "random_input_len": 1024,
    "random_output_len": 1024,
    "random_range_ratio": 0.0,
    "server_info": {
        "version": "0.5.9",
        "model_path": "Qwen/Qwen3-8B",
        "internal_states": [{"avg_spec_accept_length": 2.5}],
    },
    "duration": 4.5,
    "completed": 9,
    "total_input_tokens": 90,
    "total_output_tokens": 450,
    "total_output_tokens_retokenized": 449,
    "request_throughput": 2.0,
    "input_throughput": 20.0,
    "output_throughput": 100.0,
    "total_throughput": 120.0,
    "mean_e2e_latency_ms": 900.0,
    "median_ttft_ms": 25.0,
    "max_itl_ms": 40.0,
    "concurrency": 1.8,
    "accept_length": 2.5,
    "max_output_tokens_per_s": 130.0,
    "max_concurrent_requests": 2,
}


def lines(*documents: Any) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


TEXTS = {
    "spec_bench": lines(*SPEC_BENCH),
    "specdec_acceptance": json.dumps(SPECDEC_ACCEPTANCE, indent=4),
    "specdec_timing": json.dumps(SPECDEC_TIMING, indent=4),
    "specforge": json.dumps(SPECFORGE, indent=4),
    "vllm": json.dumps(VLLM),
    "sglang": lines(SGLANG),
    "guidellm": (FOLDER / "guidellm.json").read_text(),
    "aiperf": (FOLDER / "aiperf.json").read_text(),
    "lm_eval_results": (FOLDER / "lm_eval_results.json").read_text(),
    "lm_eval_samples": (FOLDER / "lm_eval_samples.jsonl").read_text(),
}

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


def lines(*documents: Any) -> str:
    return "".join(json.dumps(document) + "\n" for document in documents)


TEXTS = {file.stem: file.read_text() for file in sorted(FOLDER.glob("*.json*"))}
SPEC_BENCH = [json.loads(line) for line in TEXTS["spec_bench"].splitlines()]
SPECDEC_ACCEPTANCE = json.loads(TEXTS["specdec_acceptance"])  # of turns with the chunks [1, 3, 2], [1, 1]; [1, 4], …
SPECFORGE, VLLM, SGLANG = (json.loads(TEXTS[name]) for name in ("specforge", "vllm", "sglang"))

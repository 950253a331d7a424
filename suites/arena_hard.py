"""Arena-Hard v2.0: 500 of its 750 difficult requests of real users. Speed and acceptance only.

Paper: "From Crowdsourced Data to High-Quality Benchmarks: Arena-Hard and BenchBuilder Pipeline", Li et al., arXiv
2406.11939. Data: lmarena-ai/arena-hard-auto, data/arena-hard-v2.0/question.jsonl (Apache-2.0). The 500 are those that
DeepSpec draws (mtbench/evaluation/deepspec.py). The original lets another model judge the answers; mtbench does not.

    mtbench run --suite arena-hard                              # downloaded once from DeepSpec, then cached
    mtbench run --suite arena-hard --offline --data-dir DIR     # DIR/arena_hard/question.jsonl
"""

from collections.abc import Mapping
from typing import Any

from mtbench.evaluation import deepspec
from mtbench.evaluation.registry import SUITES


@SUITES.register("arena-hard")
class ArenaHard(deepspec.DrawnQuestions):
    title = "Arena-Hard"
    files = ("arena_hard/question.jsonl",)
    origin = (
        "eval_datasets/arena-hard-v2.jsonl of github.com/deepseek-ai/DeepSpec, or "
        "data/arena-hard-v2.0/question.jsonl of lmarena-ai/arena-hard-auto"
    )
    url = deepspec.url("arena-hard-v2.jsonl")
    sha256 = "e5fcce94ffb1a2ef2082b5c63ac36608f2b7faf00da13ecb94ce2adc649b7b91"

    def wording(self, row: Mapping[str, Any]) -> str:
        prompt: str = row["prompt"]
        return prompt

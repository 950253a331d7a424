"""MBPP in DeepSpec's setting: 256 requests for a small Python function, without its name. Speed and acceptance only.

Paper: "Program Synthesis with Large Language Models", Austin et al., arXiv 2108.07732. Data: the sanitized test split
of google-research-datasets/mbpp (CC BY 4.0), 257 rows, of which DeepSpec draws 256 (mtbench/evaluation/deepspec.py).

    mtbench run --suite mbpp-deepspec                              # downloaded once from DeepSpec, then cached
    mtbench run --suite mbpp-deepspec --offline --data-dir DIR     # DIR/mbpp/mbpp.jsonl

DeepSpec's prompt is the bare sentence. MBPP's tests call a function by its name, which this prompt lacks, so answers
cannot be scored. The suite `mbpp` shows the tests in the prompt and is scored.
"""

from collections.abc import Mapping
from typing import Any

from mtbench.evaluation import deepspec
from mtbench.evaluation.registry import SUITES


@SUITES.register("mbpp-deepspec")
class MbppDeepSpec(deepspec.DrawnQuestions):
    title = "MBPP"
    files = ("mbpp/mbpp.jsonl",)
    origin = "eval_datasets/mbpp.jsonl of github.com/deepseek-ai/DeepSpec, or rows of google-research-datasets/mbpp"
    url = deepspec.url("mbpp.jsonl")
    sha256 = "019b981f7122e39ce58866cf93f4206511c72532cb537bbaf298753a0f128ba7"
    count = 256

    def wording(self, row: Mapping[str, Any]) -> str:
        prompt: str = row["prompt"]
        return prompt

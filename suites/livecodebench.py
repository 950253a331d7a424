"""LiveCodeBench: 500 of its 1,055 problems of programming contests (release 6). Speed and acceptance only.

Paper: "LiveCodeBench", Jain et al., arXiv 2403.07974. Data: livecodebench/code_generation_lite, test.jsonl to
test6.jsonl. The 500 are those that DeepSpec draws, in its words (mtbench/evaluation/deepspec.py).

    mtbench run --suite livecodebench                              # downloaded once from DeepSpec, then cached
    mtbench run --suite livecodebench --offline --data-dir DIR     # DIR/livecodebench/livecodebench.jsonl

lm-eval 0.4.13 has no task for LiveCodeBench, and its tests are gigabytes, so answers are not scored.
"""

from collections.abc import Mapping
from typing import Any

from mtbench.evaluation import deepspec
from mtbench.evaluation.registry import SUITES

REQUEST = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{question}\n\n### Format: {form}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)


@SUITES.register("livecodebench")
class LiveCodeBench(deepspec.DrawnQuestions):
    title = "LiveCodeBench"
    files = ("livecodebench/livecodebench.jsonl",)
    origin = (
        "eval_datasets/livecodebench.jsonl of github.com/deepseek-ai/DeepSpec, or rows of "
        "livecodebench/code_generation_lite"
    )
    url = deepspec.url("livecodebench.jsonl")
    sha256 = "40ed536492f331ac27b3b68506072366ca1d3a304b92c31d822574e778c87318"

    def wording(self, row: Mapping[str, Any]) -> str:
        code, form = row["starter_code"], "Use the following code structure:"
        if not code:
            code, form = "# YOUR CODE HERE", "Write your code in the following format:"
        return REQUEST.format(question=row["question_content"], form=form, code=code)

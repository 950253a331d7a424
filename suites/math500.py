"""MATH-500: 500 problems of competition mathematics, reasoning step by step, the answer in a box.

Papers: "Measuring Mathematical Problem Solving With the MATH Dataset", Hendrycks et al., arXiv 2103.03874; the 500 of
"Let's Verify Step by Step", Lightman et al., arXiv 2305.20050. Data: HuggingFaceH4/MATH-500.
Task: lm-eval's `hendrycks_math500` at 0-shot with the words of DeepSpec (mtbench/evaluation/deepspec.py), which most
chat models know. lm-eval's metric compares the text between the first and the last dollar sign. Here it gets the
content of the last box, so that the normalisation is lm-eval's and the format is the one that the prompt requests.

    mtbench run --suite math500 --family deepspec-qwen3-4b
    mtbench run --suite math500 --offline --data-dir DIR   # DIR/math500/test.jsonl, or .gz
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mtbench.evaluation import deepspec
from mtbench.evaluation.by_value import last_box
from mtbench.evaluation.formulas import find_formula, same_formulas
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES


def boxed(answers: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the content of each answer's last box; an answer without a box is unchanged. A filter of lm-eval."""
    return [[last_box(text) or text for text in of_doc] for of_doc in answers]


@SUITES.register("math500")
class Math500(HarnessSuite):
    tasks: ClassVar = {"hendrycks_math500": {"test": "math500/test.jsonl"}}
    folder = "hendrycks_math"
    config: ClassVar = {
        "doc_to_text": "{{problem}}" + deepspec.BOXED,
        "filter_list": [
            {"name": "boxed", "filter": [{"function": "custom", "filter_fn": boxed}, {"function": "take_first"}]}
        ],
    }
    num_fewshot = 0
    stop = ()
    filter = "boxed"
    metric = "exact_match"
    max_new_tokens = deepspec.BUDGET
    same_values = staticmethod(same_formulas)
    nothing = "no box"
    find = staticmethod(find_formula)

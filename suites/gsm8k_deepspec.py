"""GSM8K in DeepSpec's setting: 500 questions, reasoning step by step, the answer in a box, 2048 tokens.

Paper: "DSpark", arXiv 2607.05147, Table 1; mtbench/evaluation/deepspec.py draws the questions. Task: lm-eval's
`gsm8k_cot` at 0-shot with DeepSpec's words. DeepSpec does not score answers. The score compares the number in the last
box by its value; without a box, the number that the answer states, else its last one.

    mtbench run --suite gsm8k-deepspec --family deepspec-qwen3-4b --temperature 1
    mtbench run --suite gsm8k-deepspec --offline --data-dir DIR   # DIR/gsm8k/test.jsonl, or .gz
"""

from typing import ClassVar

from mtbench.evaluation import deepspec
from mtbench.evaluation.by_value import number, same_numbers
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES


@SUITES.register("gsm8k-deepspec")
class Gsm8kDeepSpec(HarnessSuite):
    tasks: ClassVar = {"gsm8k_cot": {"test": "gsm8k/test.jsonl"}}
    folder = "gsm8k"
    config: ClassVar = {"doc_to_text": "{{question}}" + deepspec.BOXED}
    num_fewshot = 0
    stop = ()
    filter = "flexible-extract"
    nothing = "no number"
    find = staticmethod(number)
    same_values = staticmethod(same_numbers)
    own_rule = True
    metric = "exact_match"
    max_new_tokens = deepspec.BUDGET

    def _selected_docs(self, name: str, limit: int | None) -> list[int] | None:
        return deepspec.draw(len(self._tasks[name].eval_docs), 500)[:limit]

"""AIME 2025: the 30 problems of both exams, reasoning step by step, the answer (a whole number) in a box.

Data: MathArena/aime_2025 (CC BY-NC-SA 4.0), the source of DeepSpec's evaluation.
Task: lm-eval's `aime25` at 0-shot with the words of DeepSpec (mtbench/evaluation/deepspec.py). lm-eval compares the
content of the last box. Thinking models need far more than DeepSpec's 2048 tokens here: `--max-new-tokens 32768`.

    mtbench run --suite aime25 --family deepspec-qwen3-4b
    mtbench run --suite aime25 --offline --data-dir DIR   # DIR/aime25/train.jsonl, or .gz
"""

from typing import ClassVar

from mtbench.evaluation import deepspec
from mtbench.evaluation.formulas import find_formula, same_formulas
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES


@SUITES.register("aime25")
class Aime25(HarnessSuite):
    tasks: ClassVar = {"aime25": {"train": "aime25/train.jsonl"}}
    folder = "aime"
    config: ClassVar = {
        "dataset_path": "MathArena/aime_2025",
        **dict.fromkeys(("training_split", "fewshot_split", "test_split"), "train"),
        "doc_to_text": "{{problem}}" + deepspec.BOXED,
    }
    num_fewshot = 0
    stop = ()
    filter = "none"
    metric = "exact_match"
    max_new_tokens = deepspec.BUDGET
    same_values = staticmethod(same_formulas)
    nothing = "no box"
    find = staticmethod(find_formula)

"""GSM8K: 1,319 grade-school word problems with five few-shot examples; the answer follows `####`.

Paper: "Training Verifiers to Solve Math Word Problems", Cobbe et al., arXiv 2110.14168. Data: openai/gsm8k (MIT).
Task: lm-eval's `gsm8k`, 5-shot, each example a turn of the chat. The examples show the format `#### 18`, so the score
uses the strict filter. By value: the number that the answer states, else its last one.

    mtbench run --suite gsm8k --limit 256
    mtbench run --suite gsm8k --offline --data-dir DIR   # DIR/gsm8k/train.jsonl and DIR/gsm8k/test.jsonl, or .gz
"""

from typing import ClassVar

from mtbench.evaluation.by_value import same_numbers
from mtbench.evaluation.lm_eval import TrainableSuite
from mtbench.evaluation.registry import SUITES


@SUITES.register("gsm8k")
class Gsm8k(TrainableSuite):
    tasks: ClassVar = {"gsm8k": {"train": "gsm8k/train.jsonl", "test": "gsm8k/test.jsonl"}}
    folder = "gsm8k"
    num_fewshot = 5
    filter = "strict-match"
    nothing = "no number behind ####"
    same_values = staticmethod(same_numbers)
    metric = "exact_match"
    max_new_tokens = 256

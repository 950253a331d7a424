"""GSM8K in the MARS paper's setting: zero-shot, the question as one turn of the chat, 256 tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `gsm8k_cot` at 0-shot with the chat template. The paper does not name its filter. We use
`flexible-extract` (the last number of the answer). The strict filter needs "The answer is 18.", which a prompt without
examples does not request; an untuned instruct model would score near 0 there, and the paper reports 57.3 (7B).

    mtbench run --suite gsm8k-paper --family qwen2.5-7b --limit 256
"""

from typing import ClassVar

from mtbench.evaluation.by_value import same_numbers
from mtbench.evaluation.lm_eval import TrainableSuite
from mtbench.evaluation.registry import SUITES


@SUITES.register("gsm8k-paper")
class Gsm8kPaper(TrainableSuite):
    tasks: ClassVar = {"gsm8k_cot": {"test": "gsm8k/test.jsonl"}}
    folder = "gsm8k"
    num_fewshot = 0
    filter = "flexible-extract"
    nothing = "no number"
    same_values = staticmethod(same_numbers)
    metric = "exact_match"
    max_new_tokens = 256

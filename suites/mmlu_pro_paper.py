"""MMLU-Pro in the MARS paper's setting: zero-shot, at most 256 new tokens, and more stop strings.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `mmlu_pro` at 0-shot with the chat template, greedy decoding. The stop strings are those of the authors'
fork (github.com/ZHZisZZ/lm-evaluation-harness), which adds three to lm-eval's "Question:"; any "Q:" ends an answer. The
paper does not stop decoding at a stop string (`--protocol paper`).

    mtbench run --suite mmlu-pro-paper --family qwen2.5-7b --limit 20
"""

from mtbench.evaluation.registry import SUITES

from .mmlu_pro import MmluPro


@SUITES.register("mmlu-pro-paper")
class MmluProPaper(MmluPro):
    num_fewshot = 0
    stop = ("</s>", "Q:", "<|im_end|>", "Question:")
    max_new_tokens = 256

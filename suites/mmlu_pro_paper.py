"""MMLU-Pro as the MARS paper asks it: no examples, at most 256 new tokens, and more strings that end an answer.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `mmlu_pro` at 0-shot with the chat template, greedy. The stop strings are those of the authors' fork
(github.com/ZHZisZZ/lm-evaluation-harness), which has three besides lm-eval's "Question:". They end an answer that says
"Q:" for whatever reason. There, decoding goes on behind them (`--protocol paper`).

    mtbench run --suite mmlu-pro-paper --family qwen2.5-7b --limit 20
"""

from mtbench.evaluation.registry import SUITES

from .mmlu_pro import MmluPro


@SUITES.register("mmlu-pro-paper")
class MmluProPaper(MmluPro):
    num_fewshot = 0
    stop = ("</s>", "Q:", "<|im_end|>", "Question:")
    max_new_tokens = 256

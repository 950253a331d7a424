"""BBH as the MARS paper asks it: as `bbh`, with at most 256 new tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `bbh_cot_fewshot`, its three examples as turns of the chat, greedy. Answers that have not come to "the
answer is" within 256 tokens count as wrong. There, decoding goes on behind a stop string (`--protocol paper`).

    mtbench run --suite bbh-paper --family qwen2.5-7b --limit 20
"""

from mtbench.evaluation.registry import SUITES

from .bbh import Bbh


@SUITES.register("bbh-paper")
class BbhPaper(Bbh):
    max_new_tokens = 256

"""BBH in the MARS paper's setting: as `bbh`, with at most 256 new tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `bbh_cot_fewshot`, its three examples as turns of the chat, greedy decoding. An answer without "the
answer is" in its first 256 tokens is wrong. The paper does not stop decoding at a stop string (`--protocol paper`).

    mtbench run --suite bbh-paper --family qwen2.5-7b --limit 20
"""

from mtbench.evaluation.registry import SUITES

from .bbh import Bbh


@SUITES.register("bbh-paper")
class BbhPaper(Bbh):
    max_new_tokens = 256

"""IFEval in the MARS paper's setting: as `ifeval`, with at most 256 new tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `ifeval` with the chat template, greedy decoding. The paper does not name its metric; we use
`prompt_level_strict_acc`. A prompt that needs more than 256 tokens ("at least 600 words") always scores 0.

    mtbench run --suite ifeval-paper --family qwen2.5-7b
"""

from mtbench.evaluation.registry import SUITES

from .ifeval import IfEval


@SUITES.register("ifeval-paper")
class IfEvalPaper(IfEval):
    max_new_tokens = 256

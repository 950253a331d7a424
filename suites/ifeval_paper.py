"""IFEval as the MARS paper asks it: as `ifeval`, with at most 256 new tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `ifeval` with the chat template, greedy. The paper names no metric; we take `prompt_level_strict_acc`.
Prompts that ask for more than 256 tokens ("at least 600 words") cannot be answered rightly within them.

    mtbench run --suite ifeval-paper --family qwen2.5-7b
"""

from mtbench.evaluation.registry import SUITES

from .ifeval import IfEval


@SUITES.register("ifeval-paper")
class IfEvalPaper(IfEval):
    max_new_tokens = 256

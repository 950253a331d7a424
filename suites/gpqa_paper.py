"""GPQA as the MARS paper asks it: the 448 questions of the subset `main`, at most 256 new tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `gpqa_main_cot_zeroshot` with the chat template, greedy. The paper does not say which filter it reads.
We take `flexible-extract` as in `gpqa`: an untuned instruct model hardly ever says "The answer is (A)." unasked, and
the paper has 13.6 (0.5B) and 11.6 (7B) for those. Both are below chance (25), as answers cut off at 256 tokens are.

    mtbench run --suite gpqa-paper --family qwen2.5-7b
"""

from collections.abc import Sequence

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES

from .gpqa import Gpqa


@SUITES.register("gpqa-paper")
class GpqaPaper(Gpqa):
    max_new_tokens = 256

    def _choose(self, rest: str, subtasks: Sequence[str]) -> dict[str, str]:
        if rest:
            raise UserError(f"suite 'gpqa-paper' takes nothing behind a colon, not {rest!r}; see `gpqa:{rest}`")
        return super()._choose("main", subtasks)

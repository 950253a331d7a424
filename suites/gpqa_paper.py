"""GPQA in the MARS paper's setting: the 448 questions of the subset `main`, at most 256 new tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `gpqa_main_cot_zeroshot` with the chat template, greedy decoding. The paper does not name its filter. We
use `flexible-extract` as in `gpqa`: instruct models without further tuning rarely write "The answer is (A)." unasked,
and the paper reports 13.6 (0.5B) and 11.6 (7B) for them. Both are below chance (25) because 256 tokens cut answers off.

    mtbench run --suite gpqa-paper --family qwen2.5-7b
"""

from collections.abc import Sequence

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES

from .gpqa import Gpqa


@SUITES.register("gpqa-paper")
class GpqaPaper(Gpqa):
    max_new_tokens = 256

    def _select_tasks(self, variant: str, subtasks: Sequence[str]) -> dict[str, str]:
        if variant:
            raise UserError(f"suite 'gpqa-paper' has no variants; for the subset {variant!r} use `gpqa:{variant}`")
        return super()._select_tasks("main", subtasks)

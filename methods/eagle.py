"""EAGLE: a draft reads the target's hidden states and its own, and drafts a chain or a tree.

Li, Wei, Zhang, Zhang: "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024, arXiv
2401.15077; "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", NeurIPS 2025,
arXiv 2503.01840. The draft reads the hidden states of some of the target's layers at a position, with the token after
it; then its own output with the token it drafted. The tree is the Cartesian product of each depth's best choices, as in
EAGLE-1, or the likeliest prefixes of levels that are expanded so, as in EAGLE-2 (arXiv 2406.16858); the longest path
that equals the target's own choices is accepted.

A checkpoint of P-EAGLE (Hui et al., arXiv 2602.01469) drafts all depths in one forward; config.json names the mask
(mtbench/models/drafts/eagle_draft.py). `ahead` is free, as in vLLM: all masks are alike, but for their positions.

R = rows, K = drafts of a path.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mtbench.decoding.feature_drafting import draft_tree, first_entries, refuse_other_drafts
from mtbench.decoding.method import ModelRunners, Rows, State, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.trees import Guesses
from mtbench.decoding.verification import CONFIDENCE, FILTER_DRAFT, TREE, VERIFY, TreeMethod, Verify
from mtbench.models.loading import Inspected
from mtbench.options import option


@METHODS.register("eagle")
@dataclass(frozen=True, kw_only=True)
class Eagle(TreeMethod):
    """A draft layer on the target's hidden states drafts; the target accepts the drafts it would have chosen itself."""

    ahead: int = option(4, "K: tokens drafted for each forward, the depth of a tree", low=1, widths=(1, 2, 4, 7))
    tree: str = option("1", TREE)
    draft: str = option("eagle", "role of the checkpoint that drafts", role=True)
    confidence: float = option(0.0, CONFIDENCE, low=0.0, high=1.0)
    verify: Verify = option("match", VERIFY)
    filter_draft: bool = option(False, FILTER_DRAFT)

    title = "EAGLE"
    roles = ("ar",)
    choices = ("eagle:ahead=2|4|7", "eagle:tree=3x2")

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        refuse_other_drafts(checkpoints, self.draft, sequential=True, tree=self.tree)

    def window(self) -> Window:
        return self.tree_window()

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`cached` (R,): the draft's final entries."""
        return {"cached": first_entries(rows, runners[self.draft]), **super().start(rows, runners)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor | Guesses:
        drafted = draft_tree(runners, self.draft, self.drawing(rows), state["cached"], self.new_tree())
        self.keep_offer(state, rows, drafted.logits)
        return drafted.tokens

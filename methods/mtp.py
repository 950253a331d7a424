"""Multi-token prediction: layers in the target's own checkpoint draft a chain of tokens.

DeepSeek-AI: "DeepSeek-V3 Technical Report", arXiv 2412.19437, sections 2.2 and 5.4.3. The layer reads the target's last
hidden state at a position, with the token after it, and predicts the token after that; for more tokens it reads its own
output with the token it drafted. Most checkpoints have one layer, trained to predict one token. Of several, each drafts
the token after that of the layer before, whose output it reads at every position; after the last layer it is the turn
of the first (mtbench/models/drafts/mtp.py).
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

AHEAD = "K: tokens drafted for each forward, one by each layer of the checkpoint in turn; most checkpoints have 1 layer"


@METHODS.register("mtp")
@dataclass(frozen=True, kw_only=True)
class Mtp(TreeMethod):
    """The target's own multi-token-prediction layer drafts; the target accepts drafts that it would have chosen."""

    ahead: int = option(1, AHEAD, low=1, widths=(1, 2, 3))
    tree: str = option("1", TREE)
    draft: str = option("#mtp", "what drafts: a role, or `#PART` of the target's checkpoint", role=True)
    confidence: float = option(0.0, CONFIDENCE, low=0.0, high=1.0)
    verify: Verify = option("match", VERIFY)
    filter_draft: bool = option(False, FILTER_DRAFT)

    title = "MTP"
    roles = ("ar",)
    choices = ("mtp:ahead=1|2|3",)

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

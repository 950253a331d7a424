"""EAGLE: a draft reads the target's hidden states and its own, and drafts a chain or a tree.

Li, Wei, Zhang, Zhang: "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty", ICML 2024, arXiv
2401.15077; "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", NeurIPS 2025,
arXiv 2503.01840. The draft reads the hidden states of some of the target's layers at a position, with the token after
it; then its own output with the token it drafted. The tree is the Cartesian product of each depth's best choices, as in
EAGLE-1; the longest path that equals the target's own choices is accepted.

A checkpoint of P-EAGLE (Hui et al., arXiv 2602.01469) drafts all depths in one forward: config.json says that it is one
(mtbench/models/drafts/eagle_draft.py). `ahead` is free, as in vLLM: all masks are alike, but for their positions.

R = rows, G = guesses, K = drafts of a path, V = vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding import trees
from mtbench.decoding.feature_drafting import draft_tree, first_entries, levels, refuse_other_drafts
from mtbench.decoding.method import Commit, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.verification import CONFIDENCE, VERIFY, VerifiedMethod, Verify, verify_tree
from mtbench.errors import UserError
from mtbench.models.loading import Inspected
from mtbench.models.token_map import TOKEN_MAP
from mtbench.options import AUTO, option


@METHODS.register("eagle")
@dataclass(frozen=True, kw_only=True)
class Eagle(VerifiedMethod):
    """A draft layer on the target's hidden states drafts; the target accepts the drafts it would have chosen itself."""

    ahead: int = option(4, "K: tokens drafted for each forward, the depth of a tree", low=1, widths=(1, 2, 4, 7))
    tree: str = option("1", "choices at each depth, such as 3x2; 1 if not listed; `1` is a chain")
    draft: str = option("eagle", "role of the checkpoint that drafts", role=True)
    confidence: float = option(0.0, CONFIDENCE, low=0.0, high=1.0)
    token_map: str | None = option(None, TOKEN_MAP)
    verify: Verify = option("match", VERIFY)

    title = "EAGLE"
    roles = ("ar",)
    choices = ("eagle:ahead=2|4|7", "eagle:tree=3x2")

    def __post_init__(self) -> None:
        if self.ahead != AUTO:
            trees.parse_branches(self.tree, self.ahead, f"{self.name}: tree={self.tree!r}")
        for given, only_chains in (
            (f"ahead={self.ahead}", self.ahead == AUTO),
            (f"verify={self.verify}", self.verify != "match"),
            (f"confidence={self.confidence:g}", self.confidence > 0),
        ):
            if self.tree != "1" and only_chains:
                raise UserError(
                    f"{self.name}: {given} needs a chain, and tree={self.tree} is none; leave one of them out. "
                    f"See `mtbench ls methods {self.name}`."
                )

    @property
    def branches(self) -> list[int]:
        """Choices at each depth."""
        return trees.parse_branches(self.tree, self.ahead)

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        refuse_other_drafts(checkpoints, self.draft, sequential=True)

    def window(self) -> Window:
        drafts, commits = self.ahead, self.ahead + 1
        if self.tree == "1":
            return Window(pending=1, guesses=self.ahead, commits=commits, drafts=drafts)
        offset, sees = trees.tree(trees.products(self.branches))
        return Window(pending=1, guesses=len(offset), commits=commits, sees=sees, offset=offset, drafts=drafts)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`cached` (R,): the draft's final entries; `behind` (R, G): parents of the guesses."""
        levels(tuple(self.branches), rows.known.device)  # a step must not copy them from the host
        parents = torch.tensor(trees.products(self.branches), device=rows.known.device)
        state = {"cached": first_entries(rows), "behind": parents.expand(len(rows.known), -1)}
        return {**state, **super().start(rows, runners)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        drafted = draft_tree(runners, self.draft, self.drawing(rows), state["cached"], self.branches)
        self.keep_offer(state, rows, drafted.logits)
        return drafted.tokens

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        if self.tree == "1":
            return super().accept(state, rows, output)
        tokens, accepted, path = verify_tree(output, output.guess, state["behind"], self.branches)
        return Commit(tokens, accepted + 1, kept=accepted, path=path)

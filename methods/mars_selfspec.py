"""Self-speculation on a MARS checkpoint: its masks draft, its own next-token predictions verify, in one forward.

After SDLM (arXiv 2509.24007), which verifies its own drafts of a block, and TiDAR (arXiv 2511.08923), which drafts for
every outcome of the verification in the same forward. Here a plain MARS checkpoint (arXiv 2604.07023) does both,
without retraining and without a second model: a forward feeds the last known token, K drafts, and K + 1 groups of
K masks, group j after draft j. The predictions at real tokens accept j drafts and choose the next token y. The masks of
group j have the positions of y and its successors, so they predict the next drafts. Tokens are those of `ar` on the
same checkpoint. The cost is a wide forward: K + (K + 1)·K guesses, each with logits. `ahead=auto` adapts K to recent
acceptance; on a GPU it uses the positions that cost nothing extra.

The drafts may be a tree of G guesses (mtbench/decoding/draft_trees.py). A group of masks then follows the last known
token and each guess; the group of the last accepted guess predicts the next tree. A forward feeds G + (G + 1)·K
guesses: at K = 3 a chain feeds 15, `tree=best:4` 19, `best:8` 35 and `best:16` 67.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtbench import sampling
from mtbench.decoding.draft_trees import DraftTree, parse_tree
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.trees import Guesses, with_masks
from mtbench.decoding.verification import TREE, verify_tree
from mtbench.errors import UserError
from mtbench.options import AUTO, option


@METHODS.register("mars-selfspec")
@dataclass(frozen=True, kw_only=True)
class MarsSelfSpeculative(Method):
    """The model's masks draft tokens that its own next forward verifies: lossless, without a second model."""

    ahead: int = option(AUTO, "K: depth of the drafts, and masks after each of them", low=1, widths=(1, 2, 3, 4))
    tree: str = option("1", TREE)

    title = "MARS self-speculation"
    roles = ("mars",)
    needs_mask = True
    claims = "lossless"
    choices = ("mars-selfspec:ahead=auto|2|3",)

    def __post_init__(self) -> None:
        if self.ahead != AUTO:
            self.new_tree()
        elif self.tree != "1":
            raise UserError(f"{self.name}: tree={self.tree} needs a number as ahead, such as ahead=3; ahead is auto.")

    def new_tree(self) -> DraftTree:
        """Return the tree of a step, without guesses yet."""
        return parse_tree(self.tree, self.ahead, f"{self.name}: tree={self.tree!r}")

    @cached_property
    def of_drafts(self) -> Window:
        """The shape of a forward without masks."""
        return self.new_tree().window

    @property
    def depth(self) -> int:
        """Drafts of a path, and masks of a group: K, or less if the tree has fewer guesses."""
        return self.of_drafts.commits - 1

    def window(self) -> Window:
        window = self.of_drafts
        guesses = window.guesses + (window.guesses + 1) * self.depth
        if window.sees is None or window.offset is None:
            return replace(window, guesses=guesses)
        offset, sees = with_masks(window.offset, window.sees, self.depth)
        return replace(window, guesses=guesses, offset=offset, sees=sees)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`drafts` (R, G): none yet; the mask id, which no model emits, marks a missing draft.

        `sees` (R, G, G) and `offset` (R, G), of drafts whose tree differs from row to row.
        """
        mask_id = runners.target.checkpoint.mask_id
        assert mask_id is not None, "planning refuses a checkpoint without one"
        drafts = torch.full((len(rows.known), self.of_drafts.guesses), mask_id, device=rows.known.device)
        state = {"mask": torch.full_like(rows.known, mask_id)[:, None], "drafts": drafts}
        if self.of_drafts.sees is None:
            state["sees"] = torch.eye(drafts.shape[1], device=drafts.device).bool().expand(len(drafts), -1, -1)
            state["offset"] = torch.zeros_like(drafts)
        return state

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor | Guesses:
        drafts = state["drafts"][:, : self.of_drafts.guesses]
        ids = torch.cat((drafts, state["mask"].expand(-1, (drafts.shape[1] + 1) * self.depth)), 1)
        if self.of_drafts.sees is not None:
            return ids
        offset, sees = with_masks(state["offset"], state["sees"], self.depth)
        return Guesses(ids, sees, offset)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        count, masks, path = self.of_drafts.guesses, torch.arange(self.depth, device=rows.known.device), None
        drafts = output.guess[:, :count]
        if self.tree == "1":
            accepted = sampling.prefix_length(output.agrees(drafts))
            tokens = output.choice[:, : self.depth + 1]
            group = count + 1 + accepted[:, None] * self.depth + masks
            state["drafts"].copy_(state["mask"])
            state["drafts"][:, : self.depth] = output.choice.gather(1, group)
        else:
            tokens, accepted, path = verify_tree(output, drafts, self.depth)
            last = pad(path + 1, (1, 0)).gather(1, accepted[:, None])
            group = count + 1 + last * self.depth + masks
            logits = output.logits.gather(1, group[..., None].expand(-1, -1, output.logits.shape[2]))
            guesses = self.new_tree().at_once(rows, logits, output.position.gather(1, group))
            if isinstance(guesses, Guesses):
                state["sees"].copy_(guesses.sees)
                state["offset"].copy_(guesses.offset)
                guesses = guesses.ids
            state["drafts"].copy_(guesses)
        depth = output.position[:, 1 : count + 1] - output.position[:, :1]
        offered = (depth * (drafts != state["mask"])).amax(1)
        return Commit(tokens, accepted + 1, accepted, path, offered=offered)

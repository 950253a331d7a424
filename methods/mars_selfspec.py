"""Self-speculation on a MARS checkpoint: its masks draft, its own next-token predictions verify, in one forward.

After SDLM (arXiv 2509.24007), which verifies its own drafts of a block, and TiDAR (arXiv 2511.08923), which drafts for
every outcome of the verification in the same forward. Here a plain MARS checkpoint (arXiv 2604.07023) does both,
without retraining and without a second model: a forward feeds the last known token, K drafts, and K + 1 groups of
K masks, group j after draft j. The predictions at real tokens accept j drafts and choose the next token y. The masks of
group j have the positions of y and its successors, so they predict the next drafts. Tokens are those of `ar` on the
same checkpoint. The cost is a wide forward: K + (K + 1)·K guesses, each with logits. `ahead=auto` adapts K to recent
acceptance; on a GPU it uses the positions that cost nothing extra.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.trees import mask_groups, tree
from mtbench.options import AUTO, option


@METHODS.register("mars-selfspec")
@dataclass(frozen=True, kw_only=True)
class MarsSelfSpeculative(Method):
    """The model's masks draft tokens that its own next forward verifies: lossless, without a second model."""

    ahead: int = option(AUTO, "K: drafts, and masks after each of them", low=1, widths=(1, 2, 3, 4))

    title = "MARS self-speculation"
    roles = ("mars",)
    needs_mask = True
    claims = "lossless"
    choices = ("mars-selfspec:ahead=auto|2|3",)

    def window(self) -> Window:
        offset, sees = tree(mask_groups(self.ahead, self.ahead))
        return Window(pending=1, guesses=len(offset), commits=self.ahead + 1, sees=sees, offset=offset)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`drafts` (R, K): none yet; the mask id, which no model emits, marks a missing draft."""
        mask_id = runners.target.checkpoint.mask_id
        assert mask_id is not None, "planning refuses a checkpoint without one"
        drafts = torch.full((len(rows.known), self.ahead), mask_id, device=rows.known.device)
        return {"mask": torch.full_like(rows.known, mask_id)[:, None], "drafts": drafts}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        masks = state["mask"].expand(-1, (self.ahead + 1) * self.ahead)
        return torch.cat((state["drafts"][:, : self.ahead], masks), 1)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        drafts = output.guess[:, : self.ahead]
        accepted = sampling.prefix_length(output.agrees(drafts))
        group = accepted[:, None] * self.ahead + torch.arange(self.ahead, device=accepted.device)
        state["drafts"].copy_(state["mask"])
        state["drafts"][:, : self.ahead] = output.choice.gather(1, self.ahead + 1 + group)
        offered = (drafts != state["mask"]).sum(1)
        return Commit(output.choice[:, : self.ahead + 1], accepted + 1, kept=accepted, offered=offered)

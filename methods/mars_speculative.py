"""MARS with speculative decoding: a draft model drafts, and masks follow every outcome of the verification.

Jin, Wang, Luo, Sun: "MARS: Enabling Autoregressive Models Multi-Token Generation", arXiv 2604.07023, section 4.6.
A forward feeds K drafts and K + 1 groups of B - 1 masks; group j attends to the first j drafts. Drafts that equal the
target's own choice are accepted. After the next token, the masks of the group that continues the accepted drafts add
their confident predictions, as in `mars`. At tau = 1 they add none, and the tokens are those of `ar`.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.draft_model import PER_FORWARD, PerForward, draft, forwards, refuse_draft
from mtbench.decoding.method import Claims, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.trees import chain, tree, with_masks
from mtbench.models.loading import Inspected
from mtbench.options import option


@METHODS.register("mars-speculative")
@dataclass(frozen=True, kw_only=True)
class MarsSpeculative(Method):
    """Verified drafts, and confident predictions after them."""

    ahead: int = option(4, "K: tokens drafted for each forward", low=1)
    tau: float = option(
        1.0, "threshold of the confidence after the drafts; 1 = none is accepted", low=0.0, high=1.0, per_request=True
    )
    block_size: int = option(4, "B: after each outcome, the next token and B-1 masks", low=2, trained=True)
    draft: str = option("draft", "role of the checkpoint that drafts", role=True)
    per_forward: PerForward = option(1, PER_FORWARD, low=1)

    title = "MARS after a draft"
    roles = ("mars",)
    needs_mask = True
    choices = ("mars-speculative:tau=1|0.95",)

    @property
    def claims(self) -> Claims:
        return "lossless" if self.tau == 1 else "lossy"

    @property
    def masks(self) -> int:
        """Masks of each group."""
        return self.block_size - 1

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        refuse_draft(checkpoints, self.draft, self.per_forward)

    def window(self) -> Window:
        offset, sees = with_masks(*tree(chain(self.ahead)), self.masks)
        commits = self.ahead + self.block_size
        drafts = forwards(self.ahead, self.per_forward)
        return Window(self.block_size, len(offset), commits, sees=sees, offset=offset, drafts=drafts)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        mask_id = runners.target.checkpoint.mask_id
        assert mask_id is not None, "planning refuses a checkpoint without one"
        return {"mask": torch.full_like(rows.known, mask_id)[:, None], "cached": rows.known - 1}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        drawing, ahead = rows.unfiltered, self.ahead
        tokens, _ = draft(runners, self.draft, drawing, state["cached"], ahead, self.per_forward, self.masks)
        return torch.cat((tokens, state["mask"].expand(-1, (self.ahead + 1) * self.masks)), 1)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        accepted = sampling.prefix_length(output.agrees(output.guess[:, : self.ahead]))
        torch.minimum(state["cached"], rows.known + accepted, out=state["cached"])
        column = torch.arange(self.ahead + self.block_size, device=accepted.device) - accepted[:, None] - 1
        group = self.ahead + 1 + accepted[:, None] * self.masks + column.clamp(0, self.masks - 1)
        verified = torch.arange(column.shape[1], device=column.device).clamp(max=self.ahead)
        source = torch.where(column < 0, verified, group)  # drafts and next token, then the group's predictions
        sure = output.sure("probability", rows.option(self, "tau"), never=1.0)
        sure = (column < 0) | (sure.gather(1, source) & (column < self.masks))
        offered = self.ahead + self.masks * rows.differs(self, "tau", 1.0)
        count = sampling.prefix_length(sure)
        return Commit(output.choice.gather(1, source), count, kept=accepted, offered=offered, columns=source)

"""The base of block diffusion methods: a block of masks, whose positions are decided by the model's confidence.

Blocks are counted from position 0, the prompt included. A position attends to its whole block and all earlier blocks,
and predicts the next token, so the last token of a block predicts the first one of the next. The tokens of a block
before its first undecided position are output. A finished block is fed again in the first step of the next block, so
that its keys and values are exact.

R = rows, B = positions of a block, S = slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.options import option

OPEN = -1  # no token yet


@dataclass(frozen=True, kw_only=True)
class Unmasking(Method):
    """Decides masks of a block: the k most confident, and those above a threshold. A subclass has `block_size`."""

    block_size: int
    per_forward: int = option(1, "k: each forward decides at least the k most confident positions", low=1)
    tau: float = option(
        1.0, "also decide positions with probability >= tau; 1 = only the k", low=0.0, high=1.0, per_request=True
    )

    needs_mask = True
    claims = "lossy"

    @property
    def block(self) -> int:
        return self.block_size

    def window(self) -> Window:
        return Window(pending=self.block_size, guesses=self.block_size, commits=self.block_size)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`decided` (R, S): the prompt's tokens; later also decided tokens that are not output yet."""
        place = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
        return {"decided": rows.tokens.masked_fill(place >= rows.known[:, None], OPEN)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        """The block with masks at open positions, (R, B)."""
        mask_id = runners.target.checkpoint.mask_id
        assert mask_id is not None, "planning refuses a checkpoint without one"
        block = state["decided"].gather(1, self.block_places(rows))
        return block.masked_fill(block == OPEN, mask_id)

    def due(self, rows: Rows, places: Tensor) -> Tensor:
        """Return which of the block's positions (R, B) this forward may decide, (R, B) bool."""
        return torch.ones_like(places, dtype=torch.bool)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        places = self.block_places(rows)
        block, due = state["decided"].gather(1, places), self.due(rows, places)
        open, own = (block == OPEN) & due, slice(self.block_size)  # the last column predicts the next block's first
        decide = sampling.top_confidence(output.confidence[:, own], open, self.per_forward)
        decide |= open & output.sure("probability", rows.option(self, "tau"), never=1.0)[:, own]
        block = torch.where(decide, output.choice[:, own], block)
        state["decided"].scatter_(1, places, block)
        output_before = rows.known - rows.base
        fresh = (places - rows.base[:, None] + output_before[:, None]).clamp(max=self.block_size - 1)
        count = sampling.prefix_length(block != OPEN) - output_before
        most = (due & (places >= rows.known[:, None])).sum(1)
        return Commit(block.gather(1, fresh), count, kept=torch.zeros_like(output_before), offered=most - 1)

    def block_places(self, rows: Rows) -> Tensor:
        """Return the positions of each row's block, (R, B)."""
        return rows.base[:, None] + torch.arange(self.block_size, device=rows.base.device)

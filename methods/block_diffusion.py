"""Block diffusion: unmask the current block position by position, the most confident first; then the next block.

Arriola et al.: "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models", ICLR 2025,
arXiv 2503.09573 (BD3-LM), with the shift of autoregressive models: a position predicts the next token, so the last
token of a block predicts the first one of the next (as in the baseline of MARS, arXiv 2604.07023).
The order by confidence is LLaDA's low-confidence remasking, arXiv 2502.09992, section 2.4. The threshold, above which
several positions are decided at once, is from Fast-dLLM, arXiv 2505.22618, section 3.3.

Blocks are counted from position 0, the prompt included. A position attends to its whole block and all earlier blocks.
The tokens of a block before its first undecided position are output. A finished block is fed again in the first step
of the next block, so that its keys and values are exact.

R = rows, B = positions of a block, S = slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.options import option

OPEN = -1  # no token yet


@METHODS.register("block-diffusion")
@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Method):
    """A block of masks, decided in order of the model's confidence."""

    block_size: int = option(4, "B: positions per block; the first block starts the prompt", low=1, trained=True)
    per_forward: int = option(1, "k: each forward decides at least the k most confident positions of the block", low=1)
    tau: float = option(
        1.0, "also decide positions with probability >= tau; 1 = only the k", low=0.0, high=1.0, per_request=True
    )

    title = "Block diffusion"
    roles = ("block_diffusion",)
    needs_mask = True
    claims = "lossy"
    choices = ("block-diffusion:tau=0.9|0.8",)

    @property
    def block(self) -> int:
        return self.block_size

    def window(self) -> Window:
        return Window(pending=self.block_size, guesses=self.block_size, commits=self.block_size)

    def visible(self, query_position: Tensor, key_position: Tensor) -> Tensor:
        return key_position // self.block_size <= query_position // self.block_size

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`decided` (R, S): the prompt's tokens; later also decided tokens that are not output yet."""
        place = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
        return {"decided": rows.tokens.masked_fill(place >= rows.known[:, None], OPEN)}

    def base(self, state: State, rows: Rows) -> Tensor:
        return rows.known // self.block_size * self.block_size

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        """The block with masks at open positions, (R, B)."""
        mask_id = runners.target.checkpoint.mask_id
        assert mask_id is not None, "planning refuses a checkpoint without one"
        block = state["decided"].gather(1, self._places(rows))
        return block.masked_fill(block == OPEN, mask_id)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        places = self._places(rows)
        block = state["decided"].gather(1, places)
        open, own = block == OPEN, slice(self.block_size)  # the last column predicts the next block's first position
        decide = sampling.top_confidence(output.confidence[:, own], open, self.per_forward)
        decide |= open & output.sure("probability", rows.option(self, "tau"), never=1.0)[:, own]
        block = torch.where(decide, output.choice[:, own], block)
        state["decided"].scatter_(1, places, block)
        output_before = rows.known - rows.base
        fresh = (places - rows.base[:, None] + output_before[:, None]).clamp(max=self.block_size - 1)
        count, left = sampling.prefix_length(block != OPEN) - output_before, self.block_size - output_before
        return Commit(block.gather(1, fresh), count, kept=torch.zeros_like(output_before), offered=left - 1)

    def _places(self, rows: Rows) -> Tensor:
        """Return the positions of each row's block, (R, B)."""
        return rows.base[:, None] + torch.arange(self.block_size, device=rows.base.device)

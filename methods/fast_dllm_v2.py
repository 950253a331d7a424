"""Fast-dLLM v2: block diffusion in blocks of 32, each decided in sub-blocks of 8 from left to right.

Wu et al.: "Fast-dLLM v2: Efficient Block-Diffusion LLM", arXiv 2509.26328, section 3.3, and its code (NVlabs/Fast-dLLM,
folder v2). Released: Efficient-Large-Model/Fast_dLLM_v2_1.5B and _7B, which are Qwen2.5 with the mask token 151665.

Blocks are counted from position 0, the prompt included. A position attends to its whole block and all earlier blocks.
A position predicts the next token. A finished block is fed once more, without masks: its keys and values are then
exact, and its last position decides the first token of the next block. After that each forward decides, in the first
sub-block that has masks, the most confident position and those with a probability above the threshold.

`dual_cache` is the paper's sub-block cache, off in the owners' evaluation. The first forward of a sub-block feeds the
block; then, once the sub-block's first token is known, only the sub-block is fed. The keys and values of the block's
other positions are those of that first forward, so later masks do not see new tokens. This changes tokens. Here it
saves no time: a forward feeds as many positions as without it, and repeats those of the sub-block.

The owners' function for a batch feeds the whole block to all rows if one row needs it; here, as in their function for
one prompt, rows do not depend on each other. It samples with top-p 0.95, and its confidence is the probability of the
drawn token among those kept. Here the run's filters apply, as to every arm, and the confidence is the largest
probability at temperature 1, before the filters.

R = rows, B = positions of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding.method import Commit, ModelRunners, Rows, State, TargetOutput
from mtbench.decoding.registry import METHODS
from mtbench.decoding.unmasking import OPEN, Unmasking
from mtbench.errors import UserError
from mtbench.options import option


@METHODS.register("fast-dllm-v2")
@dataclass(frozen=True, kw_only=True)
class FastDllmV2(Unmasking):
    """A block whose first token is decided by the block before, and the others sub-block by sub-block."""

    block_size: int = option(32, "B: positions per block; the first block starts the prompt", low=1, trained=True)
    sub_block: int = option(8, "S: positions per sub-block; a forward decides in one only", low=1)
    tau: float = option(
        0.9, "also decide positions with probability >= tau; 1 = only the k", low=0.0, high=1.0, per_request=True
    )
    dual_cache: bool = option(False, "keep keys and values of the rest of the block while a sub-block is decided")

    title = "Fast-dLLM v2"
    roles = ("fast_dllm_v2",)
    choices = ("fast-dllm-v2:tau=0.9|0.8",)

    def __post_init__(self) -> None:
        if self.block_size % self.sub_block:
            sizes = f"sub_block={self.sub_block} does not divide block_size={self.block_size}"
            raise UserError(f"fast-dllm-v2: {sizes}; give a divisor of the block.")

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`filled` (R,): whether the cache has the block with its masks."""
        return {"filled": torch.zeros_like(rows.done), **super().start(rows, runners)}

    def due(self, rows: Rows, places: Tensor) -> Tensor:
        """The first position alone while the block before is fed, else the sub-block of the first undecided one."""
        begins = (rows.known == rows.base)[:, None]
        return torch.where(begins, places == rows.base[:, None], places // self.sub_block == self._current(rows))

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        """The block, or with the dual cache the sub-block, its last token repeated, (R, B)."""
        block, places = super().propose(state, rows, runners), self.block_places(rows)
        return block.gather(1, self.places(state, rows, places) - rows.base[:, None])

    def places(self, state: State, rows: Rows, places: Tensor) -> Tensor:
        if not self.dual_cache:
            return places
        first = self._current(rows) * self.sub_block
        known = (state["decided"].gather(1, first) != OPEN) & (rows.known > rows.base)[:, None]
        sub_block = torch.minimum(torch.maximum(places, first), first + self.sub_block - 1)
        return torch.where(known & state["filled"][:, None], sub_block, places)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        state["filled"].copy_(rows.known > rows.base)
        return super().accept(state, rows, output)

    def _current(self, rows: Rows) -> Tensor:
        """Return the number of the sub-block that has the first undecided position, (R, 1)."""
        return rows.known[:, None] // self.sub_block

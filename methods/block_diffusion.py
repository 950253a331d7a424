"""Block diffusion: unmask the current block position by position, the most confident first; then the next block.

Arriola et al.: "Block Diffusion: Interpolating Between Autoregressive and Diffusion Language Models", ICLR 2025,
arXiv 2503.09573 (BD3-LM), with the shift of autoregressive models: a position predicts the next token, so the last
token of a block predicts the first one of the next (as in the baseline of MARS, arXiv 2604.07023).
The order by confidence is LLaDA's low-confidence remasking, arXiv 2502.09992, section 2.4. The threshold, above which
several positions are decided at once, is from Fast-dLLM, arXiv 2505.22618, section 3.3.

All of it is `mtbench.decoding.unmasking`: a forward may decide every position of the block.
"""

from dataclasses import dataclass

from mtbench.decoding.registry import METHODS
from mtbench.decoding.unmasking import Unmasking
from mtbench.options import option


@METHODS.register("block-diffusion")
@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Unmasking):
    """A block of masks, decided in order of the model's confidence."""

    block_size: int = option(4, "B: positions per block; the first block starts the prompt", low=1, trained=True)

    title = "Block diffusion"
    roles = ("block_diffusion",)
    choices = ("block-diffusion:tau=0.9|0.8",)

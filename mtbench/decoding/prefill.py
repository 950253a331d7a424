"""Prefill: feed the prompts of new requests into every KV cache, in chunks.

R = rows, W = positions fed.
"""

from torch import Tensor

from mtbench.decoding.method import Method, ModelRunners, Rows
from mtbench.models.attention import AttentionMetadata, causal

PREFILL_POSITIONS = 2048  # positions fed at once over all rows; limits the memory of mask and scores
PREFILL_WIDTH = 64  # minimum positions of a row fed at once


def prefill(rows: Rows, runners: ModelRunners, method: Method, at: Tensor, arange: Tensor) -> None:
    """Feed the prompts of the rows `at`, right-aligned, in chunks.

    The target caches final tokens (`rows.cached`), other runners all tokens but the last. `arange`: 0 … S−1.
    """
    for runner in runners.values():
        if runner is runners.target:
            cached, block, visible = rows.cached[at], method.block, method.visible
        else:
            cached, block, visible = rows.known[at] - 1, 1, causal
        length = int(cached.max())
        slots = (cached[:, None] + arange[:length] - length).clamp(min=0)  # short rows repeat slot 0
        width = max(PREFILL_WIDTH, PREFILL_POSITIONS // len(at))
        width = -(-width // block) * block
        for begin in range(0, length, width):
            chunk = slots[:, begin : begin + width]
            some = None if len(at) == len(rows.done) else at
            metadata = AttentionMetadata(
                chunk, chunk, rows.base[at], min(begin + width, length), visible=visible, rows=some
            )
            runner.forward(rows.tokens[at].gather(1, chunk), metadata, judged=1)

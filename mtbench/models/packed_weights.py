"""Weights in oneDNN's blocked layout, which a CPU reads about as fast as its memory gives them.

`F.linear` of torch 2.13 reached half of that for one row in float32, and a quarter for five rows (two cores of an AMD
EPYC).
"""

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

FROM_BYTES, TO_BYTES = 64 << 20, 4 << 30  # of a decoder's matrices: caches hold fewer, and the copies need memory
ROWS = 16  # for which weights are laid out. One row reads them about as fast as a layout for one, five much faster.


def pack(decoder: Any) -> None:
    """Give the matrices of a fused decoder on a CPU the layout. They are copies: transformers' modules keep theirs.

    Small ones stay as they are, and all do where PyTorch has no oneDNN.
    """
    layers: list[Any] = list(decoder.layers)
    owned = [(layer, name) for layer in layers for name in ("qkv", "out", "gate_up", "down")] + [(decoder, "lm_head")]
    matrices = {(owner, name): getattr(owner, name) for owner, name in owned}
    first = matrices[decoder, "lm_head"]
    can = first.device.type == "cpu" and first.dtype in (torch.float32, torch.bfloat16)
    if not can or not FROM_BYTES <= sum(matrix.nbytes for matrix in matrices.values()) <= TO_BYTES:
        return
    with suppress(AttributeError, RuntimeError):  # no oneDNN
        packed = {key: packed_matrix(matrix) for key, matrix in matrices.items()}
        for (owner, name), matrix in packed.items():
            delattr(owner, name)  # a parameter, which cannot become a plain tensor
            setattr(owner, name, matrix)
        for layer in layers:
            layer.linear = linear


def packed_matrix(weight: Tensor) -> Tensor:
    """Return a copy of `weight` (O, I) in the layout. Raises AttributeError or RuntimeError without oneDNN."""
    made: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return made


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of `x` (…, I) and a packed weight (O, I), plus `bias` (O,): (…, O)."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, bias, "none", [], "")
    return product

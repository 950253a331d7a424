# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Move slots of the KV cache in every layer by one kernel, so that the accepted path of a draft tree is contiguous.

Each layer's keys and values are tensors of their own, so the kernel takes their addresses.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["slots"])
def _move(addresses, like, source, target, slots, DEPTH: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Copy one row's slots of one tensor, from the first to the last."""
    store = tl.load(addresses + tl.program_id(0)).to(tl.pointer_type(like.dtype.element_ty))
    row = tl.program_id(1).to(tl.int64)
    element = tl.arange(0, PADDED)
    inside = element < SIZE
    for depth in range(DEPTH):
        at = row * DEPTH + depth
        x = tl.load(store + (row * slots + tl.load(source + at)) * SIZE + element, mask=inside)
        tl.store(store + (row * slots + tl.load(target + at)) * SIZE + element, x, mask=inside)


def addresses(stores: Sequence[Tensor]) -> Tensor:
    """Return where the tensors begin, (n,) int64 on their device. It waits for the device."""
    return torch.tensor([store.data_ptr() for store in stores], device=stores[0].device)


def move(stores: Tensor, like: Tensor, source: Tensor, target: Tensor, slots: int) -> None:
    """Copy slots (R, D) to slots (R, D) of each row in all tensors.

    `stores`: their `addresses`. Each has the shape and type of `like`, (positions, K, d). In the order of D, no slot
    may be a target before it is a source.
    """
    rows, depth = source.shape
    size = like[0].numel()
    grid, padded = (len(stores), rows), triton.next_power_of_2(size)
    _move[grid](stores, like, source.contiguous(), target.contiguous(), slots, DEPTH=depth, SIZE=size, PADDED=padded)

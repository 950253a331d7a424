# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels of `mtbench.kernels` and their launchers. Imported only on machines that run them.

Attention, products and choice are in triton_attention.py, triton_products.py, triton_rotary.py and triton_sampling.py.
Here are the norm and the moves of the KV cache, whose tensors the kernel takes by their addresses.

Tile shapes are constants. There is no autotuning: it synchronises, and the same row could run in another tile shape in
another batch. Launchers allocate and launch but never synchronise, so a CUDA graph can record them after a first call
has compiled them. Kernels are not specialised on the number of rows or positions, and on slots in view only for
multiples of 16 (masks then load 16 at a time), so one compiled kernel serves all steps.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtbench.kernels.triton_attention import attend as attend
from mtbench.kernels.triton_attention import attends as attends
from mtbench.kernels.triton_products import add_product as add_product
from mtbench.kernels.triton_products import linear as linear
from mtbench.kernels.triton_products import norm_product as norm_product
from mtbench.kernels.triton_products import norm_swiglu as norm_swiglu
from mtbench.kernels.triton_rotary import embed as embed
from mtbench.kernels.triton_rotary import rotate as rotate
from mtbench.kernels.triton_sampling import choose_logsumexp as choose_logsumexp


@triton.jit
def _norm(x, weight, out, eps, size, SIZE: tl.constexpr):
    """Normalise one row; the order of its sum is fixed."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    wide = tl.load(x + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    narrow = wide.to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (narrow * scale).to(out.dtype.element_ty), mask=column < size)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm; see `kernels.norm`. One program per row."""
    size = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _norm[(x.numel() // size,)](x, weight, out, eps, size, SIZE=triton.next_power_of_2(size), num_warps=4)
    return out


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

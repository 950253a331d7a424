# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels of `mtbench.kernels` and their launchers. Imported only on machines that run them.

Attention and products are in triton_attention.py, triton_products.py and triton_rotary.py; here are argmax and norm.

Tile shapes are constants. There is no autotuning: it synchronises, and the same row could run in another tile shape in
another batch. Launchers allocate and launch but never synchronise, so a CUDA graph can record them after a first call
has compiled them. Kernels are not specialised on the number of rows or positions, and on slots in view only for
multiples of 16 (masks then load 16 at a time), so one compiled kernel serves all steps.
"""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtbench.kernels.triton_attention import attend, attends
from mtbench.kernels.triton_products import add_product, linear, norm_product, norm_swiglu
from mtbench.kernels.triton_rotary import embed, rotate

__all__ = [
    "add_product",
    "argmax_logsumexp",
    "attend",
    "attends",
    "embed",
    "linear",
    "norm",
    "norm_product",
    "norm_swiglu",
    "rotate",
]

SLICE = 4096  # logits per program: 38 slices of Qwen2.5's vocabulary; each thread loads 4 × 16 bytes of bfloat16


@triton.jit
def _argmax_slice(logits, peaks, places, masses, stride, vocabulary, SLICE: tl.constexpr):
    """Reduce one slice of one row: largest logit, its lowest id, sum of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)  # rows × vocabulary may exceed 2³¹
    index = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits + row * stride + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    anchor = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + at, peak)
    tl.store(places + at, tl.min(tl.where(x == peak, index, vocabulary), 0))
    tl.store(masses + at, tl.sum(tl.exp(x - anchor), 0))


@triton.jit
def _argmax_row(peaks, places, masses, choice, largest, logsumexp, slices, vocabulary, SLICES: tl.constexpr):
    """Reduce the slices of one row. Slices of −∞ only have mass 0; with NaN, the chosen id is still in range."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SLICES)
    at = row * slices + index
    peak = tl.load(peaks + at, mask=index < slices, other=float("-inf"))
    place = tl.load(places + at, mask=index < slices, other=vocabulary)
    mass = tl.load(masses + at, mask=index < slices, other=0.0)
    highest = tl.max(peak, 0)
    lowest = tl.min(tl.where(peak == highest, place, vocabulary), 0)
    anchor = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    own = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    mass = tl.sum(tl.where(peak == float("-inf"), 0.0, mass * tl.exp(own - anchor)), 0)
    tl.store(choice + row, tl.minimum(lowest, vocabulary - 1).to(tl.int64))
    tl.store(largest + row, highest)
    tl.store(logsumexp + row, anchor + tl.log(mass))


def argmax_logsumexp(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return argmax, maximum and logsumexp; see `kernels.argmax_logsumexp`. The first kernel reads the logits, once."""
    shape, vocabulary = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(-1, vocabulary)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    rows, slices = len(flat), triton.cdiv(vocabulary, SLICE)
    empty = partial(logits.new_empty, dtype=torch.float32)
    choice, largest, logsumexp = logits.new_empty(shape, dtype=torch.int64), empty(shape), empty(shape)
    if rows:
        peaks, masses = empty(rows, slices), empty(rows, slices)
        places = logits.new_empty(rows, slices, dtype=torch.int32)
        _argmax_slice[rows, slices](flat, peaks, places, masses, flat.stride(0), vocabulary, SLICE=SLICE, num_warps=4)
        power = triton.next_power_of_2(slices)
        _argmax_row[(rows,)](
            peaks, places, masses, choice, largest, logsumexp, slices, vocabulary, SLICES=power, num_warps=1
        )
    return choice, largest, logsumexp


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

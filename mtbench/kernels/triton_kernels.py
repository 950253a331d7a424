# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels of `mtbench.kernels` and their launchers. Imported only on machines that run them.

Attention, products and choice are in triton_attention.py, triton_products.py and triton_sampling.py. Here are the
moves of the KV cache, whose tensors the kernel takes by their addresses, and the kernels of one position at a time: the
norm, the embedding with the first norm's input, and the rotary embedding with cache writes. They compute in float32,
and do not depend on other positions: they are batch-invariant.

There is no autotuning: it synchronises, and the same row could be summed in another order in another batch. Launchers
allocate and launch but never synchronise, so a CUDA graph can record them after a first call has compiled them. Kernels
are not specialised on the number of rows or positions, and on slots in view only for multiples of 16 (masks then load
16 at a time), so one compiled kernel serves all steps.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as hopper

from mtbench.kernels import Norm, NormInput
from mtbench.kernels.triton_attention import attend as attend
from mtbench.kernels.triton_attention import attends as attends
from mtbench.kernels.triton_device import dependent_launch
from mtbench.kernels.triton_products import add_product as add_product
from mtbench.kernels.triton_products import linear as linear
from mtbench.kernels.triton_products import norm_product as norm_product
from mtbench.kernels.triton_products import norm_swiglu as norm_swiglu
from mtbench.kernels.triton_sampling import choose_logsumexp as choose_logsumexp

HEADS_EACH = 4  # heads of a program


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


@triton.jit
def _embed(ids, embedding, x, weighted, squares, weight, power, SIZE: tl.constexpr, PADDED: tl.constexpr):
    position = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    row = tl.load(embedding + tl.load(ids + position) * SIZE + column, mask=inside, other=0.0)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) / power
    wide = row.to(tl.float32)
    tl.store(x + position * SIZE + column, row, mask=inside)
    tl.store(weighted + position * SIZE + column, (wide * factor).to(x.dtype.element_ty), mask=inside)
    tl.store(squares + position, tl.sum(wide * wide, 0))


def embed(ids: Tensor, embedding: Tensor, norm: Norm) -> tuple[Tensor, NormInput]:
    """Return embeddings and the norm's input; see `kernels.embed`."""
    count, size = len(ids), embedding.shape[1]
    x, weighted = (embedding.new_empty(count, size) for _ in range(2))
    squares = embedding.new_empty(1, count, dtype=torch.float32)
    arguments = (ids, embedding, x, weighted, squares, norm.weight, norm.power)
    if count:
        _embed[(count,)](*arguments, SIZE=size, PADDED=triton.next_power_of_2(size), num_warps=4)
    return x, NormInput(weighted, squares)


@triton.jit
def _rotate(
    qkv,
    query,
    keys,
    values,
    positions,
    index,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # of half a head
    HEADS_EACH: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some heads of one position. `a` and `b` are the halves of a head, which rotate together."""
    if PDL:
        hopper.gdc_wait()
        hopper.gdc_launch_dependents()
    half: tl.constexpr = SIZE // 2
    place = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS_EACH + tl.arange(0, HEADS_EACH)[:, None]
    i = tl.arange(0, PADDED)[None, :]
    inside = (i < half) & (head < HEADS + 2 * KEY_HEADS)
    is_query = inside & (head < HEADS)
    is_key = inside & (head >= HEADS) & (head < HEADS + KEY_HEADS)
    is_value = inside & (head >= HEADS + KEY_HEADS)

    qkv += (place * (HEADS + 2 * KEY_HEADS) + head) * SIZE + i
    a = tl.load(qkv, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + half, mask=inside, other=0.0).to(tl.float32)
    at = tl.load(index + place) * KEY_HEADS * SIZE + i
    value = values + at + (head - HEADS - KEY_HEADS) * SIZE
    tl.store(value, a.to(query.dtype.element_ty), mask=is_value)
    tl.store(value + half, b.to(query.dtype.element_ty), mask=is_value)

    if NORM:
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        query_a, query_b = _halves(query_norm + i, i < half, half)
        key_a, key_b = _halves(key_norm + i, i < half, half)
        a *= factor * tl.where(is_query, query_a, key_a)
        b *= factor * tl.where(is_query, query_b, key_b)
    table = tl.load(positions + place) * SIZE + i
    cos_a, cos_b = _halves(cos + table, i < half, half)
    sin_a, sin_b = _halves(sin + table, i < half, half)
    rotated_a = (a * cos_a + b * sin_a).to(query.dtype.element_ty)  # the first half of `sin` is negated
    rotated_b = (b * cos_b + a * sin_b).to(query.dtype.element_ty)
    query += (place * HEADS + head) * SIZE + i
    tl.store(query, rotated_a, mask=is_query)
    tl.store(query + half, rotated_b, mask=is_query)
    key = keys + at + (head - HEADS) * SIZE
    tl.store(key, rotated_a, mask=is_key)
    tl.store(key + half, rotated_b, mask=is_key)


@triton.jit
def _halves(vector, inside, half: tl.constexpr):
    """Return both halves of a vector, in float32."""
    first = tl.load(vector, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(vector + half, mask=inside, other=0.0).to(tl.float32)


def rotate(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return rotated queries and write keys and values to the cache; see `kernels.rotate`."""
    (_, key_heads, size), count = keys.shape, len(qkv)
    heads = qkv.shape[1] // size - 2 * key_heads
    query = qkv.new_empty(count, heads, size)
    positions, index = positions.contiguous(), index.contiguous()  # the kernel takes no strides for them
    if count:
        _rotate[count, triton.cdiv(heads + 2 * key_heads, HEADS_EACH)](
            qkv,
            query,
            keys,
            values,
            positions,
            index,
            cos,
            sin,
            query_norm,
            key_norm,
            eps,
            HEADS=heads,
            KEY_HEADS=key_heads,
            SIZE=size,
            PADDED=triton.next_power_of_2(size // 2),
            HEADS_EACH=HEADS_EACH,
            NORM=query_norm is not None and key_norm is not None,
            PDL=dependent_launch(qkv.device),
            num_warps=1,
            launch_pdl=dependent_launch(qkv.device),
        )
    return query

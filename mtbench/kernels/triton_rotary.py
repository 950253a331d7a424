# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of one position at a time: the embedding with the first norm's input; rotary embedding with cache writes.

A program computes in float32 and rounds once. Its work does not depend on the other positions: batch-invariant.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as hopper

from mtbench.kernels.norms import Norm, NormInput
from mtbench.kernels.triton_products import dependent_launch

HEADS_EACH = 4  # heads of a program


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

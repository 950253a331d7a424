# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels of `mtbench.kernels` and their launchers. Imported only on machines that run them.

Attention and choice are in triton_attention.py and triton_sampling.py. Here are the kernels of one position at a time
(norm, SwiGLU, rotary embedding with cache writes), the moves of the KV cache, whose tensors the kernel takes by their
addresses, and the batch-invariant product. They compute in float32, and a position's result does not depend on others.

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

from mtbench.kernels import Norm, Pair
from mtbench.kernels.triton_attention import PRECISION
from mtbench.kernels.triton_attention import attend as attend
from mtbench.kernels.triton_attention import attends as attends
from mtbench.kernels.triton_sampling import choose_logsumexp as choose_logsumexp

HEADS_EACH = tl.constexpr(4)  # heads of a program of the rotary embedding
COLUMNS = tl.constexpr(1024)  # of a program of SwiGLU
# Of a program of the product; inputs of a step. 64 outputs are the least of the matrix unit (wgmma).
OUTPUTS_EACH, POSITIONS, STEP = tl.constexpr(64), tl.constexpr(32), tl.constexpr(64)


@triton.jit
def _norm(x, ids, added, weight, residual, normed, eps, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Normalise one row of x: that of an id, or after an addition, or as it is. Store what it normalises, too."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < SIZE
    source = row if ids is None else tl.load(ids + row)
    value = tl.load(x + source * SIZE + column, mask=inside, other=0.0)
    if added is not None:
        wide = value.to(tl.float32) + tl.load(added + row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        value = wide.to(x.dtype.element_ty)
    if residual is not None:
        tl.store(residual + row * SIZE + column, value, mask=inside)
    wide = value.to(tl.float32)
    narrow = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)).to(x.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + row * SIZE + column, (narrow * scale).to(x.dtype.element_ty), mask=inside)


def norm(x: Tensor, by: Norm) -> Tensor:
    """Return the RMS norm; see `kernels.norm`."""
    x = x.contiguous()
    normed = torch.empty_like(x)
    _launch_norm(x, by, None, normed)
    return normed


def embed(table: Tensor, ids: Tensor, by: Norm) -> tuple[Tensor, Tensor]:
    """Return embeddings and their norm; see `kernels.embed`."""
    x, normed = (table.new_empty(len(ids), table.shape[1]) for _ in range(2))
    _launch_norm(table, by, x, normed, ids=ids.contiguous())
    return x, normed


def add_norm(x: Tensor, added: Tensor, by: Norm) -> Tensor:
    """Add in place and return the norm; see `kernels.add_norm`."""
    normed = torch.empty_like(x)
    _launch_norm(x, by, x, normed, added=added.contiguous())
    return normed


def _launch_norm(
    x: Tensor, by: Norm, residual: Tensor | None, normed: Tensor, ids: Tensor | None = None, added: Tensor | None = None
) -> None:
    size = x.shape[-1]
    count = normed.numel() // size
    if count:
        arguments = (x, ids, added, by.weight, residual, normed, by.eps)
        _norm[(count,)](*arguments, SIZE=size, PADDED=triton.next_power_of_2(size), num_warps=8)


@triton.jit
def _swiglu(both, out, SIZE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < SIZE
    gate = tl.load(both + 2 * row * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + (2 * row + 1) * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def swiglu(both: Tensor) -> Tensor:
    """Return silu(gate)·up; see `kernels.swiglu`."""
    both, count, size = both.contiguous(), len(both), both.shape[1] // 2
    out = both.new_empty(count, size)
    if count:
        _swiglu[count, triton.cdiv(size, COLUMNS.value)](both, out, SIZE=size, num_warps=4)
    return out


@triton.jit(do_not_specialize=["count"])
def _linear(x, weight, bias, out, count, INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of outputs × positions, over all inputs. Each weight is the matrix unit's large side."""
    position = tl.program_id(0) * POSITIONS + tl.arange(0, POSITIONS)
    output = tl.program_id(1) * OUTPUTS_EACH + tl.arange(0, OUTPUTS_EACH)
    column = tl.arange(0, STEP)
    live, exists = position < count, output < OUTPUTS
    x += position.to(tl.int64)[:, None] * INPUTS + column
    weight += output.to(tl.int64)[:, None] * INPUTS + column
    total = tl.zeros([OUTPUTS_EACH, POSITIONS], tl.float32)
    for start in range(0, INPUTS, STEP):
        inside = column < INPUTS - start
        a = tl.load(weight + start, mask=exists[:, None] & inside, other=0.0)
        b = tl.load(x + start, mask=live[:, None] & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    if bias is not None:
        total += tl.load(bias + output, mask=exists, other=0.0).to(tl.float32)[:, None]
    at = position.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=live[None, :] & exists[:, None])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product; see `kernels.linear`. The tile is fixed: a sum has the same order in every batch."""
    x, weight = x.contiguous(), weight.contiguous()
    (outputs, inputs), count = weight.shape, x.numel() // x.shape[-1]
    out = x.new_empty(*x.shape[:-1], outputs)
    grid = triton.cdiv(count, POSITIONS.value), triton.cdiv(outputs, OUTPUTS_EACH.value)
    options = {"PRECISION": PRECISION[x.dtype], "num_warps": 4, "num_stages": 2 if x.dtype == torch.float32 else 3}
    if count:
        _linear[grid](x, weight, bias, out, count, INPUTS=inputs, OUTPUTS=outputs, **options)
    return out


@triton.jit(do_not_specialize=["slots"])
def _move(addresses, like, source, target, slots, DEPTH: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr):
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
def _rotate(
    qkv,
    query,
    stores,
    index,
    angles,
    norms,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # of half a head
):
    """Some heads of one position. `a` and `b` are the halves of a head, which rotate together."""
    keys, values = stores
    cos, sin = angles
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

    if norms is not None:
        query_norm, key_norm, eps = norms
        factor = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / SIZE + eps)[:, None]
        query_a, query_b = _halves(query_norm + i, i < half, half)
        key_a, key_b = _halves(key_norm + i, i < half, half)
        a *= factor * tl.where(is_query, query_a, key_a)
        b *= factor * tl.where(is_query, query_b, key_b)
    table = place * SIZE + i
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


def rotate(qkv: Tensor, angles: Pair, stores: Pair, index: Tensor, norms: tuple[Norm, Norm] | None = None) -> Tensor:
    """Return rotated queries and write keys and values to the cache; see `kernels.rotate`."""
    qkv, (key_heads, size), count = qkv.contiguous(), stores[0].shape[1:], len(qkv)
    heads = qkv.shape[1] // size - 2 * key_heads
    query = qkv.new_empty(count, heads, size)
    weights = None if norms is None else (norms[0].weight, norms[1].weight, norms[0].eps)
    arguments = (qkv, query, stores, index.contiguous(), tuple(t.contiguous() for t in angles), weights)
    sizes = {"HEADS": heads, "KEY_HEADS": key_heads, "SIZE": size, "PADDED": triton.next_power_of_2(size // 2)}
    if count:
        _rotate[count, triton.cdiv(heads + 2 * key_heads, HEADS_EACH.value)](*arguments, **sizes, num_warps=1)
    return query

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The attention kernels of `mtbench.kernels` and their launcher.

Attention is flash decoding (https://pytorch.org/blog/flash-decoding): keys are divided into blocks of fixed length,
each block has its own softmax, and a row's blocks are combined in order, from the first to the last. As in the
products, keys and values are the matrix unit's large side, and the few queries that share them its small side.

Names: peak = maximum of the scores, mass = sum of exponentials relative to it, total = sum of values weighted by them.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as hopper

from mtbench.kernels.triton_device import dependent_launch, multiprocessors, shared_memory
from mtbench.kernels.triton_products import PRECISION, sum_pairwise

QUERIES = 32  # of a tile, at most; fewer are padded to 16. Tiles of 64 would spill registers
QUERIES_EXACT = 16  # in float32
BLOCK_BYTES = 16384  # keys of a block; two programs fit a multiprocessor, each with three blocks in use or loading
STAGES = 3  # blocks in use or loading, at most
PROGRAMS = 2  # per multiprocessor: with fewer, keys are split; with more, a program walks over a row's keys
AHEAD = 16  # blocks that the second kernel loads at a time
LOG2E = math.log2(math.e)


@triton.jit
def _fold(peak, mass, total, block_peak, block_mass, block_total):
    """Add one block to a running softmax; exponentials are powers of two.

    `tl.fma` fixes the arithmetic: otherwise the compiler could contract operations differently at each inlining.
    """
    highest = tl.maximum(peak, block_peak)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)  # all masked so far: −∞ − −∞ would be NaN
    old = tl.exp2(peak - anchor)
    new = tl.exp2(block_peak - anchor)
    mass = tl.fma(block_mass, new, mass * old)
    total = tl.fma(block_total, tl.broadcast_to(new[None, :], block_total.shape), total * old[None, :])
    return highest, mass, total


@triton.jit
def _block(q, k, v, seen, inner, outer, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Return one block's softmax: peaks and masses by query, totals of size × queries."""
    score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * inner  # keys × queries
    if SOFTCAP:  # softcap · tanh(score / softcap), tanh written with an exponential
        score = (1.0 - 2.0 / (1.0 + tl.exp2(score))) * outer
    score = tl.where(seen, score, float("-inf"))
    peak = tl.max(score, 0)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - anchor[None, :])
    return peak, sum_pairwise(weight, k.shape[0]), tl.dot(tl.trans(v), weight.to(v.dtype), input_precision=PRECISION)


@triton.jit(do_not_specialize=["width", "tiles", "each"])
def _attend(  # not split further: a function for its loads changes their order in the compiled kernel
    query,
    key,
    value,
    mask,
    length,
    out,
    totals,
    masses,
    peaks,
    inner,
    outer,
    width,
    view,
    tiles,
    each,
    q_row,
    q_head,
    q_width,
    q_size,
    m_row,
    m_width,
    k_row,
    v_row,
    k_head: tl.constexpr,  # constants: loads then have immediate offsets and need fewer registers for pointers
    k_slot: tl.constexpr,
    k_size: tl.constexpr,
    v_head: tl.constexpr,
    v_slot: tl.constexpr,
    v_size: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,  # SIZE, a power of two
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of one tile of queries and one key head, over `each` blocks of keys (SPLIT) or over all of them.

    `folded`: the queries of the GROUP query heads that share the key head, one after another.
    """
    if PDL:
        hopper.gdc_wait()
        hopper.gdc_launch_dependents()
    tile = tl.program_id(0) % tiles  # adjacent programs read the same keys; the second hits the L2 cache
    row = (tl.program_id(0) // tiles // KEY_HEADS).to(tl.int64)
    key_head = tl.program_id(0) // tiles % KEY_HEADS
    visible = tl.minimum(tl.load(length + row), view).to(tl.int32)

    folded = tile * QUERIES + tl.arange(0, QUERIES)
    live = folded < GROUP * width
    head = key_head * GROUP + folded // width
    place = folded % width
    heads = KEY_HEADS * GROUP
    # The output index is computed here, so that fewer values stay in registers during the loop.
    at = head * width + place if SPLIT else place * heads + head
    size = tl.arange(0, PADDED)
    fits = size < SIZE if PADDED > SIZE else tl.full([PADDED], True, tl.int1)
    slot = tl.arange(0, BLOCK)
    query += row * q_row + head.to(tl.int64)[:, None] * q_head + place.to(tl.int64)[:, None] * q_width + size * q_size
    mask += row * m_row + place.to(tl.int64)[None, :] * m_width + slot[:, None]
    key += row * k_row + key_head * k_head + slot[:, None] * k_slot + size * k_size
    value += row * v_row + key_head * v_head + slot[:, None] * v_slot + size * v_size

    blocks, parts = tl.cdiv(visible, BLOCK), tl.cdiv(view, BLOCK)
    first = tl.program_id(1) * each if SPLIT else 0
    last = tl.minimum(first + each, blocks) if SPLIT else blocks
    q = tl.load(query, mask=live[:, None] & fits, other=0.0)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([PADDED, QUERIES], tl.float32)
    for block in range(first, last):
        start = tl.cast(block, tl.int64) * BLOCK  # a cache may have more than 2³¹ elements
        inside = start + slot < visible
        k = tl.load(key + start * k_slot, mask=inside[:, None] & fits, other=0.0)
        v = tl.load(value + start * v_slot, mask=inside[:, None] & fits, other=0.0)
        seen = tl.load(mask + start, mask=live[None, :] & (start + slot < view)[:, None], other=0) != 0
        new_peak, new_mass, new_total = _block(q, k, v, seen & inside[:, None], inner, outer, SOFTCAP, PRECISION)
        if SPLIT:
            part = (row * parts + block) * heads * width + at
            tl.store(peaks + part, new_peak, mask=live)
            tl.store(masses + part, new_mass, mask=live)
            tl.store(totals + part[None, :] * SIZE + size[:, None], new_total, mask=live & fits[:, None])
        else:
            peak, mass, total = _fold(peak, mass, total, new_peak, new_mass, new_total)
    if not SPLIT:
        at += row * width * heads
        result = total / tl.where(mass == 0.0, 1.0, mass)[None, :]
        tl.store(out + at[None, :] * SIZE + size[:, None], result.to(out.dtype.element_ty), mask=live & fits[:, None])


@triton.jit(do_not_specialize=["width", "view"])
def _combine(
    length,
    out,
    totals,
    masses,
    peaks,
    width,
    view,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combine the blocks of one (row, head, query), loading AHEAD of them at a time. Reads written blocks only."""
    if PDL:
        hopper.gdc_wait()
        hopper.gdc_launch_dependents()
    row = (tl.program_id(0) // (HEADS * width)).to(tl.int64)
    query = tl.program_id(0) % (HEADS * width)  # ordered by head
    blocks = tl.cdiv(tl.minimum(tl.load(length + row), view).to(tl.int32), BLOCK)
    parts = tl.cdiv(view, BLOCK)
    size = tl.arange(0, PADDED)[:, None]
    fits = size < SIZE
    one = tl.arange(0, 1)
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([PADDED, 1], tl.float32)
    for start in range(0, blocks, AHEAD):
        for ahead in tl.static_range(AHEAD):
            block = start + ahead + one
            at = (row * parts + block) * HEADS * width + query
            exists = block < blocks  # a missing block has mass 0: adding it changes no bit
            block_peak = tl.load(peaks + at, mask=exists, other=float("-inf"))
            block_mass = tl.load(masses + at, mask=exists, other=0.0)
            block_total = tl.load(totals + at[None, :] * SIZE + size, mask=exists & fits, other=0.0)
            peak, mass, total = _fold(peak, mass, total, block_peak, block_mass, block_total)
    result = total / tl.where(mass == 0.0, 1.0, mass)[None, :]
    at = (row * width + query % width) * HEADS + query // width + one
    tl.store(out + at[None, :] * SIZE + size, result.to(out.dtype.element_ty), mask=fits)


def attends(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the attention kernels support these tensors."""
    size = query.shape[-1]
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in PRECISION
        and key.shape == value.shape
        and 16 <= size <= 256
        and size % 2 == 0
        and _stages(query, QUERIES) > 0
    )


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    length: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    split: bool | None = None,
) -> Tensor:
    """Return attention; see `kernels.attend`.

    `split`: True gives each program some blocks of keys, and a second kernel combines the blocks; False lets each
    program walk over all blocks; None splits if there would be too few programs for the GPU. The walk writes no partial
    sums to memory. Both give the same bits: same blocks, order and arithmetic.

    The last program of a split to arrive could combine instead, but it would read all blocks of a tile alone, one after
    another; the second kernel reads them with a program for each query.
    """
    rows, heads, width, size = query.shape
    key_heads, view = key.shape[1], key.shape[2]
    exact = query.dtype == torch.float32
    padded = triton.next_power_of_2(size)
    folded = heads // key_heads * width
    queries = max(16, min(triton.next_power_of_2(folded), QUERIES_EXACT if exact else QUERIES))
    block = _block_length(padded, exact)
    tiles = triton.cdiv(folded, queries)
    programs, blocks = rows * key_heads * tiles, triton.cdiv(view, block)
    wanted = PROGRAMS * multiprocessors(query.device)
    if split is None:
        split = programs < wanted and blocks > 1
    each = max(1, programs * blocks // wanted)  # blocks of a program
    out = query.new_empty(rows, width, heads, size)
    partials = _new_partials(query, blocks) if split else (out, out, out)  # unused without a split
    length = length.contiguous()  # the kernel takes no stride for it
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    k_strides, v_strides = key.stride(), value.stride()
    strides = (*query.stride(), *mask.stride()[:2], k_strides[0], v_strides[0], *k_strides[1:], *v_strides[1:])
    dependent = dependent_launch(query.device)
    common = {"SIZE": size, "PADDED": padded, "BLOCK": block, "PDL": dependent, "launch_pdl": dependent}
    _attend[programs, triton.cdiv(blocks, each) if split else 1](
        query,
        key,
        value,
        mask.view(torch.uint8),
        length,
        out,
        *partials,
        *_score_factors(scale, softcap),
        width,
        view,
        tiles,
        each,
        *strides,
        **common,
        KEY_HEADS=key_heads,
        GROUP=heads // key_heads,
        QUERIES=queries,
        SPLIT=split,
        SOFTCAP=softcap is not None,
        PRECISION=PRECISION[query.dtype],
        num_warps=8 if padded == 256 and not exact else 4,
        num_stages=_stages(query, queries),
        enable_fp_fusion=False,  # the compiler would contract operations differently in each tile
    )
    if split:
        grid = (rows * heads * width,)
        _combine[grid](length, out, *partials, width, view, **common, HEADS=heads, AHEAD=AHEAD, num_warps=1)
    return out


def _stages(query: Tensor, queries: int) -> int:
    """Return how many blocks a tile of so many queries has in use or loading; 0 if not even one fits shared memory.

    A bound on what Triton allocates, which tests compare it with. The number changes no bit of a result.
    """
    if query.dtype == torch.float32:
        return 1
    (limit, from_shared), padded = shared_memory(query.device), triton.next_power_of_2(query.shape[-1])
    block = _block_length(padded, exact=False)
    keys, tile = (4, 6) if from_shared else (2, 2)  # bytes of an element: of keys and values or one of them; of queries
    return min(STAGES, int((limit - tile * queries * padded - 2 * block * queries) // (keys * block * padded)))


def _block_length(size: int, exact: bool) -> int:
    """Return the keys of a block. `exact`: float32, whose operands are in registers."""
    return max(16, min(128, BLOCK_BYTES // size // 8)) if exact else max(64, min(128, BLOCK_BYTES // size // 2))


def _new_partials(query: Tensor, blocks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for each block's totals (R, blocks, H, W, d), masses and peaks (R, blocks, H, W)."""
    rows, heads, width, size = query.shape
    shape = (rows, blocks, heads, width)
    empty = partial(query.new_empty, dtype=torch.float32)
    return empty(*shape, size), empty(shape), empty(shape)


def _score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factors of a score before and after the tanh of `softcap`, for exponentials in powers of two."""
    if softcap is None:
        return scale * LOG2E, 1.0
    return 2 * LOG2E * scale / softcap, softcap * LOG2E

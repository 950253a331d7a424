# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The attention kernels of `mtbench.kernels` and their launcher.

Attention is flash decoding (https://pytorch.org/blog/flash-decoding). Keys are divided into blocks of fixed length, and
each block has its own softmax. SPAN consecutive blocks are a span: its blocks are combined in order, and then a row's
spans are, from the first to the last. Every program computes with this tree, so a result has the same bits in every
division of the work. Keys and values are the matrix unit's large side, and the few queries that share them its small
side.

A program either walks over a row's keys, or takes some of them and stores a part of each span in memory, for a second
kernel. A part has (d + 2) · 4 bytes for each query and head. With few programs a part is a block, so that four times as
many programs share the keys; the second kernel then combines blocks to spans. With many, parts of spans take a quarter
of the memory traffic: for 16 × 8 positions and 4,096 slots of Qwen2.5-7B 30 MB in a layer, not 119.

Names: peak = maximum of the scores, mass = sum of exponentials relative to it, total = sum of values weighted by them.
"""

import math
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 32  # of a tile, at most; fewer are padded to 16. Tiles of 64 would spill registers
QUERIES_FEW = 16  # in float32, and for heads above 128 outside Hopper, where 32 would spill
BLOCK_BYTES = 16384  # keys of a block; two programs fit a multiprocessor, each with three blocks in use or loading
SPAN = 4  # blocks of a span
STAGES = 3  # blocks in use or loading, at most
PROGRAMS = 2  # per multiprocessor: with fewer, keys are split; with more, a program walks over a row's keys
AHEAD = 16  # blocks that the second kernel loads at a time; half as many spans
LOG2E = math.log2(math.e)
PRECISION = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "tf32"}  # float16 and bfloat16 ignore it


class Gpu(NamedTuple):
    """The properties of a GPU that the launcher needs."""

    multiprocessors: int
    shared_bytes: int  # that a program may have
    major: int  # compute capability: 9 is Hopper, where four warps drive the matrix unit together (wgmma)

    @property
    def reads_shared(self) -> bool:
        """Whether the matrix unit reads its large side from shared memory (sm_90, sm_100)."""
        return self.major in (9, 10)


@cache
def gpu(device: torch.device) -> Gpu:
    """Return the properties of a GPU; those of an H100 or H200 where there is none."""
    if device.type != "cuda":
        return Gpu(132, 232_448, 9)
    found: Any = torch.cuda.get_device_properties(device)
    return Gpu(found.multi_processor_count, found.shared_memory_per_block_optin, found.major)


@triton.jit
def sum_pairwise(x, SIZE: tl.constexpr):
    """Sum over the first dimension (a power of two) in pairs. The order of `tl.sum` depends on the layout."""
    for i in tl.static_range(10):  # unrolled, so that the shape may change
        if SIZE >> i > 1:
            x = tl.sum(tl.reshape(x, [2, SIZE >> (i + 1), x.shape[1]]), 0)
    return tl.reshape(x, [x.shape[1]])


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


@triton.jit
def _store_columns(out, at, total, live, size, fits, SIZE: tl.constexpr):
    """Store a total's columns at `at`, 16 at a time: a store passes through shared memory."""
    if total.shape[1] > 16:
        half: tl.constexpr = total.shape[1] // 2
        left, right = tl.split(tl.permute(tl.reshape(total, [total.shape[0], 2, half]), (0, 2, 1)))
        left_at, right_at = tl.split(tl.permute(tl.reshape(at, [2, half]), (1, 0)))
        left_live, right_live = tl.split(tl.permute(tl.reshape(live, [2, half]), (1, 0)))
        _store_columns(out, left_at, left, left_live, size, fits, SIZE)
        _store_columns(out, right_at, right, right_live, size, fits, SIZE)
    else:
        tl.store(out + at[None, :] * SIZE + size[:, None], total, mask=live[None, :] & fits[:, None])


@triton.jit(do_not_specialize=["width", "tiles", "each"])
def _attend(  # not split further: a function for its loads changes their order in the compiled kernel
    query,
    key,
    value,
    mask,
    length,
    out,
    partials,  # totals, masses and peaks of parts
    factors,  # of a score, before and after softcap's tanh
    width,
    view,
    tiles,
    each,
    strides,  # of query; of mask; of rows of keys and values
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
    PART: tl.constexpr,  # blocks of a part: SPAN, or 1 if the second kernel combines blocks to spans
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attention of one tile of queries and one key head, over `each` blocks of keys (SPLIT) or over all of them.

    `folded`: the queries of the GROUP query heads that share the key head, one after another. A split stores parts; a
    walk combines them with those before (`row_peak`, `row_mass`, `row_total`).
    """
    totals, masses, peaks = partials
    inner, outer = factors
    q_row, q_head, q_width, q_size, m_row, m_width, k_row, v_row = strides
    tile = tl.program_id(0) % tiles  # adjacent programs read the same keys; the second hits the L2 cache
    row = (tl.program_id(0) // tiles // KEY_HEADS).to(tl.int64)
    key_head = tl.program_id(0) // tiles % KEY_HEADS
    visible = tl.minimum(tl.load(length + row), view).to(tl.int32)

    folded = tile * QUERIES + tl.arange(0, QUERIES)
    live = folded < GROUP * width
    head = key_head * GROUP + folded // width
    place = folded % width
    heads = KEY_HEADS * GROUP
    # The index among rows and parts is computed here, so that fewer values stay in registers during the loop.
    at = key_head * GROUP * width + folded if SPLIT else place * heads + head
    size = tl.arange(0, PADDED)
    fits = size < SIZE if PADDED > SIZE else tl.full([PADDED], True, tl.int1)
    slot = tl.arange(0, BLOCK)
    query += row * q_row + head.to(tl.int64)[:, None] * q_head + place.to(tl.int64)[:, None] * q_width + size * q_size
    mask += row * m_row + place.to(tl.int64)[None, :] * m_width + slot[:, None]
    key += row * k_row + key_head * k_head + slot[:, None] * k_slot + size * k_size
    value += row * v_row + key_head * v_head + slot[:, None] * v_slot + size * v_size

    blocks, parts = tl.cdiv(visible, BLOCK), tl.cdiv(view, BLOCK * PART)
    first = tl.program_id(1) * each if SPLIT else 0
    last = tl.minimum(first + each, blocks) if SPLIT else blocks
    q = tl.load(query, mask=live[:, None] & fits, other=0.0)
    peak = tl.full([QUERIES], float("-inf"), tl.float32)
    mass = tl.zeros([QUERIES], tl.float32)
    total = tl.zeros([PADDED, QUERIES], tl.float32)
    row_peak, row_mass, row_total = peak, mass, total
    for block in tl.range(first, last, disable_licm=True):  # addresses computed before the loop would fill registers
        start = tl.cast(block, tl.int64) * BLOCK  # a cache may have more than 2³¹ elements
        inside = start + slot < visible
        k = tl.load(key + start * k_slot, mask=inside[:, None] & fits, other=0.0)
        v = tl.load(value + start * v_slot, mask=inside[:, None] & fits, other=0.0)
        seen = tl.load(mask + start, mask=live[None, :] & (start + slot < view)[:, None], other=0) != 0
        new_peak, new_mass, new_total = _block(q, k, v, seen & inside[:, None], inner, outer, SOFTCAP, PRECISION)
        if PART == 1:
            peak, mass, total = new_peak, new_mass, new_total
        else:
            peak = tl.where(block % PART == 0, float("-inf"), peak)  # a part begins: this discards the one before
            peak, mass, total = _fold(peak, mass, total, new_peak, new_mass, new_total)
        if (block + 1) % PART == 0 or block + 1 == last:
            if SPLIT:
                part = (row * parts + block // PART) * heads * width + at
                tl.store(peaks + part, peak, mask=live)
                tl.store(masses + part, mass, mask=live)
                _store_columns(totals, part, total, live, size, fits, SIZE)
            else:
                row_peak, row_mass, row_total = _fold(row_peak, row_mass, row_total, peak, mass, total)
    if not SPLIT:
        at += row * width * heads
        result = row_total / tl.where(row_mass == 0.0, 1.0, row_mass)[None, :]
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
    PART: tl.constexpr,
    SPAN: tl.constexpr,
    AHEAD: tl.constexpr,  # a multiple of a span's parts
):
    """Combine the parts of one (row, head, query), loading AHEAD of them at a time. Reads written parts only."""
    row = (tl.program_id(0) // (HEADS * width)).to(tl.int64)
    query = tl.program_id(0) % (HEADS * width)  # ordered by head
    written = tl.cdiv(tl.minimum(tl.load(length + row), view).to(tl.int32), BLOCK * PART)
    parts = tl.cdiv(view, BLOCK * PART)
    size = tl.arange(0, PADDED)[:, None]
    fits = size < SIZE
    one = tl.arange(0, 1)
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([PADDED, 1], tl.float32)
    span_peak, span_mass, span_total = peak, mass, total
    for start in range(0, written, AHEAD):
        for ahead in tl.static_range(AHEAD):
            part = start + ahead + one
            at = (row * parts + part) * HEADS * width + query
            exists = part < written  # a missing part has mass 0: adding it changes no bit
            new_peak = tl.load(peaks + at, mask=exists, other=float("-inf"))
            new_mass = tl.load(masses + at, mask=exists, other=0.0)
            new_total = tl.load(totals + at[None, :] * SIZE + size, mask=exists & fits, other=0.0)
            if PART == SPAN:
                peak, mass, total = _fold(peak, mass, total, new_peak, new_mass, new_total)
            else:  # as a program that walks, or stores spans, adds blocks
                if ahead * PART % SPAN == 0:
                    span_peak = tl.full([1], float("-inf"), tl.float32)
                span_peak, span_mass, span_total = _fold(
                    span_peak, span_mass, span_total, new_peak, new_mass, new_total
                )
                if (ahead + 1) * PART % SPAN == 0:
                    peak, mass, total = _fold(peak, mass, total, span_peak, span_mass, span_total)
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
        and _stages(query, _tile(query)[0]) > 0
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

    `split`: True gives each program some blocks of keys, and a second kernel combines the parts; False lets each
    program walk over all blocks; None splits if there would be too few programs for the GPU. The walk writes no partial
    sums to memory. Both give the same bits: same blocks, order and arithmetic.

    The last program of a split to arrive could combine instead, but it would read all parts of a tile alone, one after
    another; the second kernel reads them with a program for each query.
    """
    rows, heads, width, size = query.shape
    key_heads, view = key.shape[1], key.shape[2]
    exact = query.dtype == torch.float32
    padded = triton.next_power_of_2(size)
    folded = heads // key_heads * width
    most, warps = _tile(query)
    queries = max(16, min(triton.next_power_of_2(folded), most))
    block = _block_length(padded, exact)
    tiles = triton.cdiv(folded, queries)
    programs, blocks = rows * key_heads * tiles, triton.cdiv(view, block)
    part, each = _division(programs, blocks, gpu(query.device).multiprocessors)
    split = each < blocks if split is None else split
    part = part if split else SPAN
    out = query.new_empty(rows, width, heads, size)
    partials = _new_partials(query, triton.cdiv(blocks, part)) if split else (out, out, out)  # unused without a split
    length = length.contiguous()  # the kernel takes no stride for it
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    k_strides, v_strides = key.stride(), value.stride()
    strides = (*query.stride(), *mask.stride()[:2], k_strides[0], v_strides[0])
    common = {"SIZE": size, "PADDED": padded, "BLOCK": block, "PART": part}
    _attend[programs, triton.cdiv(blocks, each) if split else 1](
        query,
        key,
        value,
        mask.view(torch.uint8),
        length,
        out,
        partials,
        _score_factors(scale, softcap),
        width,
        view,
        tiles,
        each,
        strides,
        *k_strides[1:],
        *v_strides[1:],
        **common,
        KEY_HEADS=key_heads,
        GROUP=heads // key_heads,
        QUERIES=queries,
        SPLIT=split,
        SOFTCAP=softcap is not None,
        PRECISION=PRECISION[query.dtype],
        num_warps=warps,
        num_stages=_stages(query, queries),
        enable_fp_fusion=False,  # the compiler would contract operations differently in each tile
    )
    if split:
        grid = (rows * heads * width,)
        ahead = AHEAD if part == 1 else AHEAD // 2
        _combine[grid](length, out, *partials, width, view, **common, HEADS=heads, SPAN=SPAN, AHEAD=ahead, num_warps=1)
    return out


def _division(programs: int, blocks: int, processors: int) -> tuple[int, int]:
    """Return the blocks of a part in memory and those of a program.

    `programs`: as many as there would be without a split. A part is a span if that leaves a program for each
    multiprocessor: it has up to 96 KB on its way, and bandwidth × latency of an H200 is about 30 KB for each. Programs
    are as many as fit the GPU at once: one that starts later would wait for its first block with nothing else to do.
    """
    part = SPAN if programs * triton.cdiv(blocks, SPAN) >= processors else 1
    return part, part * triton.cdiv(programs * triton.cdiv(blocks, part), PROGRAMS * processors)


def _tile(query: Tensor) -> tuple[int, int]:
    """Return the queries of a tile, at most, and the warps of a program: tests compile them for spilled registers.

    Neither changes a bit: a query's sums are in the same order in each tile. On Hopper two programs of four warps fit a
    multiprocessor. Elsewhere four warps would spill: but for sm_100, the unit's large side passes through registers.
    """
    if query.dtype == torch.float32:
        return QUERIES_FEW, 4
    large = query.shape[-1] > 128
    if gpu(query.device).major == 9:
        return QUERIES, 8 if large else 4
    return QUERIES_FEW if large else QUERIES, 8


def _stages(query: Tensor, queries: int) -> int:
    """Return how many blocks a tile of so many queries has in use or loading; 0 if not even one fits shared memory.

    A bound on what Triton allocates, which tests compare it with. The number changes no bit of a result.
    """
    if query.dtype == torch.float32:
        return 1
    device, padded = gpu(query.device), triton.next_power_of_2(query.shape[-1])
    block = _block_length(padded, exact=False)
    keys, tile = (4, 6) if device.reads_shared else (2, 2)  # bytes an element takes: of keys and values, of queries
    left = device.shared_bytes - (tile * padded + 2 * block) * queries
    return int(min(STAGES, left // (keys * block * padded)))


def _block_length(size: int, exact: bool) -> int:
    """Return the keys of a block. `exact`: float32, whose operands are in registers."""
    return max(16, min(128, BLOCK_BYTES // size // 8)) if exact else max(64, min(128, BLOCK_BYTES // size // 2))


def _new_partials(query: Tensor, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for each part's totals (R, parts, H, W, d), masses and peaks (R, parts, H, W)."""
    rows, heads, width, size = query.shape
    shape = (rows, parts, heads, width)
    empty = partial(query.new_empty, dtype=torch.float32)
    return empty(*shape, size), empty(shape), empty(shape)


def _score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factors of a score before and after the tanh of `softcap`, for exponentials in powers of two."""
    if softcap is None:
        return scale * LOG2E, 1.0
    return 2 * LOG2E * scale / softcap, softcap * LOG2E

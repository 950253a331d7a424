# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels behind `mtbench.models.kernels` on a GPU, in Triton, and what launches them. Imported only where they
run.

Tile shapes are constants: no autotuning, which synchronises and lets the same row take another path in another
batch. Launchers allocate, launch and never wait, so a CUDA graph can record them (after a first call has compiled).
Rows and positions are not specialised on, nor slots in view but for being a multiple of 16 (masks then load 16 at a
time), so a step of any shape runs the same compiled kernel.

Attention is flash decoding (https://pytorch.org/blog/flash-decoding): the keys are cut into blocks of fixed length,
each block is softmaxed by itself, and a row's blocks are folded together from the first to its last.
"""

import math
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 64  # rows of a query tile, and of a linear's: the fewest that Hopper's matrix unit (wgmma) takes
BLOCK_BYTES = 16384  # keys of a block: two programs per multiprocessor, each with a block at work and one on its way
ENOUGH = 64  # programs that walk their blocks stream the cache nearly as fast as one program per block would
SLICE = 4096  # of a vocabulary: 38 slices of Qwen2.5's, each thread loads 4 × 16 bytes of bfloat16
OUTPUTS = 64  # of a linear, for one program
INPUTS = 64  # of a linear, per step
STREAMS = 256  # programs, two per multiprocessor of an H200 (132), that stream weights at full speed
SHORTEST = 16  # steps of a part of a split linear: below some 1,000 inputs a second kernel costs more than it gains
CHUNK = 1024  # rows of a split linear whose parts stand in memory at once
LOG2E = math.log2(math.e)

PRECISION = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "tf32"}  # float16, bfloat16 ignore it


@triton.jit
def _fold(peak, mass, total, block_peak, block_mass, block_total):
    """Softmax over what was seen so far and one more block; peaks in powers of two.

    `tl.fma` pins the arithmetic: the compiler may not choose another contraction where this is inlined elsewhere.
    """
    highest = tl.maximum(peak, block_peak)
    anchor = tl.where(highest == float("-inf"), 0.0, highest)  # nothing seen yet: −∞ − −∞ would be NaN
    old = tl.exp2(peak - anchor)
    new = tl.exp2(block_peak - anchor)
    mass = tl.fma(block_mass, new, mass * old)
    total = tl.fma(block_total, tl.broadcast_to(new[:, None], block_total.shape), total * old[:, None])
    return highest, mass, total


@triton.jit
def _block(q, k, v, seen, inner, outer, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """The softmax over one block: its peaks, its masses, its values' sums."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * inner
    if SOFTCAP:  # softcap · tanh(score / softcap), the tanh by its exponential
        score = (1.0 - 2.0 / (1.0 + tl.exp2(score))) * outer
    score = tl.where(seen, score, float("-inf"))
    peak = tl.max(score, 1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - anchor[:, None])
    return peak, tl.sum(weight, 1), tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)


@triton.jit(do_not_specialize=["width", "tiles"])
def _attend(
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
    q_row,
    q_head,
    q_width,
    q_size,
    m_row,
    m_width,
    k_row,
    v_row,
    k_head: tl.constexpr,  # constants, for they give the loads immediate offsets and free the registers of pointers
    k_slot: tl.constexpr,
    k_size: tl.constexpr,
    v_head: tl.constexpr,
    v_slot: tl.constexpr,
    v_size: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of folded queries and one key head: of one block (SPLIT), or of all blocks to the end."""
    tile = tl.program_id(0) % tiles  # neighbours share keys, which the second finds in the L2 cache
    row = (tl.program_id(0) // tiles // KEY_HEADS).to(tl.int64)
    key_head = tl.program_id(0) // tiles % KEY_HEADS
    visible = tl.minimum(tl.load(length + row), view).to(tl.int32)

    folded = tile * QUERIES + tl.arange(0, QUERIES)
    live = folded < GROUP * width
    head = key_head * GROUP + folded // width
    place = folded % width
    heads = KEY_HEADS * GROUP
    # Where results go is settled here, so that less lives in registers through the loop.
    at = head * width + place if SPLIT else place * heads + head
    size = tl.arange(0, SIZE)
    slot = tl.arange(0, BLOCK)
    query += row * q_row + head.to(tl.int64)[:, None] * q_head + place.to(tl.int64)[:, None] * q_width + size * q_size
    mask += row * m_row + place.to(tl.int64)[:, None] * m_width + slot
    key += row * k_row + key_head * k_head + slot[:, None] * k_slot + size * k_size
    value += row * v_row + key_head * v_head + slot[:, None] * v_slot + size * v_size

    if SPLIT:
        block = tl.program_id(1)
        start = block.to(tl.int64) * BLOCK  # a cache may pass 2³¹ elements
        if start >= visible:
            return
        inside = start + slot < visible
        k = tl.load(key + start * k_slot, mask=inside[:, None], other=0.0)
        v = tl.load(value + start * v_slot, mask=inside[:, None], other=0.0)
        seen = tl.load(mask + start, mask=live[:, None] & (start + slot < view), other=0) != 0
        q = tl.load(query, mask=live[:, None], other=0.0)
        peak, mass, total = _block(q, k, v, seen & inside, inner, outer, SOFTCAP, PRECISION)
        at = (row * tl.num_programs(1) + block) * heads * width + at
        tl.store(peaks + at, peak, mask=live)
        tl.store(masses + at, mass, mask=live)
        tl.store(totals + at[:, None] * SIZE + size, total, mask=live[:, None])
    else:
        q = tl.load(query, mask=live[:, None], other=0.0)
        peak = tl.full([QUERIES], float("-inf"), tl.float32)
        mass = tl.zeros([QUERIES], tl.float32)
        total = tl.zeros([QUERIES, SIZE], tl.float32)
        for block in range(tl.cdiv(visible, BLOCK)):
            start = tl.cast(block, tl.int64) * BLOCK
            inside = start + slot < visible
            k = tl.load(key + start * k_slot, mask=inside[:, None], other=0.0)
            v = tl.load(value + start * v_slot, mask=inside[:, None], other=0.0)
            seen = tl.load(mask + start, mask=live[:, None] & (start + slot < view), other=0) != 0
            new_peak, new_mass, new_total = _block(q, k, v, seen & inside, inner, outer, SOFTCAP, PRECISION)
            peak, mass, total = _fold(peak, mass, total, new_peak, new_mass, new_total)
        at = row * width * heads + at
        result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
        tl.store(out + at[:, None] * SIZE + size, result.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit(do_not_specialize=["width", "view", "splits"])
def _combine(
    length,
    out,
    totals,
    masses,
    peaks,
    width,
    view,
    splits,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Fold the blocks of one (row, head, query), AHEAD of them loaded at a time. Blocks never written are not read."""
    row = (tl.program_id(0) // (HEADS * width)).to(tl.int64)
    query = tl.program_id(0) % (HEADS * width)  # head by head
    blocks = tl.cdiv(tl.minimum(tl.load(length + row), view).to(tl.int32), BLOCK)
    size = tl.arange(0, SIZE)
    one = tl.arange(0, 1)
    peak = tl.full([1], float("-inf"), tl.float32)
    mass = tl.zeros([1], tl.float32)
    total = tl.zeros([1, SIZE], tl.float32)
    for start in range(0, blocks, AHEAD):
        for ahead in tl.static_range(AHEAD):
            block = start + ahead + one
            at = (row * splits + block) * HEADS * width + query
            there = block < blocks  # a block that is not there weighs nothing: folding it changes no bit
            block_peak = tl.load(peaks + at, mask=there, other=float("-inf"))
            block_mass = tl.load(masses + at, mask=there, other=0.0)
            block_total = tl.load(totals + at[:, None] * SIZE + size, mask=there[:, None], other=0.0)
            peak, mass, total = _fold(peak, mass, total, block_peak, block_mass, block_total)
    result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    at = (row * width + query % width) * HEADS + query // width + one
    tl.store(out + at[:, None] * SIZE + size, result.to(out.dtype.element_ty))


def attends(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Do the attention kernels take these tensors?"""
    size = query.shape[-1]
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in PRECISION
        and key.shape == value.shape
        and 16 <= size <= 256
        and size & (size - 1) == 0
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
    """See `kernels.attend`. `split`: one program per block and a second kernel; None decides by size.

    Where rows, key heads and query tiles are few, blocks become programs of their own: a single row of Qwen2.5-7B
    with 1,024 slots has 64, each a few dependent loads long. Otherwise a program walks its blocks, which spares the
    sums their way through memory. Both fold the same blocks in the same order by the same arithmetic.
    """
    rows, heads, width, size = query.shape
    key_heads, view = key.shape[1], key.shape[2]
    exact = query.dtype == torch.float32  # no matrix unit: operands pass through registers, so tiles are small
    queries = 16 if exact else QUERIES
    block = max(16, min(128, BLOCK_BYTES // size // (8 if exact else 2)))
    tiles = triton.cdiv(heads // key_heads * width, queries)
    splits = triton.cdiv(view, block)
    if split is None:
        split = rows * key_heads * tiles < ENOUGH and splits > 1
    out = query.new_empty(rows, width, heads, size)
    partials = (rows, splits, heads, width)
    totals = query.new_empty(*partials, size, dtype=torch.float32) if split else out
    masses = query.new_empty(partials, dtype=torch.float32) if split else out
    peaks = query.new_empty(partials, dtype=torch.float32) if split else out
    length = length.contiguous()  # free for what is; a column of a table would be misread
    if mask.stride(-1) != 1:
        mask = mask.contiguous()
    _attend[rows * key_heads * tiles, splits if split else 1](
        query,
        key,
        value,
        mask.view(torch.uint8),
        length,
        out,
        totals,
        masses,
        peaks,
        scale * LOG2E if softcap is None else 2 * LOG2E * scale / softcap,
        1.0 if softcap is None else softcap * LOG2E,
        width,
        view,
        tiles,
        *query.stride(),
        *mask.stride()[:2],
        key.stride(0),
        value.stride(0),
        *key.stride()[1:],
        *value.stride()[1:],
        KEY_HEADS=key_heads,
        GROUP=heads // key_heads,
        SIZE=size,
        QUERIES=queries,
        BLOCK=block,
        SPLIT=split,
        SOFTCAP=softcap is not None,
        PRECISION=PRECISION[query.dtype],
        num_warps=8 if size == 256 and not exact else 4,
        num_stages=1 if split or exact else 2,  # 2: the next block loads meanwhile
    )
    if split:
        _combine[(rows * heads * width,)](
            length,
            out,
            totals,
            masses,
            peaks,
            width,
            view,
            splits,
            HEADS=heads,
            SIZE=size,
            BLOCK=block,
            AHEAD=16,
            num_warps=1,
        )
    return out


@triton.jit
def _judge(logits, peaks, places, masses, stride, vocabulary, SLICE: tl.constexpr):
    """Of one slice of one row: the largest logit, the lowest id that has it, the sum of exponentials above it."""
    row = tl.program_id(0).to(tl.int64)  # rows × vocabulary may pass 2³¹
    index = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits + row * stride + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    anchor = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(peaks + at, peak)
    tl.store(places + at, tl.min(tl.where(x == peak, index, vocabulary), 0))
    tl.store(masses + at, tl.sum(tl.exp(x - anchor), 0))


@triton.jit
def _verdict(peaks, places, masses, choice, largest, logsumexp, slices, vocabulary, SLICES: tl.constexpr):
    """Of one row, from its slices. Slices of only −∞ weigh nothing; NaN still chooses an id that exists."""
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


def judge(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.judge`. Two kernels; the first reads the logits, once."""
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
        _judge[rows, slices](flat, peaks, places, masses, flat.stride(0), vocabulary, SLICE=SLICE, num_warps=4)
        power = triton.next_power_of_2(slices)
        _verdict[(rows,)](
            peaks, places, masses, choice, largest, logsumexp, slices, vocabulary, SLICES=power, num_warps=1
        )
    return choice, largest, logsumexp


@triton.jit(do_not_specialize=["count"])
def _linear(
    x,
    weight,
    bias,
    out,
    count,
    outputs,
    inputs,
    x_row,
    w_row,
    steps,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    EVEN: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of the product, over one part of the inputs: `steps` steps of them, first to last."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # row tiles of the same weights run side by side
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    first = tl.program_id(2) * steps
    last = tl.minimum(first + steps, tl.cdiv(inputs, INPUTS))
    x += row.to(tl.int64)[:, None] * x_row + column
    weight += output.to(tl.int64)[:, None] * w_row + column
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for step in range(first, last):
        if EVEN:
            a = tl.load(x + step * INPUTS, mask=row[:, None] < count, other=0.0)
            b = tl.load(weight + step * INPUTS, mask=output[:, None] < outputs, other=0.0)
        else:
            inside = column < inputs - step * INPUTS
            a = tl.load(x + step * INPUTS, mask=(row[:, None] < count) & inside, other=0.0)
            b = tl.load(weight + step * INPUTS, mask=(output[:, None] < outputs) & inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    at = (tl.program_id(2) * count + row).to(tl.int64)[:, None] * outputs + output
    there = (row[:, None] < count) & (output < outputs)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["elements"])
def _add(parts, bias, out, elements, outputs, PARTS: tl.constexpr, BIAS: tl.constexpr, ELEMENTS: tl.constexpr):
    """The parts of a split product, first to last, then the bias."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)  # CHUNK bounds it
    there = at < elements
    total = tl.load(parts + at, mask=there, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * elements + at, mask=there, other=0.0)
    if BIAS:
        total += tl.load(bias + at % outputs, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


def parts(outputs: int, inputs: int) -> int:
    """Into how many parts a linear's inputs are cut: by the weight's shape alone, never by the batch.

    Qwen2.5-7B: 3 parts for q, k, v and o, 5 for down, 1 for gate, up and the LM head.
    """
    pieces: int = max(1, min(triton.cdiv(STREAMS, triton.cdiv(outputs, OUTPUTS)), inputs // (INPUTS * SHORTEST)))
    return pieces


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `kernels.linear`. Every tile has 64 rows, even for one: the matrix unit then still waits for the weights."""
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    pieces = parts(outputs, inputs)
    steps = triton.cdiv(triton.cdiv(inputs, INPUTS), pieces)
    if not len(flat):
        return out
    # Rows come out the same in any company, so many of them go in chunks, which bounds the parts' memory.
    chunk = CHUNK if pieces > 1 else len(flat)
    for some, into in zip(flat.split(chunk), out.view(-1, outputs).split(chunk), strict=True):
        count = len(some)
        sums = into if pieces == 1 else x.new_empty(pieces, count, outputs, dtype=torch.float32)
        _linear[triton.cdiv(count, QUERIES), triton.cdiv(outputs, OUTPUTS), pieces](
            some,
            weight,
            bias,
            sums,
            count,
            outputs,
            inputs,
            some.stride(0),
            weight.stride(0),
            steps,
            ROWS=QUERIES,
            OUTPUTS=OUTPUTS,
            INPUTS=INPUTS,
            EVEN=inputs % INPUTS == 0,
            BIAS=bias is not None and pieces == 1,
            PRECISION=PRECISION[x.dtype],
            num_warps=4,
            num_stages=2 if x.dtype == torch.float32 else 5,
        )
        if pieces > 1:
            _add[(triton.cdiv(count * outputs, 1024),)](
                sums, bias, into, count * outputs, outputs, PARTS=pieces, BIAS=bias is not None, ELEMENTS=1024
            )
    return out


@triton.jit
def _norm(x, weight, out, eps, size, SIZE: tl.constexpr):
    """One row, summed in one order."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    wide = tl.load(x + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    narrow = wide.to(out.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, (narrow * scale).to(out.dtype.element_ty), mask=column < size)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `kernels.norm`. One program per row."""
    size = x.shape[-1]
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _norm[(x.numel() // size,)](x, weight, out, eps, size, SIZE=triton.next_power_of_2(size), num_warps=4)
    return out

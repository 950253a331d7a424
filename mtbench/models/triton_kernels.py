# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels of `mtbench.models.kernels` and their launchers. Imported only on machines that run them.

Tile shapes are constants. There is no autotuning: it synchronises, and the same row could run in another tile shape in
another batch. Launchers allocate and launch but never synchronise, so a CUDA graph can record them after a first call
has compiled them. Kernels are not specialised on the number of rows or positions, and on slots in view only for
multiples of 16 (masks then load 16 at a time), so one compiled kernel serves all steps.

Attention is flash decoding (https://pytorch.org/blog/flash-decoding): keys are divided into blocks of fixed length,
each block has its own softmax, and a row's blocks are combined in order, from the first to the last.

Names: peak = maximum of the scores, mass = sum of exponentials relative to it, total = sum of values weighted by them.
"""

import math
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES = 64  # rows of a query tile, and of a linear's: the fewest that Hopper's matrix unit (wgmma) takes
BLOCK_BYTES = 16384  # keys of a block; two programs fit a multiprocessor, each with one block in use and one loading
ENOUGH_PROGRAMS = 64  # from here on, a loop over blocks reads the cache nearly as fast as one program per block
SLICE = 4096  # logits per program: 38 slices of Qwen2.5's vocabulary; each thread loads 4 × 16 bytes of bfloat16
OUTPUTS = 64  # of a linear, per program
INPUTS = 64  # of a linear, per step
STREAMING_PROGRAMS = 256  # about two per multiprocessor of an H200 (132): they read weights at full bandwidth
MIN_STEPS = 16  # of a part of a split linear: below about 1,000 inputs a second kernel costs more than it saves
CHUNK = 1024  # rows of a split linear whose parts are in memory at a time
LOG2E = math.log2(math.e)

PRECISION = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "tf32"}  # float16 and bfloat16 ignore it


@cache
def _dependent_launch() -> dict[str, bool]:
    """Return the options of a programmatic dependent launch: the kernel is set up while the one before it ends.

    GPUs have it from Hopper on (CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").
    """
    if triton.knobs.runtime.interpret:
        return {"PDL": False}
    target = triton.runtime.driver.active.get_current_target()
    hopper = target.backend == "cuda" and target.arch >= 90
    return {"PDL": True, "launch_pdl": True} if hopper else {"PDL": False}


@triton.jit
def _wait(PDL: tl.constexpr):
    """Wait until the kernel before this one has written its results; let the next one be set up meanwhile.

    Every program calls it before its first load, also one with nothing to do: the kernel after this one then knows that
    the kernel before this one is done.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


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
    total = tl.fma(block_total, tl.broadcast_to(new[:, None], block_total.shape), total * old[:, None])
    return highest, mass, total


@triton.jit
def _block(q, k, v, seen, inner, outer, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Return one block's softmax: peaks, masses and totals."""
    score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * inner
    if SOFTCAP:  # softcap · tanh(score / softcap), tanh written with an exponential
        score = (1.0 - 2.0 / (1.0 + tl.exp2(score))) * outer
    score = tl.where(seen, score, float("-inf"))
    peak = tl.max(score, 1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(score - anchor[:, None])
    return peak, tl.sum(weight, 1), tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)


@triton.jit(do_not_specialize=["width", "tiles"])
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
    QUERIES: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attention of one tile of queries and one key head, over one block of keys (SPLIT) or over all blocks in order.

    `folded`: the queries of the GROUP query heads that share the key head, one after another.
    """
    _wait(PDL)
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
    size = tl.arange(0, SIZE)
    slot = tl.arange(0, BLOCK)
    query += row * q_row + head.to(tl.int64)[:, None] * q_head + place.to(tl.int64)[:, None] * q_width + size * q_size
    mask += row * m_row + place.to(tl.int64)[:, None] * m_width + slot
    key += row * k_row + key_head * k_head + slot[:, None] * k_slot + size * k_size
    value += row * v_row + key_head * v_head + slot[:, None] * v_slot + size * v_size

    if SPLIT:
        block = tl.program_id(1)
        start = block.to(tl.int64) * BLOCK  # a cache may have more than 2³¹ elements
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
    PDL: tl.constexpr,
):
    """Combine the blocks of one (row, head, query), loading AHEAD of them at a time. Reads written blocks only."""
    _wait(PDL)
    row = (tl.program_id(0) // (HEADS * width)).to(tl.int64)
    query = tl.program_id(0) % (HEADS * width)  # ordered by head
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
            exists = block < blocks  # a missing block has mass 0: adding it changes no bit
            block_peak = tl.load(peaks + at, mask=exists, other=float("-inf"))
            block_mass = tl.load(masses + at, mask=exists, other=0.0)
            block_total = tl.load(totals + at[:, None] * SIZE + size, mask=exists[:, None], other=0.0)
            peak, mass, total = _fold(peak, mass, total, block_peak, block_mass, block_total)
    result = total / tl.where(mass == 0.0, 1.0, mass)[:, None]
    at = (row * width + query % width) * HEADS + query // width + one
    tl.store(out + at[:, None] * SIZE + size, result.to(out.dtype.element_ty))


def attends(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Return whether the attention kernels support these tensors."""
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
    """Return attention; see `kernels.attend`.

    `split`: True runs one program per block of keys and a second kernel that combines them; False, programs that loop
    over all blocks; None decides by size. A split gives few rows enough programs (64 for one row of Qwen2.5-7B with
    1,024 slots); the loop writes no partial sums to memory. Both give the same bits: same blocks, order and arithmetic.
    """
    rows, heads, width, size = query.shape
    key_heads, view = key.shape[1], key.shape[2]
    exact = query.dtype == torch.float32
    queries, block = _tile_shape(size, exact)
    tiles = triton.cdiv(heads // key_heads * width, queries)
    splits = triton.cdiv(view, block)
    if split is None:
        split = rows * key_heads * tiles < ENOUGH_PROGRAMS and splits > 1
    out = query.new_empty(rows, width, heads, size)
    partials = _new_partials(query, splits) if split else (out, out, out)  # unused without a split
    length = length.contiguous()  # the kernel takes no stride for it
    mask = mask if mask.stride(-1) == 1 else mask.contiguous()
    k_strides, v_strides = key.stride(), value.stride()
    strides = (*query.stride(), *mask.stride()[:2], k_strides[0], v_strides[0], *k_strides[1:], *v_strides[1:])
    _attend[rows * key_heads * tiles, splits if split else 1](
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
        *strides,
        KEY_HEADS=key_heads,
        GROUP=heads // key_heads,
        SIZE=size,
        QUERIES=queries,
        BLOCK=block,
        SPLIT=split,
        SOFTCAP=softcap is not None,
        PRECISION=PRECISION[query.dtype],
        num_warps=8 if size == 256 and not exact else 4,
        num_stages=1 if split or exact else 2,  # 2: the next block loads during the current one
        **_dependent_launch(),
    )
    if split:
        options = {"HEADS": heads, "SIZE": size, "BLOCK": block, "AHEAD": 16, "num_warps": 1, **_dependent_launch()}
        _combine[(rows * heads * width,)](length, out, *partials, width, view, splits, **options)
    return out


def _tile_shape(size: int, exact: bool) -> tuple[int, int]:
    """Return a tile's queries and keys. `exact`: float32, whose operands are in registers, so tiles are small."""
    if exact:
        return 16, max(16, min(128, BLOCK_BYTES // size // 8))
    return QUERIES, max(16, min(128, BLOCK_BYTES // size // 2))


def _new_partials(query: Tensor, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return memory for each block's totals (R, splits, H, W, d), masses and peaks (R, splits, H, W)."""
    rows, heads, width, size = query.shape
    shape = (rows, splits, heads, width)
    empty = partial(query.new_empty, dtype=torch.float32)
    return empty(*shape, size), empty(shape), empty(shape)


def _score_factors(scale: float, softcap: float | None) -> tuple[float, float]:
    """Return the factors of a score before and after the tanh of `softcap`, for exponentials in powers of two."""
    if softcap is None:
        return scale * LOG2E, 1.0
    return 2 * LOG2E * scale / softcap, softcap * LOG2E


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
    """One tile of the product over one part of the inputs: `steps` steps in order."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)  # adjacent programs read the same weights
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
    inside = (row[:, None] < count) & (output < outputs)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["elements"])
def _add(parts, bias, out, elements, outputs, PARTS: tl.constexpr, BIAS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Add the parts of a split product in order, then the bias."""
    at = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)  # int32 suffices: CHUNK bounds it
    inside = at < elements
    total = tl.load(parts + at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(parts + part * elements + at, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def parts_of(outputs: int, inputs: int) -> int:
    """Return the number of parts into which a linear's inputs are split. It depends on the weight's shape only.

    Qwen2.5-7B: 3 parts for q, k, v and o, 5 for down, 1 for gate, up and the LM head.
    """
    wanted = triton.cdiv(STREAMING_PROGRAMS, triton.cdiv(outputs, OUTPUTS))
    most = inputs // (INPUTS * MIN_STEPS)
    parts: int = max(1, min(wanted, most))
    return parts


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product; see `kernels.linear`. A tile always has 64 rows; even so, memory bandwidth is the limit."""
    outputs, inputs = weight.shape
    flat = x.reshape(-1, inputs)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    if weight.stride(1) != 1:
        weight = weight.contiguous()
    out = x.new_empty(*x.shape[:-1], outputs)
    parts = parts_of(outputs, inputs)
    steps = triton.cdiv(triton.cdiv(inputs, INPUTS), parts)
    if not len(flat):
        return out
    # Results are batch-invariant, so rows can be computed in chunks, which bounds the memory of the parts.
    chunk = CHUNK if parts > 1 else len(flat)
    for rows, result in zip(flat.split(chunk), out.view(-1, outputs).split(chunk), strict=True):
        count = len(rows)
        sums = result if parts == 1 else x.new_empty(parts, count, outputs, dtype=torch.float32)
        _linear[triton.cdiv(count, QUERIES), triton.cdiv(outputs, OUTPUTS), parts](
            rows,
            weight,
            bias,
            sums,
            count,
            outputs,
            inputs,
            rows.stride(0),
            weight.stride(0),
            steps,
            ROWS=QUERIES,
            OUTPUTS=OUTPUTS,
            INPUTS=INPUTS,
            EVEN=inputs % INPUTS == 0,
            BIAS=bias is not None and parts == 1,
            PRECISION=PRECISION[x.dtype],
            num_warps=4,
            num_stages=2 if x.dtype == torch.float32 else 5,
        )
        if parts > 1:
            _add[(triton.cdiv(count * outputs, 1024),)](
                sums, bias, result, count * outputs, outputs, PARTS=parts, BIAS=bias is not None, ELEMENTS=1024
            )
    return out


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

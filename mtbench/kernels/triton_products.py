# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of few positions and large weights, with the operations around them: the kernel and its launchers.

Such a product reads each weight once and does little else, so memory bandwidth decides its time. The matrix unit takes
weights as its large side (wgmma: 64 rows and more) and positions, padded to 16, 32, 64 or 128, as its small side.

product_plan.py divides the outputs into groups, and the steps of all groups into shares (stream-K). One program takes a
share; two do, each with half of the outputs, at few positions and where operands are in registers. If shares split a
group, each program stores its part of the sum. The last one to arrive, whichever it is, adds them in the order of the
inputs and finishes the tile: sums are deterministic, and a product is one kernel. At many positions the parts are
large, and a second kernel with more programs adds them sooner, in the same order. Groups and shares depend on the
weight's shape and the GPU only, never on the number of positions: products are batch-invariant. Padding changes no bit
if the matrix unit adds a column's products in the same order in each of its widths.

There is no autotuning (triton_kernels.py says why).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as hopper

from mtbench.kernels import Norm, NormInput
from mtbench.kernels.product_plan import FEW, STEP, TILE, Plan, plan
from mtbench.kernels.triton_device import arrivals, dependent_launch, multiprocessors, shared_memory

STAGES = 8  # steps in flight, at most
AHEAD_BYTES = 16 << 20  # of weights, asked for before the inputs are known: a third of an H100's L2 cache
HELD = 64  # sums of parts that a thread loads at a time
SLICE = 16  # positions of a program that adds parts
WIDEST = 128  # positions of a tile
WIDEST_EXACT = 32  # in float32, which the matrix unit does not take
CHUNKS = 4  # tiles of positions in a launch: bounds the memory of partial sums, at most 35 MB for each
COUNTERS = 4096  # arrival counters of a GPU, at least

PRECISION = {torch.float32: "ieee", torch.float16: "tf32", torch.bfloat16: "tf32"}  # float16 and bfloat16 ignore it


@triton.jit
def sum_pairwise(x, SIZE: tl.constexpr):
    """Sum over the first dimension (a power of two) in pairs. The order of `tl.sum` depends on the layout."""
    for i in tl.static_range(10):  # unrolled, so that the shape may change
        if SIZE >> i > 1:
            x = tl.sum(tl.reshape(x, [2, SIZE >> (i + 1), x.shape[1]]), 0)
    return tl.reshape(x, [x.shape[1]])


@triton.jit
def _rows(tile, index, OUTPUTS: tl.constexpr, SWIGLU: tl.constexpr, TILE: tl.constexpr, HALVES: tl.constexpr):
    """Return the weight's rows of a tile. With SwiGLU, one half of them is of gate and the other one of up."""
    rows: tl.constexpr = TILE // 2 if SWIGLU else TILE
    row = tile * rows + index % rows
    if OUTPUTS % (rows * HALVES):
        row = tl.minimum(row, OUTPUTS - 1)  # a partial tile, or a half without outputs, repeats the last row
    if SWIGLU:
        row += index // rows * OUTPUTS
    return row


@triton.jit
def _prefetch(pointers):
    """Ask for the lines at these addresses to be in the L2 cache soon."""
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _partial_sum(
    x,
    weight,
    row,
    position,
    first,
    last,
    INPUTS: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the product of weight rows and positions over the steps from `first` to `last`."""
    column = tl.arange(0, STEP)
    weight += row[:, None] * INPUTS + column
    x += position[:, None] * INPUTS + column
    total = tl.zeros([TILE, POSITIONS], tl.float32)
    for step in range(first, last):
        if INPUTS % STEP == 0:
            a = tl.load(weight + step * STEP)
            b = tl.load(x + step * STEP)
        else:
            inside = column < INPUTS - step * STEP
            a = tl.load(weight + step * STEP, mask=inside, other=0.0)
            b = tl.load(x + step * STEP, mask=inside, other=0.0)
        total = tl.dot(a, tl.trans(b), total, input_precision=PRECISION)
    return total


@triton.jit
def _norm_factor(around, position, count, INPUTS: tl.constexpr, SQUARES: tl.constexpr, SQUARES_PADDED: tl.constexpr):
    """Return what the norm before the product multiplies its sums by, for each position; 1 without a norm."""
    squares, eps, power = around[1], around[2], around[3]
    factor = tl.full(position.shape, 1.0, tl.float32)
    if SQUARES > 0:
        part = tl.arange(0, SQUARES_PADDED)[:, None]
        square = tl.load(squares + part * count + position, mask=(part < SQUARES) & (position < count), other=0.0)
        factor = tl.rsqrt(sum_pairwise(square, SQUARES_PADDED) / INPUTS + eps) * power
    return factor


@triton.jit
def _finish(
    total,
    factor,
    tile,
    start,
    count,
    out,
    around,
    OUTPUTS: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Apply to a tile's sums what follows the product, in float32, and store the outputs, rounded once.

    `start`: the first position of the tile. PART: outputs of a sum of squares, a tile or half of it.
    """
    bias, _, _, _, weighted, next_squares, next_weight, next_power = around
    index = tl.arange(0, POSITIONS)
    position = start + index
    live = position < count
    total *= factor[None, :]
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, TILE // 2, POSITIONS]), (1, 2, 0)))
        total = gate / (1.0 + tl.exp(-gate)) * up
    ROWS: tl.constexpr = TILE // 2 if SWIGLU else TILE
    output = tile * ROWS + tl.arange(0, ROWS)
    inside = output < OUTPUTS
    if BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[:, None]
    first = tl.cast(start, tl.int64) * OUTPUTS  # of many positions; from there on, 32 bits suffice
    at = index[None, :] * OUTPUTS + output[:, None]
    inside = inside[:, None] & live[None, :]
    if ADD:
        total += tl.load(out + first + at, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + first + at, result, mask=inside)
    if ADD:
        wide = tl.where(inside, result.to(tl.float32), 0.0)
        factor = tl.load(next_weight + output, mask=output < OUTPUTS, other=0.0).to(tl.float32) / next_power
        tl.store(weighted + first + at, (wide * factor[:, None]).to(out.dtype.element_ty), mask=inside)
        if ROWS == PART:
            tl.store(next_squares + tile * count + position, sum_pairwise(wide * wide, PART), mask=live)
        else:
            halves = tl.split(tl.permute(tl.reshape(wide * wide, [2, PART, POSITIONS]), (1, 2, 0)))
            tl.store(next_squares + 2 * tile * count + position, sum_pairwise(halves[0], PART), mask=live)
            tl.store(next_squares + (2 * tile + 1) * count + position, sum_pairwise(halves[1], PART), mask=live)


@triton.jit
def _sum_of_parts(
    partials,
    cell,
    leader,
    last,
    half,
    HALVES: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    POSITIONS: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Add the parts of a tile in the order of the inputs, TOGETHER loaded at a time: WIDTH positions from `cell`."""
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for start in range(leader, last + 1, TOGETHER):
        for ahead in tl.static_range(TOGETHER):
            part = start + ahead
            place = (2 * part + (part == leader)) * HALVES + half
            exists = part <= last  # a missing part is 0: adding it changes no bit
            at = partials + place * TILE * POSITIONS + cell
            total += tl.load(at, mask=exists, other=0.0, cache_modifier=".cg")
    return total


@triton.jit(do_not_specialize=["first_chunk", "count"])
def _product(
    x,
    weight,
    out,
    partials,
    arrivals,
    first_chunk,
    count,
    around,
    INPUTS: tl.constexpr,  # constants: loads then have immediate offsets
    OUTPUTS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_PADDED: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SHARE: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    HALVES: tl.constexpr,
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    TOGETHER: tl.constexpr,
    APART: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program's share of the product: for each group that it reaches, its tile's sum over a part of the inputs.

    A program stores two parts at most: of the group that its predecessor began, and of the last one, if it is not done.
    `leader` is the share that begins a group. APART: `_add_parts` adds them.
    """
    steps: tl.constexpr = (INPUTS + STEP - 1) // STEP
    rows: tl.constexpr = TILE // 2 if SWIGLU else TILE  # rows of a tile in the output
    groups: tl.constexpr = (OUTPUTS + rows * HALVES - 1) // (rows * HALVES)
    chunk = tl.program_id(0)  # adjacent programs read the same weights
    share = tl.program_id(1) // HALVES
    half = tl.program_id(1) % HALVES
    start = (first_chunk + chunk) * POSITIONS
    position = start + tl.arange(0, POSITIONS)
    clamped = tl.minimum(position, count - 1)  # padding repeats the last position
    index = tl.arange(0, TILE)
    begin = share * SHARE
    end = tl.minimum(begin + SHARE, groups * steps)
    if PDL:
        tile = begin // steps * HALVES + half
        lines = weight + _rows(tile, index, OUTPUTS, SWIGLU, TILE, HALVES).to(tl.int64) * INPUTS
        for ahead in range(AHEAD):  # the weights can be read before the inputs are computed
            _prefetch(lines + tl.minimum(begin % steps + ahead, steps - 1) * STEP)
        hopper.gdc_wait()
        hopper.gdc_launch_dependents()
    factor = _norm_factor(around, position, count, INPUTS, SQUARES, SQUARES_PADDED)
    cell = index[:, None] * POSITIONS + tl.arange(0, POSITIONS)
    partials += chunk.to(tl.int64) * tl.num_programs(1) * 2 * TILE * POSITIONS
    for group in range(begin // steps, tl.cdiv(end, steps)):
        tile = group * HALVES + half
        row = _rows(tile, index, OUTPUTS, SWIGLU, TILE, HALVES)
        first = tl.maximum(begin - group * steps, 0)
        last = tl.minimum(end - group * steps, steps)
        total = _partial_sum(
            x, weight, row.to(tl.int64), clamped, first, last, INPUTS, STEP, TILE, POSITIONS, PRECISION
        )
        complete = last - first == steps
        if not complete:
            leader = group * steps // SHARE
            others = (group * steps + steps - 1) // SHARE - leader
            own = (2 * share + (share == leader)) * HALVES + half
            tl.store(partials + own * TILE * POSITIONS + cell, total)
            if not APART:
                tl.debug_barrier()  # all threads have stored before one of them says so
                counter = arrivals + chunk * groups * HALVES + tile
                complete = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == others
                if complete:
                    tl.store(counter, 0)  # for the next product
                    total = _sum_of_parts(
                        partials, cell, leader, leader + others, half, HALVES, TILE, POSITIONS, POSITIONS, TOGETHER
                    )
        if (steps <= SHARE or not APART) and complete:  # a smaller share has no whole group
            _finish(
                total,
                factor,
                tile,
                start,
                count,
                out,
                around,
                OUTPUTS,
                SWIGLU,
                BIAS,
                ADD,
                TILE,
                PART,
                POSITIONS,
            )


@triton.jit(do_not_specialize=["first_chunk", "count"])
def _add_parts(
    out,
    partials,
    shares,
    first_chunk,
    count,
    around,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_PADDED: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SHARE: tl.constexpr,
    STEP: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    HALVES: tl.constexpr,
    POSITIONS: tl.constexpr,
    SLICE: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the parts of one tile at SLICE positions and finish it, unless one program had all its steps."""
    if PDL:
        hopper.gdc_wait()
        hopper.gdc_launch_dependents()
    steps: tl.constexpr = (INPUTS + STEP - 1) // STEP
    tile = tl.program_id(0)
    chunk = tl.program_id(2)
    group = tile // HALVES
    leader = group * steps // SHARE
    last = (group * steps + steps - 1) // SHARE
    inside = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    start = (first_chunk + chunk) * POSITIONS + tl.program_id(1) * SLICE
    cell = tl.arange(0, TILE)[:, None] * POSITIONS + inside
    partials += chunk.to(tl.int64) * shares * HALVES * 2 * TILE * POSITIONS
    if last > leader:
        _finish(
            _sum_of_parts(partials, cell, leader, last, tile % HALVES, HALVES, TILE, SLICE, POSITIONS, TOGETHER),
            _norm_factor(around, start + tl.arange(0, SLICE), count, INPUTS, SQUARES, SQUARES_PADDED),
            tile,
            start,
            count,
            out,
            around,
            OUTPUTS,
            SWIGLU,
            BIAS,
            ADD,
            TILE,
            PART,
            SLICE,
        )


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product; see `kernels.linear`."""
    return _launch(x.reshape(-1, x.shape[-1]), weight, None).view(*x.shape[:-1], len(weight))


def norm_product(x: NormInput, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of a normalised input; see `kernels.norm_product`."""
    return _launch(x.weighted, weight, bias, (x.squares, norm.eps, norm.power))


def norm_swiglu(x: NormInput, norm: Norm, weight: Tensor) -> Tensor:
    """Return SwiGLU of a normalised input; see `kernels.norm_swiglu`."""
    return _launch(x.weighted, weight, None, (x.squares, norm.eps, norm.power), swiglu=True)


def add_product(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> NormInput:
    """Add a product to the residual in place, and return the next norm's input; see `kernels.add_product`."""
    divided = plan(*weight.shape, multiprocessors(x.device))
    parts = divided.groups * divided.rows // min(divided.rows, TILE)
    following = NormInput(torch.empty_like(residual), residual.new_empty(parts, len(residual), dtype=torch.float32))
    _launch(x, weight, bias, out=residual, following=(*following, norm.weight, norm.power))
    return following


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    entering: tuple[Tensor, float, float] | None = None,
    *,
    out: Tensor | None = None,
    following: tuple[Tensor, Tensor, Tensor, float] | None = None,
    swiglu: bool = False,
) -> Tensor:
    """Launch the kernels on x (N, I) and weight (O, I); with `swiglu`, (2·O, I). Return the output, (N, O).

    `entering`: squares, eps and power of x's norm. `following`: weighted and squares of the next norm's input, to be
    written, and the norm's weight and power; the product is then added to `out`.
    """
    x, weight = x.contiguous(), weight.contiguous()
    count, inputs = x.shape
    outputs = len(weight) // 2 if swiglu else len(weight)
    out = x.new_empty(count, outputs) if out is None else out
    squares, eps, power = (None, 0.0, 1.0) if entering is None else (entering[0].contiguous(), *entering[1:])
    exact, dependent = x.dtype == torch.float32, dependent_launch(x.device)
    positions = max(16, min(triton.next_power_of_2(count), WIDEST_EXACT if exact else WIDEST))
    divided, parts = plan(*weight.shape, multiprocessors(x.device)), 0 if squares is None else len(squares)
    tile, options = _tile(divided, positions, x)
    halves, chunks = divided.rows // tile, triton.cdiv(count, positions)
    at_once, shares, tiles = min(chunks, CHUNKS), divided.shares, divided.groups * halves
    stored = 2 * at_once * shares if divided.most_parts > 1 else 0
    partials = x.new_empty(stored * divided.rows * positions, dtype=torch.float32)
    arrived = arrivals(x.device, max(COUNTERS, triton.next_power_of_2(at_once * tiles)))
    around = (bias, squares, eps, power, *((None, None, None, 1.0) if following is None else following))
    common = {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "SQUARES": parts,
        "SQUARES_PADDED": triton.next_power_of_2(max(parts, 1)),
        "SWIGLU": swiglu,
        "BIAS": bias is not None,
        "ADD": following is not None,
        "SHARE": divided.share,
        "STEP": STEP,
        "TILE": tile,
        "PART": min(divided.rows, TILE),
        "HALVES": halves,
        "POSITIONS": positions,
        "PDL": dependent,
        "enable_fp_fusion": False,  # the compiler would contract operations differently at each width
        "launch_pdl": dependent,
    }
    for chunk in range(0, chunks, CHUNKS):
        now = min(at_once, chunks - chunk)
        arguments = (x, weight, out, partials, arrived, chunk, count, around)
        _product[now, shares * halves](*arguments, **common, **options, PRECISION=PRECISION[x.dtype])
        if divided.apart(positions):
            _add_parts[tiles, positions // SLICE, now](
                out, partials, shares, chunk, count, around, **common, SLICE=SLICE, TOGETHER=4, num_warps=tile // 32
            )
    return out


def _tile(divided: Plan, positions: int, x: Tensor) -> tuple[int, dict[str, Any]]:
    """Return the rows of a program, and the options of its kernel: steps asked for ahead and in flight, warps.

    A program of few positions leaves room for a second one on its multiprocessor.
    """
    limit, from_shared = shared_memory(x.device)
    tile = divided.tile(positions) if from_shared else min(divided.rows, TILE)
    warps = 8 if positions > FEW and tile > 64 else 4
    step_bytes = (tile + positions) * STEP * x.element_size()
    fits = (limit if positions > FEW else limit // 2 - 1024) // step_bytes
    fits += not from_shared  # the step in use is in registers
    early = min(divided.shares, 2 * multiprocessors(x.device))  # shares that can start early
    ahead = AHEAD_BYTES // (early * divided.rows * STEP * x.element_size())
    return tile, {
        "AHEAD": min(divided.share, ahead),
        "APART": divided.apart(positions),
        "TOGETHER": max(1, min(divided.most_parts, HELD * 32 * warps // (tile * positions))),
        "num_warps": warps,
        "num_stages": 2 if x.dtype == torch.float32 else max(2, min(STAGES, fits)),
    }

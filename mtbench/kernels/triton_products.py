# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""Products of few positions and large weights, with the operations around them: the kernel and its launchers.

Such a product reads each weight once and does little else, so memory bandwidth decides its time. The matrix unit takes
weights as its large side (wgmma: 64 rows and more) and positions, padded to 16, 32, 64 or 128, as its small side.

The steps of all tiles form one sequence, and each program computes an equal share of it, whatever the weight's shape
(stream-K, https://arxiv.org/abs/2301.03598). If shares split a tile, each program stores its partial sum. The last one
to arrive, whichever it is, adds them in the order of the inputs and finishes the tile: sums are deterministic, and a
product is one kernel. Tiles and shares depend on the weight's shape and the GPU only, never on the number of positions:
products are batch-invariant. Padding changes no bit if the matrix unit adds a column's products in the same order in
each of its widths.

Tile shapes are constants; there is no autotuning (triton_kernels.py says why).
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as hopper

from mtbench.kernels import Norm, NormInput

TILE = 128  # outputs of a tile: positions are read once for 128 rows of weights
STEP = 64  # inputs of a step: 128 bytes of a row in half precision, a line of the cache
STAGES = 4  # steps in flight: two programs have 96 KB on their way; bandwidth × latency of an H200 is about 30 KB
PROGRAMS = 2  # per multiprocessor: while one starts or finishes a tile, the other one reads
MIN_STEPS = 4  # of a program's share: below it, combining costs more than reading
WIDEST = 128  # positions of a tile
WIDEST_EXACT = 32  # in float32, which the matrix unit does not take
CHUNKS = 4  # tiles of positions in a launch: bounds the memory of partial sums, 35 MB for each
MULTIPROCESSORS, SHARED_BYTES = 132, 232_448  # of an H100 and an H200; taken where there is no GPU
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
def _rows(tile, index, OUTPUTS: tl.constexpr, SWIGLU: tl.constexpr, TILE: tl.constexpr):
    """Return the weight's rows of a tile. With SwiGLU, one half of them is of gate and the other one of up."""
    rows: tl.constexpr = TILE // 2 if SWIGLU else TILE
    row = tile * rows + index % rows
    if OUTPUTS % rows:
        row = tl.minimum(row, OUTPUTS - 1)  # a partial tile repeats the last row
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
def _finish(
    total,
    tile,
    position,
    count,
    out,
    bias,
    squares,
    eps,
    power,
    weighted,
    next_squares,
    next_weight,
    next_power,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    SQUARES: tl.constexpr,
    SQUARES_PADDED: tl.constexpr,
    SWIGLU: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
    POSITIONS: tl.constexpr,
):
    """Apply to a tile's sums what follows the product, in float32, and store the outputs, rounded once."""
    live = position < count
    if SQUARES > 0:
        part = tl.arange(0, SQUARES_PADDED)[:, None]
        square = tl.load(squares + part * count + position, mask=(part < SQUARES) & live, other=0.0)
        total *= (tl.rsqrt(sum_pairwise(square, SQUARES_PADDED) / INPUTS + eps) * power)[None, :]
    if SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, TILE // 2, POSITIONS]), (1, 2, 0)))
        total = gate / (1.0 + tl.exp(-gate)) * up
    ROWS: tl.constexpr = TILE // 2 if SWIGLU else TILE
    output = tile * ROWS + tl.arange(0, ROWS)
    inside = output < OUTPUTS
    if BIAS:
        total += tl.load(bias + output, mask=inside, other=0.0).to(tl.float32)[:, None]
    at = position.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
    inside = inside[:, None] & live[None, :]
    if ADD:
        total += tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    result = total.to(out.dtype.element_ty)
    tl.store(out + at, result, mask=inside)
    if ADD:
        wide = tl.where(inside, result.to(tl.float32), 0.0)
        factor = tl.load(next_weight + output, mask=output < OUTPUTS, other=0.0).to(tl.float32) / next_power
        tl.store(weighted + at, (wide * factor[:, None]).to(out.dtype.element_ty), mask=inside)
        tl.store(next_squares + tile * count + position, sum_pairwise(wide * wide, ROWS), mask=live)


@triton.jit(do_not_specialize=["first_chunk", "count"])
def _product(
    x,
    weight,
    out,
    partials,
    arrivals,
    first_chunk,
    count,
    bias,
    squares,
    eps,
    power,
    weighted,
    next_squares,
    next_weight,
    next_power,
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
    POSITIONS: tl.constexpr,
    PRECISION: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program's share of the product: for each tile that it reaches, a sum over a part of the inputs.

    A program stores two partial sums at most: of the tile that its predecessor began, and of the last one, if it is not
    done. `leader` is the program that begins a tile.
    """
    steps: tl.constexpr = (INPUTS + STEP - 1) // STEP
    rows: tl.constexpr = TILE // 2 if SWIGLU else TILE  # rows of a tile in the output
    tiles: tl.constexpr = (OUTPUTS + rows - 1) // rows
    chunk = tl.program_id(0)  # adjacent programs read the same weights
    program = tl.program_id(1)
    position = (first_chunk + chunk) * POSITIONS + tl.arange(0, POSITIONS)
    clamped = tl.minimum(position, count - 1)  # padding repeats the last position
    index = tl.arange(0, TILE)
    begin = program * SHARE
    end = tl.minimum(begin + SHARE, tiles * steps)
    if PDL:
        lines = weight + _rows(begin // steps, index, OUTPUTS, SWIGLU, TILE).to(tl.int64) * INPUTS
        for ahead in tl.static_range(AHEAD):  # the weights can be read before the inputs are computed
            _prefetch(lines + tl.minimum(begin % steps + ahead, steps - 1) * STEP)
        hopper.gdc_wait()
        hopper.gdc_launch_dependents()
    cell = index[:, None] * POSITIONS + tl.arange(0, POSITIONS)
    partials += chunk.to(tl.int64) * tl.num_programs(1) * 2 * TILE * POSITIONS
    for tile in range(begin // steps, tl.cdiv(end, steps)):
        row = _rows(tile, index, OUTPUTS, SWIGLU, TILE)
        first = tl.maximum(begin - tile * steps, 0)
        last = tl.minimum(end - tile * steps, steps)
        total = _partial_sum(
            x, weight, row.to(tl.int64), clamped, first, last, INPUTS, STEP, TILE, POSITIONS, PRECISION
        )
        complete = last - first == steps
        if not complete:
            leader = tile * steps // SHARE
            others = (tile * steps + steps - 1) // SHARE - leader
            own = 2 * program + (program == leader)
            tl.store(partials + own * TILE * POSITIONS + cell, total)
            tl.debug_barrier()  # all threads have stored before one of them says so
            counter = arrivals + chunk * tiles + tile
            complete = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == others
            if complete:
                tl.store(counter, 0)  # for the next product
                total = tl.zeros([TILE, POSITIONS], tl.float32)
                for part in range(leader, leader + others + 1):
                    place = 2 * part + (part == leader)
                    total += tl.load(partials + place * TILE * POSITIONS + cell, cache_modifier=".cg")
        if complete:
            _finish(
                total,
                tile,
                position,
                count,
                out,
                bias,
                squares,
                eps,
                power,
                weighted,
                next_squares,
                next_weight,
                next_power,
                INPUTS,
                OUTPUTS,
                SQUARES,
                SQUARES_PADDED,
                SWIGLU,
                BIAS,
                ADD,
                TILE,
                POSITIONS,
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
    tiles = triton.cdiv(len(weight), TILE)
    following = NormInput(torch.empty_like(residual), residual.new_empty(tiles, len(residual), dtype=torch.float32))
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
    """Launch the kernel on x (N, I) and weight (O, I); with `swiglu`, (2·O, I). Return the output, (N, O).

    `entering`: squares, eps and power of x's norm. `following`: weighted and squares of the next norm's input, to be
    written, and the norm's weight and power; the product is then added to `out`.
    """
    x, weight = x.contiguous(), weight.contiguous()
    count, inputs = x.shape
    outputs = len(weight) // 2 if swiglu else len(weight)
    out = x.new_empty(count, outputs) if out is None else out
    squares, eps, power = (None, 0.0, 1.0) if entering is None else entering
    parts = 0 if squares is None else len(squares)
    exact, dependent = x.dtype == torch.float32, dependent_launch(x.device)
    positions = max(16, min(triton.next_power_of_2(count), WIDEST_EXACT if exact else WIDEST))
    tiles, chunks = triton.cdiv(outputs, TILE // 2 if swiglu else TILE), triton.cdiv(count, positions)
    share, programs = _shares(tiles * triton.cdiv(inputs, STEP), multiprocessors(x.device))
    at_once = min(chunks, CHUNKS)
    partials = x.new_empty(at_once * programs * 2 * TILE * positions, dtype=torch.float32)
    arrived = arrivals(x.device, max(COUNTERS, triton.next_power_of_2(at_once * tiles)))
    before = (x, weight, out, partials, arrived)
    after = (count, bias, squares, eps, power, *((None, None, None, 1.0) if following is None else following))
    for chunk in range(0, chunks, CHUNKS):
        _product[min(at_once, chunks - chunk), programs](
            *before,
            chunk,
            *after,
            INPUTS=inputs,
            OUTPUTS=outputs,
            SQUARES=parts,
            SQUARES_PADDED=triton.next_power_of_2(max(parts, 1)),
            SWIGLU=swiglu,
            BIAS=bias is not None,
            ADD=following is not None,
            SHARE=share,
            STEP=STEP,
            TILE=TILE,
            POSITIONS=positions,
            PRECISION=PRECISION[x.dtype],
            AHEAD=STAGES - 1,
            PDL=dependent,
            num_warps=8 if positions == WIDEST else 4,
            num_stages=2 if exact else STAGES,
            enable_fp_fusion=False,  # the compiler would contract operations differently at each width
            launch_pdl=dependent,
        )
    return out


def _shares(steps: int, processors: int) -> tuple[int, int]:
    """Return the steps of a program's share and the number of programs."""
    share = max(MIN_STEPS, triton.cdiv(steps, PROGRAMS * processors))
    return share, triton.cdiv(steps, share)


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> tuple[int, bool]:
    """Return the bytes that a program may have, and whether the matrix unit reads its large side there (sm_90, 100)."""
    if device.type != "cuda":
        return SHARED_BYTES, True
    properties = triton.runtime.driver.active.utils.get_device_properties(torch.device(device).index or 0)
    return int(properties["max_shared_mem"]), torch.cuda.get_device_capability(device)[0] in (9, 10)


@cache
def dependent_launch(device: torch.device) -> bool:
    """Return whether a kernel may be launched before its predecessor ends (programmatic dependent launch, Hopper)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


counters: dict[tuple[torch.device, int], Tensor] = {}  # of arrivals. They stay: CUDA graphs hold their address


def arrivals(device: torch.device, size: int) -> Tensor:
    """Return counters, zero between kernels, for one stream at a time."""
    if (device, size) not in counters:
        counters[device, size] = torch.zeros(size, dtype=torch.int32, device=device)
    return counters[device, size]

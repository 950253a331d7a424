# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The choice of tokens in one pass over the logits: the Triton kernels of `kernels.choose_logsumexp`, their launcher.

Greedy, the token is the largest logit. The definition of sampling is `sampling.sampled`: logits/T plus Gumbel noise, a
hash (SplitMix64) of seed, position and token id. In PyTorch that is some 25 kernels over (rows, vocabulary) in int64
and float64. Here each logit is read once; hash and noise stay in registers, in uint64 and float64 as in the definition.
Only the last bit of a logarithm may differ from PyTorch's, so the token is the definition's unless the two largest sums
agree to about 15 digits. Every method on a GPU samples with these kernels, so "accept while the draft equals the
model's choice" stays exact there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Logits per program: eight per thread, since a logarithm in float64 takes many registers. Greedy rows have the same, so
# that their log-sum-exp has the same bits in a batch with sampled rows.
SLICE = 1024
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)  # the constants of `sampling.uniform`
FIRST = tl.constexpr(0xBF58476D1CE4E5B9)
SECOND = tl.constexpr(0x94D049BB133111EB)
TO_UNIT = tl.constexpr(2.0**-52)


@triton.jit
def _mix(state, key):
    """Return the state of the hash after one more key; both are uint64."""
    state = (state ^ key) + GOLDEN
    state = (state ^ (state >> 30)) * FIRST
    state = (state ^ (state >> 27)) * SECOND
    return state ^ (state >> 31)


@triton.jit(do_not_specialize=["width"])
def _choose_slice(logits, keys, parts, stride, vocabulary, width, SLICE: tl.constexpr, DRAWN: tl.constexpr):
    """Reduce one slice of one row: largest score and its lowest id; largest logit and sum of exponentials.

    The score is the logit, or if it is DRAWN, logit/T plus noise. `width`: rows that share a temperature and a seed.
    """
    temperatures, seeds, positions = keys
    scores, places, peaks, masses = parts
    row = tl.program_id(0).to(tl.int64)  # rows × vocabulary may exceed 2³¹
    index = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    x = tl.load(logits + row * stride + index, mask=index < vocabulary, other=float("-inf")).to(tl.float32)
    peak = tl.max(x, 0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    if DRAWN:
        state = _mix(tl.zeros([], tl.uint64), tl.load(seeds + row // width).to(tl.uint64))
        state = _mix(state, tl.load(positions + row).to(tl.uint64))
        bits = _mix(state, index.to(tl.uint64))
        uniform = ((bits >> 12).to(tl.float64) + 0.5) * TO_UNIT
        noise = -tl.log(-tl.log(uniform))
        temperature = tl.load(temperatures + row // width)
        hot = temperature > 0
        score = x.to(tl.float64) / tl.where(hot, temperature, 1.0) + tl.where(hot, noise, 0.0)
        best = tl.max(score, 0)
        tl.store(scores + at, best)
    else:
        score, best = x, peak
    anchor = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    tl.store(places + at, tl.min(tl.where(score == best, index, vocabulary), 0))
    tl.store(peaks + at, peak)
    tl.store(masses + at, tl.sum(tl.exp(x - anchor), 0))


@triton.jit
def _choose_row(parts, results, slices, vocabulary, SLICES: tl.constexpr):
    """Reduce the slices of one row. Slices of −∞ only have mass 0; with NaN, the chosen id is still in range."""
    scores, places, peaks, masses = parts
    choice, largest, logsumexp = results
    row = tl.program_id(0).to(tl.int64)
    index = tl.arange(0, SLICES)
    at = row * slices + index
    score = tl.load(scores + at, mask=index < slices, other=float("-inf"))
    place = tl.load(places + at, mask=index < slices, other=vocabulary)
    lowest = tl.min(tl.where(score == tl.max(score, 0), place, vocabulary), 0)
    tl.store(choice + row, tl.minimum(lowest, vocabulary - 1).to(tl.int64))
    peak = tl.load(peaks + at, mask=index < slices, other=float("-inf"))
    mass = tl.load(masses + at, mask=index < slices, other=0.0)
    highest = tl.max(peak, 0)
    anchor = tl.where(tl.abs(highest) == float("inf"), 0.0, highest)
    own = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    mass = tl.sum(tl.where(peak == float("-inf"), mass, mass * tl.exp(own - anchor)), 0)
    tl.store(largest + row, highest)
    tl.store(logsumexp + row, anchor + tl.log(mass))


def choose_logsumexp(
    logits: Tensor, temperature: Tensor | None, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return choice, maximum and logsumexp; see `kernels.choose_logsumexp`. The first kernel reads the logits, once."""
    shape, vocabulary = logits.shape[:-1], logits.shape[-1]
    flat = logits.reshape(-1, vocabulary)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    drawn = temperature is not None
    rows, slices = len(flat), triton.cdiv(vocabulary, SLICE)
    places = flat.new_empty(rows, slices, dtype=torch.int32)
    peaks, masses = (flat.new_empty(rows, slices, dtype=torch.float32) for _ in range(2))
    scores = flat.new_empty(rows, slices, dtype=torch.float64) if drawn else peaks
    choice = flat.new_empty(shape, dtype=torch.int64)
    largest, logsumexp = (flat.new_empty(shape, dtype=torch.float32) for _ in range(2))
    keys: tuple[Tensor | None, ...] = (None, None, None)
    if temperature is not None:
        keys = temperature.contiguous(), seed.contiguous(), position.contiguous()
    if rows:
        parts, results = (scores, places, peaks, masses), (choice, largest, logsumexp)
        arguments = (flat, keys, parts, flat.stride(0), vocabulary, shape[-1])
        _choose_slice[rows, slices](*arguments, SLICE=SLICE, DRAWN=drawn, num_warps=4)
        _choose_row[(rows,)](parts, results, slices, vocabulary, SLICES=triton.next_power_of_2(slices), num_warps=4)
    return choice, largest, logsumexp

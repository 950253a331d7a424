"""A case of each operation: random inputs, and what its definition makes of them in float64.

The definitions in PyTorch do not show what a compiler, a driver and a GPU make of a kernel. `mtbench doctor` and
benchmarks/gpu.py run these cases on the device.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtbench import kernels
from mtbench.kernels import PLAIN, Norm, NormInput, Operations

EPS = 1e-6
PRECISION = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative errors that rounding makes
SLOTS = 40  # of a row in which slots are moved
WIDTH = 7  # positions of a row that drafts, as in a verification

Tensors = tuple[Tensor, ...]


class Sizes(NamedTuple):
    """Sizes of a layer. No tile divides `inner` of the default ones, neither as outputs nor as inputs of a product."""

    hidden: int = 2048
    inner: int = 5600
    heads: int = 16
    key_heads: int = 4
    head: int = 128
    slots: int = 300
    vocabulary: int = 20_000


SIZES, SMALL = Sizes(), Sizes(256, 420, 4, 2, 64, 100, 1000)


class Case(NamedTuple):
    """An operation on some inputs. A CUDA graph can capture `call` after a first call has compiled the kernel."""

    name: str
    call: Callable[[], Tensors]
    expected: Tensors  # float64

    def error(self) -> float:
        """Return the largest relative error of a result; NaN if one has a NaN."""
        pairs = zip(self.call(), self.expected, strict=True)
        return float(torch.stack([(found.double() - wide).norm() / wide.norm() for found, wide in pairs]).max())


class Noise:
    """Random tensors of one type on one device, the same in each process."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self.generator = torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def integers(self, low: int, high: int, count: int) -> Tensor:
        """Return random numbers from `low` to below `high`, (count,) int64."""
        return torch.randint(low, high, (count,), generator=self.generator, device=self.device)


def cases(run: Operations, noise: Noise, count: int, sizes: Sizes = SIZES) -> list[Case]:
    """Return a case of each operation over `count` positions. `run`: the operations of a layer, to be checked."""
    found = []
    for name, operation, *inputs in _inputs(noise, count, sizes):
        wide = tuple(t.double().to(noise.device) for t in operation(PLAIN, *map(_wide, inputs)))
        found.append(Case(f"{name} {count}", partial(operation, run, *inputs), wide))
    return found + _moves(noise, count, sizes)


def _inputs(noise: Noise, count: int, sizes: Sizes) -> Iterator[Any]:
    """Yield name, operation and inputs of each case."""
    hidden, inner, heads, key_heads, head, slots, vocabulary = sizes
    all_heads, tiles, device = (heads + 2 * key_heads) * head, hidden // 128, noise.device

    def weight(outputs: int, inputs: int) -> Tensor:
        return noise(outputs, inputs) / math.sqrt(inputs)

    norm, following = (Norm.make(noise(hidden), EPS) for _ in range(2))
    ids, table = noise.integers(0, 64, count), noise(64, hidden)
    x, entering = PLAIN.embed(ids, table, norm)
    in_parts = NormInput(entering.weighted, entering.squares.repeat(tiles, 1) / tiles)
    yield "embed", _of("embed"), ids, table, norm
    yield "norm_product", _of("norm_product"), entering, norm, weight(all_heads, hidden), noise(all_heads)
    yield "norm_swiglu", _of("norm_swiglu"), in_parts, norm, weight(2 * inner, hidden)
    yield "add_product", _add_product, x, noise(count, inner), weight(hidden, inner), following
    tables = noise(slots, 1, head), noise(slots, 1, head)
    stores = noise(2 * count, key_heads, head), noise(2 * count, key_heads, head)
    places = noise.integers(0, slots, count), 2 * torch.arange(count, device=device)
    for name, norms in (("rotate", (None, None)), ("rotate, norms", (noise(head), noise(head)))):
        yield name, _rotate, stores, noise(count, all_heads), places, tables, norms
    for width in (1, WIDTH):
        yield f"attend ×{width}", _of("attend"), *_attention(noise, -(-count // width), width, sizes), head**-0.5
    yield "linear", _of("linear"), noise(count, hidden), weight(hidden, hidden)
    yield "norm", _of("norm"), noise(count, hidden), noise(hidden), EPS
    seeds, token = noise.integers(0, 1 << 40, count), torch.arange(vocabulary, device=device)
    logits = ((token * 7919 + seeds[:, None]) % vocabulary)[:, None] / 1000  # all different: no choice is a tie
    temperature = torch.full((count,), 0.7, dtype=torch.double, device=device)
    yield "greedy", _of("choose_logsumexp"), logits, None, seeds, seeds[:, None] % 999
    yield "sampled", _of("choose_logsumexp"), logits, temperature, seeds, seeds[:, None] % 999


def _attention(noise: Noise, rows: int, width: int, sizes: Sizes) -> Tensors:
    """Return query, keys, values, mask and lengths of rows whose last positions are fed."""
    query = noise(rows, width, sizes.heads, sizes.head).transpose(1, 2)
    key, value = (noise(rows, sizes.slots, sizes.key_heads, sizes.head).transpose(1, 2) for _ in range(2))
    length = noise.integers(sizes.slots // 2, sizes.slots, rows)
    last = length[:, None] - width + torch.arange(width, device=noise.device)
    return query, key, value, torch.arange(sizes.slots, device=noise.device) <= last[:, :, None], length


def _moves(noise: Noise, count: int, sizes: Sizes) -> list[Case]:
    """Return the case of slots that are moved; none where PyTorch moves them."""
    before = [noise(count * SLOTS, sizes.key_heads, sizes.head) for _ in range(2)]
    stores, expected = [store.clone() for store in before], [store.double() for store in before]
    if (mover := kernels.slot_mover(stores)) is None:
        return []
    target = 5 + torch.arange(WIDTH, device=noise.device).repeat(count, 1)
    source = target + torch.arange(WIDTH, device=noise.device)
    first = SLOTS * torch.arange(count, device=noise.device)[:, None]
    for store, original in zip(expected, before, strict=True):
        store[first + target] = original[first + source].double()

    def call() -> Tensors:
        for store, original in zip(stores, before, strict=True):
            store.copy_(original)
        mover(source, target, SLOTS)
        return tuple(stores)

    return [Case(f"move {count}", call, tuple(expected))]


# --- The operations, as functions that change no input --------------------------------------------------------------


def _of(name: str) -> Callable[..., Tensors]:
    """Return an operation of a layer, or another one of `mtbench.kernels`, as a function of `Operations` and inputs."""
    return lambda run, *inputs: _flat((getattr(run, name, None) or getattr(kernels, name))(*inputs))


def _add_product(run: Operations, residual: Tensor, x: Tensor, weight: Tensor, norm: Norm) -> Tensors:
    residual = residual.clone()
    return _flat((residual, run.add_product(residual, x, weight, None, norm)))


def _rotate(run: Operations, stores: Tensors, qkv: Tensor, places: Tensors, tables: Tensors, norms: Any) -> Tensors:
    positions, index = places
    keys, values = (store.clone() for store in stores)
    return run.rotate(qkv, positions, *tables, keys, values, index, *norms, EPS), keys, values


def _flat(results: Any) -> Tensors:
    """Return the tensors of an operation's results; of sums of squares in parts, the whole sums."""
    if isinstance(results, NormInput):
        return results.weighted, results.squares.sum(0)
    return (results,) if isinstance(results, Tensor) else tuple(t for result in results for t in _flat(result))


def _wide(value: Any) -> Any:
    """Return the value with its floating-point tensors in float64."""
    if isinstance(value, Norm | NormInput):
        return type(value)(*map(_wide, value))
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

"""A case of each operation: random inputs, and the result of its definition in float64.

The definitions in PyTorch do not show a kernel's result with a compiler, a driver and a GPU. `mtbench doctor` and
benchmarks/gpu.py run these cases on the device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtbench import kernels
from mtbench.kernels import Norm

EPS = 1e-6
PRECISION = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}  # relative errors that rounding makes
SLOTS = 40  # of a row in which slots are moved
WIDTH = 7  # positions of a row that drafts, as in a verification

Tensors = tuple[Tensor, ...]


class Sizes(NamedTuple):
    """Sizes of a layer. No block of a kernel divides `inner` of the default ones."""

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
    once: Callable[[], object]  # the operation alone, which writes its inputs: to be timed after `call`

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


def cases(noise: Noise, count: int, sizes: Sizes = SIZES) -> list[Case]:
    """Return a case of each operation over `count` positions, as it runs for tensors of this type and device."""
    found = []
    for name, operation, written, *inputs in _inputs(noise, count, sizes):
        call = partial(_results, operation, written, inputs)
        with kernels.plain():
            expected = tuple(t.double() for t in _results(operation, written, _wide(inputs)))
        found.append(Case(f"{name} {count}", call, expected, partial(operation, *inputs)))
    return found + _moves(noise, count, sizes)


def _results(operation: Callable[..., Tensor | Tensors], written: Sequence[int], inputs: Sequence[Any]) -> Tensors:
    """Return an operation's result, and the inputs (by number) that it writes, which are copied before."""
    own = [_copied(value) if number in written else value for number, value in enumerate(inputs)]
    results = [operation(*own), *(own[number] for number in written)]
    return tuple(t for result in results for t in ((result,) if isinstance(result, Tensor) else result))


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else tuple(t.clone() for t in value)


def _inputs(noise: Noise, count: int, sizes: Sizes) -> Iterator[Any]:
    """Yield each case: its name, the operation, the numbers of the inputs that it writes, and the inputs."""
    hidden, inner, heads, key_heads, head, _, vocabulary = sizes
    ids, norm = noise.integers(0, 64, count), Norm(noise(hidden), EPS)
    large = 300.0  # squares that are beyond the range of float16
    yield "embed", kernels.embed, (), large * noise(64, hidden), ids, norm
    yield "norm", kernels.norm, (), large * noise(count, hidden), norm
    yield "add_norm", kernels.add_norm, (0,), large * noise(count, hidden), noise(count, hidden), norm
    yield "swiglu", kernels.swiglu, (), noise(count, 2 * inner)
    angles = noise(count, 1, head), noise(count, 1, head)
    stores = noise(2 * count, key_heads, head), noise(2 * count, key_heads, head)
    index = 2 * torch.arange(count, device=noise.device)
    for name, norms in (("rotate", None), ("rotate, norms", (Norm(noise(head), EPS), Norm(noise(head), EPS)))):
        qkv = noise(count, (heads + 2 * key_heads) * head)
        yield name, kernels.rotate, (2,), qkv, angles, stores, index, norms
    for width in (1, WIDTH):
        yield f"attend ×{width}", kernels.attend, (), *_attention(noise, -(-count // width), width, sizes), head**-0.5
    weight = noise(hidden, inner) / math.sqrt(inner)
    yield "linear", kernels.linear, (), noise(count, inner), weight, noise(hidden)
    seeds, token = noise.integers(0, 1 << 40, count), torch.arange(vocabulary, device=noise.device)
    logits = ((token * 7919 + seeds[:, None]) % vocabulary)[:, None] / 1000  # all different: no choice is a tie
    temperature = torch.full((count,), 0.7, dtype=torch.double, device=noise.device)
    yield "greedy", kernels.choose_logsumexp, (), logits, None, seeds, seeds[:, None] % 999
    yield "sampled", kernels.choose_logsumexp, (), logits, temperature, seeds, seeds[:, None] % 999


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

    return [Case(f"move {count}", call, tuple(expected), partial(mover, source, target, SLOTS))]


def _wide(value: Any) -> Any:
    """Return the value with its floating-point tensors in float64."""
    if isinstance(value, Norm):
        return Norm(_wide(value.weight), value.eps)
    if isinstance(value, list | tuple):
        return tuple(map(_wide, value))
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

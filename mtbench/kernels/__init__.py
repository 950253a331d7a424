"""The operations between the products of a forward pass, attention, the choice of tokens; a batch-invariant product.

Each has two versions. The one here, in PyTorch, is its definition: it runs on a CPU, for float64, and where our kernels
are off. On a GPU the Triton kernel of the same name runs in its place (`mtbench.kernels.triton_kernels`). Kernels do
not synchronise, so a CUDA graph can record them after a first call has compiled them. They are batch-invariant: a row's
result does not depend on the other rows, bit by bit. Products are `torch.nn.functional.linear`, except in the engine
`invariant`.

A new one is a function with `@operation` here, a launcher of its name in triton_kernels.py, a case in
mtbench/doctor/cases.py, and a launch in tests/kernels/test_kernels.py, which compiles it for three GPUs.

R = rows, W = positions fed, N = R·W, V = slots in view, H = query heads, K = key heads, d = head size, C = hidden size.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.nn.functional import linear as _product
from torch.nn.functional import scaled_dot_product_attention, silu

from mtbench import sampling
from mtbench.errors import UserError, first_line, loses_device

Operation = TypeVar("Operation", bound=Callable[..., Any])
Pair = tuple[Tensor, Tensor]


class Norm(NamedTuple):
    """An RMS norm."""

    weight: Tensor  # (C,)
    eps: float


SWITCH = "MTBENCH_KERNELS"  # an environment variable; `off`: none of our kernels runs


def _switched_off() -> list[str]:
    """Return why the environment switches our kernels off; empty where it does not. Raises UserError."""
    value = os.environ.get(SWITCH) or "on"
    if value not in ("on", "off"):
        raise UserError(f"{SWITCH}={value!r} is not allowed; set this environment variable to on or off, or unset it.")
    return [] if value == "on" else [f"{SWITCH}=off"]


_off = _switched_off()


def off() -> str | None:
    """Return why none of our kernels runs in this process, and PyTorch's do instead; None: nothing forbids them."""
    return _off[0] if _off else None


def switch_off(reason: str) -> None:
    """Run none of our kernels from now on. Graphs that were captured before still do."""
    _off.append(reason)


def refuse_lost_device(error: Exception) -> None:
    """Raise UserError if an error of a kernel leaves the GPU unable to compute anything more."""
    if loses_device(error):
        raise UserError(
            f"a kernel of mtbench has crashed the GPU ({first_line(error)}); set the environment variable {SWITCH}=off "
            "to decode without them."
        ) from error


@contextmanager
def plain() -> Iterator[None]:
    """Disable mtbench's kernels inside this context."""
    switch_off("PyTorch's are wanted")
    try:
        yield
    finally:
        _off.pop()


@contextmanager
def restored() -> Iterator[None]:
    """Let our kernels run again afterwards if what happens meanwhile switches them off."""
    before = len(_off)
    try:
        yield
    finally:
        del _off[before:]


def notes(off: str | None) -> list[str]:
    """Return a line if our kernels are off. None: they are not."""
    return [f"mtbench's kernels do not run, and PyTorch's do: {off}"] if off else []


def _triton() -> ModuleType | None:
    """Return the module of the kernels; None without Triton, or while they are off."""
    return None if _off else _triton_kernels()


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        from mtbench.kernels import triton_kernels
    except ImportError:  # Windows, or a PyTorch build without Triton
        return None
    return triton_kernels


def ours(x: Tensor) -> bool:
    """Return whether our kernels run for tensors such as `x`."""
    return x.is_cuda and x.dtype != torch.float64 and _triton() is not None


OPERATIONS: dict[str, Callable[..., Any]] = {}  # their definitions, by name


def operation(definition: Operation) -> Operation:
    """Return a function that runs the kernel of its name in place of its definition, for tensors of which ours run."""

    OPERATIONS[definition.__name__] = definition

    @wraps(definition)
    def run(x: Tensor, *arguments: Any) -> Any:
        return (getattr(_triton(), definition.__name__) if ours(x) else definition)(x, *arguments)

    return cast("Operation", run)


def slot_mover(stores: Sequence[Tensor]) -> Callable[[Tensor, Tensor, int], None] | None:
    """Return a function that copies slots in tensors of one shape (positions, K, d) by one kernel; None without Triton.

    It takes the slots to copy from and to, (R, D) each, and the slots of a row. A captured graph may hold it as long as
    the tensors stay. Making it waits for the device.
    """
    triton = _triton() if stores and ours(stores[0]) else None
    if triton is None or len({store.shape for store in stores}) > 1:
        return None
    return partial(triton.move, triton.addresses(stores), stores[0])


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    length: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return attention of rows of different lengths over a KV cache, (R, W, H, d), contiguous. For a GPU.

    `query` (R, H, W, d), `key` and `value` (R, K, V, d), any strides. Query w of row r attends to slot v if
    `mask[r, w, v]` (R, W, V) bool and v < `length[r]` (R,) int64; slots from `length[r]` on are not read. A query that
    attends to no slot gets zeros. `softcap` is applied to the scores before the mask (Gemma 2).

    The kernels take float16, bfloat16 and float32 (without TF32), even head sizes from 16 to 256, and sum in float32.
    They are batch-invariant: a query's result is the same bit by bit for every R, W and V, at every index,
    whatever the other rows hold. Blocks of keys have a fixed length and are combined in one fixed tree,
    and the rows of a tile are independent. This assumes that the matrix unit treats all rows of a tile alike.
    Masks load fastest if V is a multiple of 16. Other inputs go to `attend_plain`, which is not batch-invariant.
    """
    triton = _triton() if ours(query) else None
    if triton is not None and triton.attends(query, key, value):
        out: Tensor = triton.attend(query, key, value, mask, length, scale, softcap)
        return out
    mask = mask & (torch.arange(mask.shape[-1], device=mask.device) < length[:, None, None])
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
    bias = bias.repeat(1, query.shape[1] // key.shape[1], 1)[:, None]
    out = attend_plain(query, key, value, bias, scale, softcap)
    return out.masked_fill(~mask.any(-1)[:, :, None, None], 0).contiguous()


def attend_plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return attention with `bias` (R, 1, H/K·W, V) added to the scores, (R, W, H, d), not contiguous.

    A `bias` of None adds nothing; a `scale` of None is d^-½. The H/K query heads that share a key head are folded into
    the query axis, so keys are never expanded.
    """
    rows, heads, width, size = query.shape
    query = query.reshape(rows, key.shape[1], heads // key.shape[1] * width, size)
    if softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    else:  # the fused kernel has no softcap
        scores = query @ key.transpose(2, 3) * (size**-0.5 if scale is None else scale)
        scores = torch.tanh(scores / softcap) * softcap
        out = (scores if bias is None else scores + bias).softmax(-1) @ value
    return out.reshape(rows, heads, width, -1).transpose(1, 2)


@operation
def choose_logsumexp(
    logits: Tensor, temperature: Tensor | None, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return choice, maximum and logsumexp of logits (R, n, vocabulary): (R, n) int64, float32, float32.

    With a `temperature` (R,), the choice is the argmax of `sampling.sampled`, by `seed` (R,) and `position` (R, n): a
    sample from softmax(logits/T). Of equal scores the lowest id is chosen; PyTorch on a GPU does not guarantee that.
    Suppressed ids have logit −∞; a row of −∞ only gives id 0, −∞ and −∞. The kernels read the logits once and store
    neither noise nor probabilities.
    """
    scores = logits if temperature is None else sampling.sampled(logits, temperature, seed, position)
    return scores.argmax(-1), logits.amax(-1).float(), logits.float().logsumexp(-1)


@operation
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the batch-invariant product of `x` (…, I) and `weight` (O, I), plus `bias` (O,): (…, O) in x's type.

    Libraries choose their kernel by the number of rows, so the same row differs between batch sizes
    (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference). In the kernel one program computes a
    whole sum in float32, in the same order at every number of rows. It is slower than the library's product.
    """
    # Row by row, each copied first: a library may choose its kernel by memory alignment.
    rows = [_product(row.clone(), weight, bias) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).view(*x.shape[:-1], -1) if rows else x.new_empty(*x.shape[:-1], len(weight))


@operation
def norm(x: Tensor, by: Norm) -> Tensor:
    """Return the RMS norm of `x` (…, C), rounded before the weight as in transformers; in float32 at least."""
    wide = x if x.dtype == torch.float64 else x.float()
    return by.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + by.eps)).to(x.dtype)


@operation
def embed(table: Tensor, ids: Tensor, by: Norm) -> tuple[Tensor, Tensor]:
    """Return the embeddings of ids (N,), and their norm: (N, C) each. `table` (…, C)."""
    x = table[ids]
    return x, norm(x, by)


@operation
def add_norm(x: Tensor, added: Tensor, by: Norm) -> Tensor:
    """Add `added` to `x` in place, (N, C) each; return the norm of the sum, which is rounded first."""
    return norm(x.add_(added), by)


@operation
def swiglu(both: Tensor) -> Tensor:
    """Return silu(gate)·up, (N, F), of gate and up concatenated, (N, 2·F). F: size of the MLP's inner layer."""
    gate, up = both.chunk(2, -1)
    return silu(gate) * up


@operation
def rotate(qkv: Tensor, angles: Pair, stores: Pair, index: Tensor, norms: tuple[Norm, Norm] | None = None) -> Tensor:
    """Return queries (N, H, d) of `qkv` (N, (H + 2K)·d) with rotary embedding; write keys and values to the cache.

    With `norms`, each head of queries and keys is normalised first. `angles`: cosines and sines (N, 1, d) of each
    position; the first half of the sines is negated, which gives the rotation its sign. `index` (N,) are places in the
    storage of keys and values (S, K, d). The definition rounds after each operation, as transformers does, and the
    kernel once.
    """
    (cos, sin), (keys, values) = angles, stores
    key_heads, size = keys.shape[1:]
    qkv = qkv.view(len(qkv), -1, size)
    both = qkv.shape[1] - key_heads
    heads, rotated = both - key_heads, qkv[:, :both]
    if norms is not None:
        rotated = torch.cat((norm(rotated[:, :heads], norms[0]), norm(rotated[:, heads:], norms[1])), 1)
    rotated = rotated * cos + rotated.roll(size // 2, -1) * sin
    keys.index_copy_(0, index, rotated[:, heads:])
    values.index_copy_(0, index, qkv[:, both:])
    return rotated[:, :heads]

"""The operations that decide a forward pass's speed and batch invariance: attention, matrix products, norms, argmax.

`Operations` are those of a decoder layer over few positions: norm and product, SwiGLU, residual, rotary embedding.

Batch-invariant: a row's result does not depend on the other rows, bit by bit. Each operation has two versions:
`…_plain` in PyTorch is its definition, the reference in tests, and runs on a CPU; on a GPU with Triton the kernels of
`mtbench.kernels.triton_kernels` run. They do not synchronise, so a CUDA graph can record them after a first call has
compiled them.

An RMS norm before a product is applied in two parts: its weight before the product, the root mean square after it. With
W the product's weight, g the norm's and r = (mean x² + eps)^-½ of a row, W·(r·x∘g) = r·W·(x∘g). What computes x also
stores x∘g, rounded to x's type, and sums of x²; the product multiplies its sums by r. transformers rounds x·r, and then
its product with g; here one rounding is left.

R = rows, W = positions fed, N = R·W, V = slots in view, H = query heads, K = key heads, d = head size, C = hidden size.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import ModuleType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn.functional import linear as _product
from torch.nn.functional import scaled_dot_product_attention, silu

from mtbench import sampling
from mtbench.errors import UserError

Result = TypeVar("Result")


class Norm(NamedTuple):
    """An RMS norm. `power`: a power of two above the magnitudes of its weight."""

    weight: Tensor  # (C,)
    eps: float
    power: float

    @staticmethod
    def make(weight: Tensor, eps: float) -> "Norm":
        """Return the norm of a weight, after reading the weight's largest magnitude."""
        return Norm(weight, eps, 2.0 ** math.frexp(float(weight.detach().abs().max()))[1])


class NormInput(NamedTuple):
    """A row x on its way through a norm into a product."""

    weighted: Tensor  # (N, C): x∘g / power. |g| < power, so it is in range where x is, also in float16
    squares: Tensor  # (parts, N), at least float32: sums of x² over parts of C, added in order


class Operations(NamedTuple):
    """The operations of a decoder layer over few positions, each a kernel on a GPU. `…_plain` defines each of them."""

    embed: Callable[..., tuple[Tensor, NormInput]]
    norm_product: Callable[..., Tensor]
    norm_swiglu: Callable[..., Tensor]
    add_product: Callable[..., NormInput]
    rotate: Callable[..., Tensor]
    attend: Callable[..., Tensor]


SWITCH = "MTBENCH_KERNELS"  # an environment variable; `off`: none of our kernels runs
DEPENDENT_SWITCH = "MTBENCH_DEPENDENT_LAUNCH"  # another one; `off`: no kernel starts before its predecessor ends


def _switched_off(name: str) -> list[str]:
    """Return why an environment variable switches something off; empty where it does not. Raises UserError."""
    value = os.environ.get(name) or "on"
    if value not in ("on", "off"):
        raise UserError(f"{name}={value!r} is not allowed; set this environment variable to on or off, or unset it.")
    return [] if value == "on" else [f"{name}=off"]


_off, _dependent_off = _switched_off(SWITCH), _switched_off(DEPENDENT_SWITCH)


def off() -> str | None:
    """Return why none of our kernels runs in this process, and PyTorch's do instead; None: nothing forbids them."""
    return _off[0] if _off else None


def switch_off(reason: str) -> None:
    """Run none of our kernels from now on, as far as nothing holds them: `Operations`, captured graphs."""
    _off.append(reason)


@contextmanager
def plain() -> Iterator[None]:
    """Run none of our kernels meanwhile."""
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


def dependent_launch_off() -> str | None:
    """Return why no kernel starts before its predecessor ends in this process; None: nothing forbids it."""
    return _dependent_off[0] if _dependent_off else None


@contextmanager
def without_dependent_launch() -> Iterator[None]:
    """Launch our kernels meanwhile so that none starts before its predecessor ends."""
    _dependent_off.append("it is not wanted")
    try:
        yield
    finally:
        _dependent_off.pop()


def dependent_launch(device: torch.device) -> bool:
    """Return whether our kernels start before their predecessors end (programmatic dependent launch, Hopper)."""
    return not _dependent_off and _starts_early(device)


@cache
def _starts_early(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def notes(off: str | None, dependent_launch_off: str | None) -> list[str]:
    """Return a line for each thing that is off: our kernels, and their dependent launch. None: it is not."""
    found = [f"mtbench's kernels do not run, and PyTorch's do: {off}"] if off else []
    if dependent_launch_off:
        found.append(f"no kernel starts before its predecessor ends: {dependent_launch_off}")
    return found


def _triton() -> ModuleType | None:
    """Return the module of the kernels; None without Triton, and while operations are recorded, which launches are not.

    (mtbench/decoding/cuda_graph.py records the hooks of methods.)
    """
    return None if _off or get_proxy_mode() is not None else _triton_kernels()


@cache
def _triton_kernels() -> ModuleType | None:
    try:
        from mtbench.kernels import triton_kernels
    except ImportError:  # Windows, or a PyTorch build without Triton
        return None
    return triton_kernels


def _of(plain: Callable[..., Result], name: str, x: Tensor) -> Callable[..., Result]:
    """Return the kernel of this name for tensors such as `x`; where none runs, the plain version."""
    triton = _triton() if x.is_cuda and x.dtype != torch.float64 else None
    kernel: Callable[..., Result] = plain if triton is None else getattr(triton, name)
    return kernel


def slot_mover(stores: Sequence[Tensor]) -> Callable[[Tensor, Tensor, int], None] | None:
    """Return a function that copies slots in tensors of one shape (positions, K, d) by one kernel; None without Triton.

    It takes the slots to copy from and to, (R, D) each, and the slots of a row. A captured graph may hold it as long as
    the tensors stay. Making it waits for the device.
    """
    triton = _triton() if stores and stores[0].is_cuda else None
    if triton is None or len({store.shape for store in stores}) > 1:
        return None
    return partial(triton.move, triton.addresses(stores), stores[0])


def compilations() -> int:
    """Return how many variants of our Triton kernels this process has compiled, or loaded compiled, so far."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{__package__}.triton_")]
    functions = {id(function): function for module in modules for function in vars(module).values()}
    caches = [getattr(function, "device_caches", {}) for function in functions.values()]
    return sum(len(compiled) for cache in caches for compiled, *_ in cache.values())


def at_rest() -> bool:
    """Return whether the counters of all products are zero, as between two kernels. Waits for the device."""
    counters: dict[Any, Tensor] = getattr(sys.modules.get(f"{__package__}.triton_device"), "counters", {})
    return not any(bool(counter.any()) for counter in counters.values())


def operations(like: Tensor, size: int) -> Operations | None:
    """Return the kernels for weights such as `like` and this head size; None if they do not support them."""
    triton = _triton() if like.is_cuda else None
    if triton is None or not triton.attends(*[like.new_empty(0, 0, 0, size)] * 3):
        return None
    return Operations(*(getattr(triton, name) for name in Operations._fields))


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
    triton = _triton() if query.is_cuda else None
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


def choose_logsumexp(
    logits: Tensor, temperature: Tensor | None, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return choice, maximum and logsumexp of logits (R, n, V): (R, n) int64, float32, float32.

    With a `temperature` (R,), the choice is the argmax of `sampling.sampled`, by `seed` (R,) and `position` (R, n): a
    sample from softmax(logits/T). It is the lowest id of equal scores. Suppressed ids have logit −∞; a row of −∞ only
    gives id 0, −∞ and −∞. The kernels read the logits once and store neither noise nor probabilities.
    """
    return _of(choose_logsumexp_plain, "choose_logsumexp", logits)(logits, temperature, seed, position)


def choose_logsumexp_plain(
    logits: Tensor, temperature: Tensor | None, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same as `choose_logsumexp` on a CPU; on other devices, `argmax` may return any of equal scores."""
    scores = logits if temperature is None else sampling.sampled(logits, temperature, seed, position)
    return scores.argmax(-1), logits.amax(-1).float(), logits.float().logsumexp(-1)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Return the batch-invariant product of `x` (…, I) and `weight` (O, I): (…, O) in x's type.

    Libraries choose their kernel by the number of rows, so the same row differs between batch sizes
    (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference). Here a sum has the same parts in
    the same order at every number of rows: they depend only on the weight's shape and the GPU. Sums are in float32.
    """
    return _of(linear_plain, "linear", x)(x, weight)


def linear_plain(x: Tensor, weight: Tensor) -> Tensor:
    """Return the product row by row. Each row is copied first: a library may choose its kernel by memory alignment."""
    rows = [_product(row.clone(), weight) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).view(*x.shape[:-1], -1) if rows else x.new_empty(*x.shape[:-1], len(weight))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the batch-invariant RMS norm of `x` (…, C) with `weight` (C,).

    A library's kernel may split a row's sum depending on the number of rows.
    """
    return _of(norm_plain, "norm", x)(x, weight, eps)


def norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm, computed in float32 and rounded to x's type before the weight, as in transformers."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def embed_plain(ids: Tensor, embedding: Tensor, norm: Norm) -> tuple[Tensor, NormInput]:
    """Return the embeddings (N, C) of ids (N,), and the input of the first norm."""
    x = embedding[ids]
    return x, _norm_input(x, norm)


def norm_product_plain(x: NormInput, norm: Norm, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the product of a normalised input and `weight` (O, C), plus `bias` (O,): (N, O)."""
    out = _normalised(x, norm, weight)
    return (out if bias is None else out + bias).to(weight.dtype)


def norm_swiglu_plain(x: NormInput, norm: Norm, weight: Tensor) -> Tensor:
    """Return silu(gate)·up of the two halves of the product of a normalised input and `weight` (2·F, C): (N, F)."""
    gate, up = _normalised(x, norm, weight).chunk(2, -1)
    return (silu(gate) * up).to(weight.dtype)


def add_product_plain(residual: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> NormInput:
    """Add the product of `x` (N, I) and `weight` (C, I), plus `bias`, to `residual` (N, C) in place.

    Return the next norm's input, of the rounded residual.
    """
    wide = _wide(residual) + _product(_wide(x), _wide(weight), None if bias is None else _wide(bias))
    residual.copy_(wide)
    return _norm_input(residual, norm)


def rotate_plain(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Return queries (N, H, d) of `qkv` (N, (H + 2K)·d) with rotary embedding; write keys and values to the cache.

    With `query_norm` and `key_norm` (d,), each head of queries and keys is normalised first. `positions` (N,) are rows
    of the tables `cos` and `sin` (P, 1, d); the first half of `sin` is negated, which gives the rotation its sign.
    `index` (N,) are places in the storage `keys` and `values` (S, K, d). Rounds once.
    """
    key_heads, size = keys.shape[1:]
    query, key, value = qkv.unflatten(-1, (-1, size)).split([qkv.shape[1] // size - 2 * key_heads, *[key_heads] * 2], 1)
    query, key = _wide(query), _wide(key)
    if query_norm is not None and key_norm is not None:
        query = query * torch.rsqrt(query.pow(2).mean(-1, keepdim=True) + eps) * query_norm
        key = key * torch.rsqrt(key.pow(2).mean(-1, keepdim=True) + eps) * key_norm
    query, key = (t * cos[positions] + t.roll(size // 2, -1) * sin[positions] for t in (query, key))
    keys.index_copy_(0, index, key.to(keys.dtype))
    values.index_copy_(0, index, value)
    return query.to(qkv.dtype)


def _wide(x: Tensor) -> Tensor:
    """Return the tensor in float32 at least."""
    return x if x.dtype == torch.float64 else x.float()


def _norm_input(x: Tensor, norm: Norm) -> NormInput:
    wide = _wide(x)
    return NormInput((wide * (norm.weight / norm.power)).to(x.dtype), wide.pow(2).sum(-1)[None])


def _normalised(x: NormInput, norm: Norm, weight: Tensor) -> Tensor:
    """Return the product of a normalised input and a weight, in float32 at least."""
    factor = torch.rsqrt(x.squares.sum(0) / x.weighted.shape[1] + norm.eps) * norm.power
    return _product(_wide(x.weighted), _wide(weight)) * factor[:, None]


PLAIN = Operations(embed_plain, norm_product_plain, norm_swiglu_plain, add_product_plain, rotate_plain, attend)

"""The operations that decide how fast a forward is, and whether it is the same in any company: attention over a cache,
the verdict on logits, products, norms.

Each stands here twice: `…_plain` in PyTorch is its definition, what tests compare with and what a CPU runs; on a GPU
with Triton the kernels of `mtbench.models.triton_kernels` take over. They neither wait for the GPU nor for the host,
so a CUDA graph can record them once a first call has compiled them.

R = rows, W = positions fed, V = slots in view, H = query heads, K = key heads, d = head size.
"""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor
from torch.nn.functional import linear as product
from torch.nn.functional import scaled_dot_product_attention


@cache
def _triton() -> ModuleType | None:
    try:
        from mtbench.models import triton_kernels
    except ImportError:  # Windows, or a PyTorch without it
        return None
    return triton_kernels


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    length: Tensor,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attention of ragged rows over a cache, for a GPU: `query` (R, H, W, d), `key`, `value` (R, K, V, d), any strides.

    Query w of row r sees slot v where `mask[r, w, v]` (R, W, V) bool and v < `length[r]` (R,) int64; keys from there
    on are not read. A query that sees nothing gets zeros. `softcap` squashes scores before the mask (Gemma 2).
    Result (R, W, H, d), contiguous.

    Kernels: float16, bfloat16 and float32 (without TF32), head sizes 16, 32, 64, 128 and 256, sums in float32.
    What one query gets is the same to the bit whatever R, W, V, its place among the others and what those hold:
    blocks of keys have a fixed length and are summed in order, tiles have a fixed shape whose unused rows are idle,
    and a tile's rows do not meet. It rests on the matrix unit treating the rows of a tile alike.
    Masks load fastest where V is a multiple of 16. Anything else takes `attend_plain`, which promises none of this.
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
    """The same with a `bias` added to the scores, (R, 1, H/K·W, V) or None; a scale of None is d^-½.

    The H/K query heads that share a key head are folded into the query axis, so keys are never expanded.
    Result (R, W, H, d), not contiguous.
    """
    rows, heads, width, size = query.shape
    query = query.reshape(rows, key.shape[1], heads // key.shape[1] * width, size)
    if softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale)
    else:  # scores are squashed before the mask, which the fused kernel cannot do
        scores = query @ key.transpose(2, 3) * (size**-0.5 if scale is None else scale)
        scores = torch.tanh(scores / softcap) * softcap
        out = (scores if bias is None else scores + bias).softmax(-1) @ value
    return out.reshape(rows, heads, width, -1).transpose(1, 2)


def judge(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The first choice, its logit and the logsumexp: `(…, V)` to `(…)` int64, float32, float32.

    The lowest id of equals. Suppressed ids have logit −∞; a row of nothing else gives id 0, −∞ and −∞.
    The kernels read the logits once and write no softmax.
    """
    triton = _triton() if logits.is_cuda and logits.dtype != torch.float64 else None
    if triton is None:
        return judge_plain(logits)
    verdict: tuple[Tensor, Tensor, Tensor] = triton.judge(logits)
    return verdict


def judge_plain(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """On a CPU; elsewhere `argmax` may take any of equals."""
    choice = logits.argmax(-1)
    largest = logits.gather(-1, choice[..., None]).squeeze(-1)
    return choice, largest.float(), logits.float().logsumexp(-1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` (…, I) by `weight` (O, I), plus `bias` (O,): a row's result is the same to the bit in any company.

    Libraries choose their kernel by the number of rows, which is why the same row differs between batch sizes
    (https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference). Here tiles are of one shape, and
    how the inputs are cut depends on the weight's shape alone. Sums in float32, result in x's type.
    """
    triton = _triton() if x.is_cuda and x.dtype == weight.dtype and x.dtype != torch.float64 else None
    if triton is None:
        return linear_plain(x, weight, bias)
    out: Tensor = triton.linear(x, weight, bias)
    return out


def linear_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One row at a time, each from memory of its own: a library may take another path for another alignment."""
    rows = [product(row.clone(), weight, bias) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).view(*x.shape[:-1], -1) if rows else x.new_empty(*x.shape[:-1], len(weight))


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation of `x` (…, C) by `weight` (C,): a row's result is the same in any company.

    A library cuts a row's sum by the number of rows there are.
    """
    triton = _triton() if x.is_cuda and x.dtype != torch.float64 else None
    if triton is None:
        return norm_plain(x, weight, eps)
    out: Tensor = triton.norm(x, weight, eps)
    return out


def norm_plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32 and rounded before the weight, as transformers computes it."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

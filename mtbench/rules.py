"""The token rules: which token, how sure, how many. Pure functions of tensors, with no model and no method in them.

R = rows, N = candidate positions, V = vocabulary.
"""

from typing import Literal

import torch
from torch import Tensor

Metric = Literal["probability", "entropy", "margin"]


def choose(logits: Tensor) -> Tensor:
    """The token of each position, `(…, V)` to `(…)`: greedy, the lowest id of equals on a CPU."""
    return logits.argmax(-1)


def sure(logits: Tensor, metric: Metric, threshold: float) -> Tensor:
    """Is the model sure of its first choice? `(…, V)` logits to `(…)` bool, computed in float32.

    `probability`: p₁ ≥ threshold. `margin`: p₁ − p₂ ≥ threshold. `entropy`: H ≤ threshold, in nats.
    (MARS, arXiv 2604.07023, section 3.4 and Fig. 6.)
    """
    logits = logits.float()
    if metric == "probability":
        return torch.exp(logits.amax(-1) - logits.logsumexp(-1)).ge(threshold)
    probability = logits.softmax(-1)
    if metric == "margin":
        first, second = probability.topk(2, -1).values.unbind(-1)
        return (first - second).ge(threshold)
    entropy: Tensor = torch.special.entr(probability).sum(-1)
    return entropy.le(threshold)


def leading(true: Tensor) -> Tensor:
    """How many leading positions are true: `(R, N)` bool to `(R,)`."""
    return true.long().cumprod(1).sum(1)


def keep(tokens: Tensor, count: Tensor, room: Tensor, ends: Tensor) -> Tensor:
    """Which offered tokens become output: the first `count`, at most `room`, none after an end token.

    `tokens` (R, N), `count` and `room` (R,), `ends` (V,) bool: is this id an end token. Returns (R, N) bool,
    a run of leading trues in every row; the end token itself is kept.
    """
    column = torch.arange(tokens.shape[1], device=tokens.device)
    offered = column < torch.minimum(count, room)[:, None]
    if tokens.shape[1] == 1:
        return offered  # nothing stands behind an only token
    end = ends[tokens] & offered
    return offered & (end.long().cumsum(1) - end.long() == 0)

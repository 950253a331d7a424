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


def confidence(logits: Tensor) -> Tensor:
    """The probability of the first choice, `(…, V)` to `(…)`, in float32."""
    return logits.float().softmax(-1).amax(-1)


def sure(logits: Tensor, metric: Metric, threshold: float) -> Tensor:
    """Is the model sure of its first choice? `(…, V)` logits to `(…)` bool, computed in float32.

    `probability`: p₁ ≥ threshold. `margin`: p₁ − p₂ ≥ threshold. `entropy`: H ≤ threshold, in nats.
    (MARS, arXiv 2604.07023, section 3.4 and Fig. 6.)
    """
    if metric == "probability":
        return confidence(logits).ge(threshold)
    probability = logits.float().softmax(-1)
    if metric == "margin":
        first, second = probability.topk(2, -1).values.unbind(-1)
        return (first - second).ge(threshold)
    entropy: Tensor = torch.special.entr(probability).sum(-1)
    return entropy.le(threshold)


def leading(true: Tensor) -> Tensor:
    """How many leading positions are true: `(R, N)` bool to `(R,)`."""
    return true.cumprod(1).sum(1)


def surest(confidence: Tensor, among: Tensor, count: int) -> Tensor:
    """The `count` most confident positions `among` some, or as many as there are: (R, N), (R, N) bool to (R, N) bool.

    The first of equals. (Low-confidence remasking: LLaDA, arXiv 2502.09992, section 2.4.)
    """
    order = confidence.masked_fill(~among, -1).argsort(dim=1, descending=True, stable=True)
    return among & (order.argsort(dim=1) < count)


def keep(tokens: Tensor, count: Tensor, room: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the offered tokens become output, and does the answer end with them: `(R,)` and `(R,)` bool.

    The first `count` of `tokens` (R, N), at most `room` (R,), up to the first end token, which is kept; `ends` (V,)
    bool: is this id an end token.
    """
    before_end = leading(~ends[tokens])
    kept = torch.minimum(torch.minimum(count, room), before_end + 1)
    return kept, before_end < kept

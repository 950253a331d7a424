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


def sampled(logits: Tensor, temperature: float, seed: Tensor, position: Tensor) -> Tensor:
    """What is largest at the chosen token, (R, n, V) float64: logits/T and Gumbel noise, hashed from row and place.

    Its argmax is a draw from softmax(logits/T) (Gumbel 1954; Maddison et al., arXiv 1411.0030). `seed` (R,); `position`
    (R, n) of the tokens chosen. The noise of a place is the same in whatever forward, batch or method it is judged, so
    that a method that verifies by equality is lossless for sampled decoding too.
    """
    token = torch.arange(logits.shape[-1], device=logits.device)
    noise = -torch.log(-torch.log(uniform(seed[:, None, None], position[..., None], token)))
    return logits.double() / temperature + noise


def uniform(*keys: Tensor) -> Tensor:
    """A number in (0, 1), float64, for each combination of whole numbers, which broadcast; the same ones give the same.

    (Each key is stirred in by the finaliser of SplitMix64: Steele, Lea, Flood, OOPSLA 2014.)
    """
    state = torch.zeros((), dtype=torch.long, device=keys[0].device)
    for key in keys:
        state = (state ^ key) + _GOLDEN
        state = (state ^ _shifted(state, 30)) * _FIRST
        state = (state ^ _shifted(state, 27)) * _SECOND
        state = state ^ _shifted(state, 31)
    return (_shifted(state, 12).double() + 0.5) * 2.0**-52  # one bit more would round the largest to 1


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Right, zeros coming in."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


_GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def rejection_sample(
    draft: Tensor, offered: Tensor, wanted: Tensor, seed: Tensor, position: Tensor
) -> tuple[Tensor, Tensor]:
    """Verify sampled drafts so that what comes out is distributed as `wanted`: tokens (R, K+1), how many drafts (R,).

    Draft k, drawn from `offered[:, k]` (R, K, V), stays with the probability min(1, p/q) of itself under `wanted`
    (R, K+1, V) and `offered`; the first that does not is replaced by a draw from what p has more than q, and behind the
    last stands a draw from p: the most agreement two distributions can have. `position` (R, K+1) is each token's.
    (Leviathan et al., arXiv 2211.17192, appendix A.1; Chen et al., arXiv 2302.01318, theorem 1.)
    """
    drafts = draft.shape[1]
    p = wanted[:, :drafts].gather(2, draft[..., None])[..., 0]
    q = offered.gather(2, draft[..., None])[..., 0]
    dice = uniform(seed[:, None], position[:, :drafts], torch.full_like(position[:, :drafts], _DICE))
    accepted = prefix_length(dice * q < p)
    more = wanted.clone()
    more[:, :drafts] = (wanted[:, :drafts] - offered).clamp(min=0)
    fresh = torch.arange(wanted.shape[2], device=draft.device) + _FRESH  # the draft has thrown the others
    noise = -torch.log(-torch.log(uniform(seed[:, None, None], position[..., None], fresh)))
    replaced = (more.double().log() + noise).argmax(2)
    column = torch.arange(drafts + 1, device=draft.device)
    padded = torch.cat((draft, replaced[:, :1]), 1)
    return torch.where(column < accepted[:, None], padded, replaced), accepted


_DICE, _FRESH = -1, 1 << 32  # beyond any token's id


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


def prefix_length(true: Tensor) -> Tensor:
    """How many leading positions are true: `(R, N)` bool to `(R,)`."""
    return true.cumprod(1).sum(1)


def best_width(acceptance: Tensor, commits: Tensor, cost: Tensor) -> Tensor:
    """Which of several windows promises the most tokens for its cost, (R,).

    `acceptance` (R,): how often a guess was lately accepted after those before it were; then a window that can commit N
    tokens is worth (1 - a^N) / (1 - a) of them (Leviathan et al., arXiv 2211.17192, equation 1). `commits` and `cost`
    (n,): of each window.
    """
    a = acceptance.clamp(max=0.999)[:, None]
    return ((1 - a**commits) / (1 - a) / cost).argmax(1)


def top_confidence(confidence: Tensor, among: Tensor, count: int) -> Tensor:
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
    before_end = prefix_length(~ends[tokens])
    kept = torch.minimum(torch.minimum(count, room), before_end + 1)
    return kept, before_end < kept

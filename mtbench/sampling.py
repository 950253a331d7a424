"""Sampling and acceptance rules as pure functions of tensors: which token, how confident, how many.

R = rows, N = candidate positions, K = draft tokens, V = vocabulary.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Metric = Literal["probability", "entropy", "margin"]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: the temperature, and which tokens the filters keep (`filtered`)."""

    temperature: float = 0.0  # 0: greedy, whatever the filters
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that have this probability together; 1: all
    min_p: float = 0.0  # keep tokens of at least this share of the largest probability; 0: all

    @property
    def filters(self) -> bool:
        """Whether tokens are drawn from fewer than all."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def __str__(self) -> str:
        if not self.temperature:
            return "greedy"
        filters = {"top-k": self.top_k, "top-p": self.top_p % 1, "min-p": self.min_p}
        return ", ".join(
            f"{name} {value:g}" for name, value in {"temperature": self.temperature, **filters}.items() if value
        )


GREEDY = Sampling()
FILTERS = "top_k", "top_p", "min_p"  # in the order in which `filtered` applies them


class Filters(NamedTuple):
    """The filters of each row, as those of `Sampling`."""

    top_k: Tensor  # (R,) int64
    top_p: Tensor  # (R,) float64
    min_p: Tensor  # (R,) float64


def numbers(logits: Tensor) -> Tensor:
    """Return whether all logits `(…, V)` are numbers, `(…)` bool: none is NaN or +∞. −∞ marks a suppressed id."""
    return logits.amax(-1) < float("inf")  # the largest of NaN is NaN


def choose(logits: Tensor) -> Tensor:
    """Return the largest logit's id, `(…, V)` to `(…)`; on a CPU the lowest id of equal logits."""
    return logits.argmax(-1)


def filtered(logits: Tensor, temperature: Tensor, filters: Filters) -> Tensor:
    """Return logits (R, n, V) with −∞ for each token that the filters of its row remove. `temperature` (R,).

    Order and ties are those of transformers 5 (`GenerationMixin._get_logits_processor`): temperature, top-k, top-p,
    min-p, each on what the filters before it kept. Top-k keeps every token whose logit equals the k-th largest. Top-p
    removes the least likely tokens while their probabilities add up to at most 1 − p; of equals the lower ids first,
    which transformers leaves to a sort that is not stable. Min-p removes tokens below min_p times the largest
    probability. The likeliest token is kept. A row at temperature 0 keeps all.

    Probabilities are float64. In float32 the sum of many depends on the shape of the batch in its last digits, which
    would decide whether the token at top-p's boundary is kept.
    """
    hot, (top_k, top_p, min_p) = temperature[:, None, None], (of[:, None, None] for of in filters)
    ascending, ids = logits.sort(dim=-1, stable=True)
    place = (logits.shape[-1] - top_k).clamp(0, logits.shape[-1] - 1).expand(-1, logits.shape[1], -1)
    removed = (ascending < ascending.gather(-1, place)) & (top_k > 0)
    scaled = ascending.double() / hot.masked_fill(hot == 0, 1)
    share = scaled.masked_fill(removed, float("-inf")).softmax(-1)
    removed |= (share.cumsum(-1) <= 1 - top_p) & (top_p < 1)
    removed |= (scaled - scaled[..., -1:]).exp() < min_p
    removed[..., -1] = False
    removed &= hot > 0
    return logits.masked_fill(removed.scatter(-1, ids, removed), float("-inf"))


def sampled(logits: Tensor, temperature: float | Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Return logits/T plus Gumbel noise, (R, n, V) float64. Its argmax is a sample from softmax(logits/T).

    (Gumbel 1954; Maddison et al., arXiv 1411.0030.) `temperature`: one, or (R,); where it is 0, the logits alone.
    `seed` (R,); `position` (R, n) of the tokens to sample. The noise is a hash of seed, position and token id, so it is
    the same in every forward pass, batch and method. That makes a method that verifies draft tokens by equality
    lossless for sampled decoding too.
    """
    if not isinstance(temperature, Tensor):
        temperature = torch.full_like(seed, temperature, dtype=torch.double)
    hot = temperature[:, None, None]
    token = torch.arange(logits.shape[-1], device=logits.device)
    noise = -torch.log(-torch.log(uniform(seed[:, None, None], position[..., None], token)))
    wide = logits.double()
    return torch.where(hot > 0, wide / hot.masked_fill(hot == 0, 1) + noise, wide)


def uniform(*keys: Tensor) -> Tensor:
    """Return a pseudo-random number in (0, 1), float64, for each combination of integer keys, which broadcast.

    Equal keys give equal numbers.
    """
    return (_shifted(hashed(*keys), 12).double() + 0.5) * 2.0**-52  # one bit more would round the largest to 1


def hashed(*keys: Tensor) -> Tensor:
    """Return a hash, int64, of each combination of integer keys, which broadcast.

    Keys are mixed in by the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014).
    """
    state = torch.zeros((), dtype=torch.long, device=keys[0].device)
    for key in keys:
        state = (state ^ key) + _GOLDEN
        state = (state ^ _shifted(state, 30)) * _FIRST
        state = (state ^ _shifted(state, 27)) * _SECOND
        state = state ^ _shifted(state, 31)
    return state


def _shifted(bits: Tensor, by: int) -> Tensor:
    """Return the logical right shift: zeros fill the left. (Tensors of int64 only have the arithmetic shift.)"""
    return (bits >> by) & ((1 << (64 - by)) - 1)


_GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def rejection_sample(
    draft: Tensor,
    q: Tensor,
    p: Tensor,
    seed: Tensor,
    position: Tensor,
    offered: Tensor | None = None,
    *,
    block: bool = False,
) -> tuple[Tensor, Tensor]:
    """Verify draft tokens (R, K), sampled from q (R, K, V), against the target's distributions p (R, K+1, V).

    Accept the leading draft tokens that pass `token_rule`; with `block`, all up to the last that passes `block_rule`.
    Sample one more token from the rule's residual there. The result is distributed as p. `position` (R, K+1) of the
    tokens. `offered` (R,): only so many draft tokens count; whether one does must not depend on the token itself or
    on those after it. None: all. A draft token whose q is NaN does not count either.
    Return the tokens (R, K+1) and the number of accepted draft tokens (R,).
    """
    drafts = draft.shape[1]
    there = q.sum(2) > 0  # else the draft's activations were no numbers, and the residual would be none
    if offered is not None:
        there &= torch.arange(drafts, device=draft.device) < offered[:, None]
    chance, residual = (block_rule if block else token_rule)(draft, q.masked_fill(~there[..., None], 0), p)
    place = position[:, :drafts]
    passed = uniform(seed[:, None], place, torch.full_like(place, _ACCEPTANCE_KEY)) < chance
    column = torch.arange(drafts + 1, device=draft.device)
    accepted = (passed * column[1:]).amax(1) if block else prefix_length(passed)
    keys = torch.arange(p.shape[2], device=draft.device) + _RESAMPLING_KEY  # drawing the draft used the token ids
    noise = -torch.log(-torch.log(uniform(seed[:, None, None], position[..., None], keys)))
    resampled = (residual.double().log() + noise).argmax(2)
    padded = torch.cat((draft, resampled[:, :1]), 1)
    return torch.where(column < accepted[:, None], padded, resampled), accepted


def token_rule(draft: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return the chance that each draft token (R, K) passes, (R, K), and the residual behind each prefix, (R, K+1, V).

    Token k passes with min(1, p/q); the residual is max(p − q, 0), not normalised. q (R, K, V) is 0 where no token is
    offered: none passes, and the residual is p, as behind all K. p (R, K+1, V).
    (Leviathan et al., arXiv 2211.17192, appendix A.1; Chen et al., arXiv 2302.01318, theorem 1.)
    """
    ratio = (_of(draft, p) / _of(draft, q)).clamp(max=1)
    return ratio.masked_fill(_of(draft, q) == 0, 0), (p - _with_bonus(q)).clamp(min=0)


def block_rule(draft: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Return h (R, K), the chance that each prefix of the draft tokens passes, and the residuals (R, K+1, V).

    Sun et al.: "Block Verification Accelerates Speculative Decoding", ICLR 2025, arXiv 2403.10444, algorithm 2 with
    equations 4 and 5. With w_0 = 1, w_i = min(1, w_{i−1} · p(x_i)/q(x_i)), and Z_i = Σ_x max(w_i · p(x) − q(x), 0)
    over the token x behind x_1 … x_i, prefix i passes with h_i = Z_i / (Z_i + 1 − w_i); the longest that passes is
    accepted, and max(w_i · p − q, 0) is the residual behind it. Why the result is distributed as p: let a_i be the
    chance that at least i tokens are accepted, given x_1 … x_i. If a_{i+1} = w_{i+1}, averaging over x_{i+1} gives
    Σ_x min(w_i · p, q) = w_i − Z_i, so that a_i = w_i − Z_i + (1 − w_i + Z_i) · h_i = w_i. The next token is x with
    min(w_i · p, q) as a draft and max(w_i · p − q, 0) as a resampled one: together w_i · p(x), p's share of a_i.
    No token behind prefix i is q = 0: then Z_i = h_i = w_i, and the residual is p. So a draft may end at any prefix,
    if the choice depends on that prefix alone. q (R, K, V); p (R, K+1, V).
    """
    ratio = [torch.ones_like(p[:, 0, 0])]
    for p_k, q_k in zip(_of(draft, p).unbind(1), _of(draft, q).unbind(1), strict=True):
        ratio.append((ratio[-1] * p_k / q_k).clamp(max=1).masked_fill(q_k == 0, 0))
    prefix = torch.stack(ratio, 1)
    residual = (prefix[..., None] * p - _with_bonus(q)).clamp(min=0)
    mass = residual.sum(2)
    rest = mass + 1 - prefix
    return (mass / rest).masked_fill(rest == 0, 1)[:, 1:], residual  # 0/0: p is q, and a longer prefix always passes


def _of(tokens: Tensor, chances: Tensor) -> Tensor:
    """Return the chance of each token: (R, K) of (R, K or more, V)."""
    return chances[:, : tokens.shape[1]].gather(2, tokens[..., None])[..., 0]


def _with_bonus(q: Tensor) -> Tensor:
    """Return q (R, K, V) with zeros for the position behind the last draft token, (R, K+1, V)."""
    return torch.cat((q, torch.zeros_like(q[:, :1])), 1)


_ACCEPTANCE_KEY, _RESAMPLING_KEY = -1, 1 << 32  # keys of `uniform` that are no token ids


def confidence(logits: Tensor) -> Tensor:
    """Return the largest probability, logits `(…, V)` to `(…)`, in float32."""
    return logits.float().softmax(-1).amax(-1)


def sure(logits: Tensor, metric: Metric, threshold: float | Tensor) -> Tensor:
    """Return whether the model is confident in its most likely token: logits `(…, V)` to `(…)` bool, in float32.

    `probability`: p₁ ≥ threshold. `margin`: p₁ − p₂ ≥ threshold. `entropy`: H ≤ threshold, in nats.
    `threshold`: one, or a tensor that broadcasts. (MARS, arXiv 2604.07023, section 3.4 and Fig. 6.)
    """
    if metric == "probability":
        return reaches(confidence(logits), threshold)
    probability = logits.float().softmax(-1)
    if metric == "margin":
        first, second = probability.topk(2, -1).values.unbind(-1)
        return reaches(first - second, threshold)
    entropy: Tensor = torch.special.entr(probability).sum(-1)
    return reaches(-entropy, -threshold)


def reaches(value: Tensor, threshold: float | Tensor) -> Tensor:
    """Return whether each value reaches the threshold, in the type of the values: a tensor's rows as one number's."""
    return value.ge(threshold.to(value.dtype) if isinstance(threshold, Tensor) else threshold)


def prefix_length(true: Tensor) -> Tensor:
    """Return the number of leading true values: `(R, N)` bool to `(R,)`."""
    return true.cumprod(1).sum(1)


def best_width(acceptance: Tensor, commits: Tensor, cost: Tensor) -> Tensor:
    """Return the index of the window with the most expected tokens per cost, (R,).

    `acceptance` (R,): recent acceptance rate of a draft token, given that all before it were accepted. At rate a, a
    window that can commit N tokens commits (1 - a^N) / (1 - a) on average (Leviathan et al., arXiv 2211.17192,
    equation 1). `commits` and `cost`: of each window, (n,).
    """
    a = acceptance.clamp(max=0.999)[:, None]
    return ((1 - a**commits) / (1 - a) / cost).argmax(1)


def top_confidence(confidence: Tensor, among: Tensor, count: int) -> Tensor:
    """Select the `count` most confident of the positions in `among`: (R, N) and (R, N) bool to (R, N) bool.

    Of equals, the first; if there are fewer, all. (Low-confidence remasking: LLaDA, arXiv 2502.09992, section 2.4.)
    """
    order = confidence.masked_fill(~among, -1).argsort(dim=1, descending=True, stable=True)
    return among & (order.argsort(dim=1) < count)


def keep(tokens: Tensor, count: Tensor, room: Tensor, ends: Tensor, endless: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many of `tokens` (R, N) become output, (R,), and whether the last one ends the answer, (R,) bool.

    Output are the first `count` (R,), at most `room` (R,), up to and including the first end token. `ends` (V,) bool:
    whether an id is an end token. `endless` (R,) bool: rows that no token ends.
    """
    before_end = prefix_length(~ends[tokens] | endless[:, None])
    kept = torch.minimum(torch.minimum(count, room), before_end + 1)
    return kept, before_end < kept

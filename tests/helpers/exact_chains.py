"""Rules that verify a chain of drafts, on a small vocabulary, with every outcome enumerated: no sampling.

N = V^K chains of drafts, K drafts, V tokens. Behind i tokens the distributions are the rows of a (V^i, V) tensor.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling

Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # as `sampling.token_rule`


class Models(NamedTuple):
    """The draft's distributions behind 0 … K−1 tokens, and the target's behind 0 … K, each (V^i, V) float64."""

    draft: list[Tensor]
    target: list[Tensor]


def random_models(seed: int, vocabulary: int, drafts: int, spread: float = 1.5) -> Models:
    """Two models that agree partly; some probabilities are 0, some distributions are the same."""
    noise = torch.Generator().manual_seed(seed)
    draft, target = [], []
    for length in range(drafts + 1):
        shape = (vocabulary**length, vocabulary)
        common = spread * torch.randn(shape, generator=noise, dtype=torch.double)
        other = common + torch.randn(shape, generator=noise, dtype=torch.double)
        other = torch.where(torch.rand(len(other), 1, generator=noise) < 0.1, common, other)
        hidden = (torch.rand(shape, generator=noise) < 0.1) & (torch.arange(vocabulary) > 0)
        target.append(common.masked_fill(hidden, float("-inf")).softmax(1))
        draft.append(other.masked_fill(hidden.roll(1, 0), float("-inf")).softmax(1))
    return Models(draft[:drafts], target)


def chains(models: Models) -> Tensor:
    """Return all chains of drafts, (N, K), in the order of the rows."""
    vocabulary = models.target[0].shape[1]
    return torch.cartesian_prod(*[torch.arange(vocabulary)] * len(models.draft)).reshape(-1, len(models.draft))


def along(distributions: list[Tensor], tokens: Tensor) -> Tensor:
    """Return the distributions along each chain (N, K): (N, len(distributions), V)."""
    row = torch.zeros(len(tokens), dtype=torch.long)
    found = []
    for i, rows in enumerate(distributions):
        found.append(rows[row])
        if i < tokens.shape[1]:
            row = row * rows.shape[1] + tokens[:, i]
    return torch.stack(found, 1)


def target_law(models: Models) -> Tensor:
    """Return the probability of each text of K+1 tokens by the target, (V^(K+1),)."""
    law = torch.ones(1, dtype=torch.double)
    for rows in models.target:
        law = (law[:, None] * rows).flatten()
    return law


def lengths(chance: Tensor, *, block: bool) -> Tensor:
    """Return the probability that 0 … K drafts are accepted, (N, K+1), from the chance (N, K) that each passes."""
    one = torch.ones_like(chance[:, :1])
    if block:  # the longest that passes: it does, and none after it
        return torch.cat((one, chance), 1) * torch.cat(((1 - chance).flip(1).cumprod(1).flip(1), one), 1)
    return torch.cat((one, chance.cumprod(1)), 1) * torch.cat((1 - chance, one), 1)


def verified(
    models: Models, rule: Rule, offered: Tensor | None = None, *, block: bool | None = None
) -> tuple[Tensor, float]:
    """Return the law of the text of K+1 tokens that the rule decides, (V^(K+1),), and the mean of accepted drafts.

    What the rule does not decide, the target continues. `offered` (N,): leading drafts of each chain that are offered.
    `block`: whether the longest passing prefix counts; default: for `sampling.block_rule`.
    """
    tokens, vocabulary = chains(models), models.target[0].shape[1]
    q, p = along(models.draft, tokens), along(models.target, tokens)
    drawn = q.gather(2, tokens[..., None])[..., 0].prod(1)
    if offered is not None:
        q = q.masked_fill((torch.arange(tokens.shape[1]) >= offered[:, None])[..., None], 0)
    possible = drawn > 0
    tokens, q, p, drawn = tokens[possible], q[possible], p[possible], drawn[possible]
    chance, residual = rule(tokens, q, p)
    share = drawn[:, None] * lengths(chance, block=rule is sampling.block_rule if block is None else block)
    law, row = torch.zeros(1, dtype=torch.double), torch.zeros(len(tokens), dtype=torch.long)
    for length, rows in enumerate(models.target):
        left = residual[:, length] / residual[:, length].sum(1, keepdim=True).clamp(min=1e-300)
        law = (law[:, None] * rows).index_add(0, row, share[:, length, None] * left).flatten()
        if length < tokens.shape[1]:
            row = row * vocabulary + tokens[:, length]
    return law, float((share * torch.arange(tokens.shape[1] + 1)).sum())


def distance(law: Tensor, other: Tensor) -> float:
    """Return the total variation distance of two laws."""
    return float((law - other).abs().sum() / 2)

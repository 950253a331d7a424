"""Whether tokens were drawn, at which temperature, and with which filter.

The temperature is the most likely one. An answer is looked at because one of its tokens is off, so its tokens have
their probability given that one is. Drawn tokens are other than the choice as often as their probabilities say, at sure
places and at unsure ones, and none is out of reach: else a side chose, by other weights or from another cache.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench.experiments.audit.changes import Probe
from mtbench.experiments.audit.format import Tried

TEMPERATURES = [0.07 * 1.12**n for n in range(31)]  # 0.07 to 2.1; at the first and last one nothing is drawn
FILTERS = {None: 0.0} | {f"top_k {k}": k for k in (10, 20, 40, 50, 100)} | {f"top_p {p}": p for p in (0.8, 0.9, 0.95)}
ORDERED = 128  # largest logits that are kept in order
WIDTH, BINS = 0.05, 800  # of the other logits: the width of a bin, and bins
FAR = 0.5  # shortfall that small errors of logits do not explain
LEAST = 16  # fewer tokens that are off fit a temperature by chance
INTERVAL = 1.92  # of log likelihood: half the 95 % quantile of χ² with one degree of freedom
BETTER = 3.0  # log likelihood by which a filter must be better than none
LIKELY = 0.2  # probability of such tokens below which they were not drawn: that of drawn ones is seldom below 0.5
SURE = (0.0, 0.5, 0.9, 0.99, 1.01)  # probability of the choice: bounds of the places that are counted apart


class Looks(NamedTuple):
    """An answer's tokens at a temperature with a filter, (n,) each."""

    own: Tensor  # log probability; −∞: not kept by the filter
    choice: Tensor  # probability of the tokens that are not off
    reach: Tensor  # probability of the tokens that are at most as likely

    @property
    def one(self) -> float:
        """The probability that a token is off."""
        return max(1e-9, 1 - float(self.choice.prod()))


class Drawn(NamedTuple):
    """The temperature in words, the probability of tokens that look as strange, and the answers.

    `clear`: whether a token is so far below the choice that small errors of the logits do not explain them, too.
    """

    text: str
    chance: float
    tried: list[Tried]
    clear: bool


class Draws:
    """The tokens of a side's answers that are off, as drawn ones."""

    def __init__(self, bound: float) -> None:
        self.bound, self.farthest = bound, 0.0
        self.off: dict[str, Tensor] = {}  # by item
        self.seen = {(t, what): list[Looks]() for t in TEMPERATURES for what in FILTERS}

    def add(self, probe: Probe, logits: Tensor) -> None:
        """Add an answer with the logits (n, V) of its tokens."""
        emitted = torch.tensor(probe.answer.tokens, device=logits.device)[:, None]
        values, counts = _ordered(logits.float())
        own = logits.gather(1, emitted).float()
        top = values[:, :1]
        close, later, place = values >= top - self.bound, values <= own, (values > own).sum(1)
        self.off[probe.item] = (top - own > self.bound)[:, 0]
        self.farthest = max(self.farthest, float((top - own).max()))
        for t in TEMPERATURES:
            weight = values / t + counts.log()
            whole = weight.logsumexp(1)
            p = (weight - whole[:, None]).exp()
            before, log_p = p.cumsum(1) - p, own[:, 0] / t - whole
            choice, reach = (p * close).sum(1), (p * later).sum(1)
            for what, size in FILTERS.items():
                kept = torch.ones_like(p) if not size else counts.cumsum(1) <= size if size >= 1 else before < size
                mass = (p * kept).sum(1)
                out = place >= kept.sum(1)
                looks = Looks((log_p - mass.log()).masked_fill(out, -1e9), (choice / mass).clamp(max=1), reach)
                self.seen[t, what].append(looks)

    def best(self) -> Drawn | None:
        """Return the most likely temperature and filter; None if there are too few tokens."""
        if sum(int(of.sum()) for of in self.off.values()) < LEAST:
            return None
        likely = {of: sum(float(x.own.sum()) - math.log(x.one) for x in seen) for of, seen in self.seen.items()}
        plain = max((of for of in likely if of[1] is None), key=lambda of: likely[of])
        best = max(likely, key=lambda of: likely[of])
        best = best if likely[best] > likely[plain] + BETTER else plain
        near = [of[0] for of in likely if likely[of] > likely[best] - INTERVAL]
        edge = {TEMPERATURES[0], TEMPERATURES[-1]} & {best[0]}
        chance = 0.0 if edge else _chance(self.seen[best], [*self.off.values()])
        text = f"tokens sampled at temperature {best[0]:.2g} ({min(near):.2g} to {max(near):.2g})"
        text += f" and {best[1]}" if best[1] else ""
        tried = []
        for item, off in self.off.items():
            before = int(off.sum())
            after = 0 if chance >= LIKELY else before
            tried.append(
                Tried(item=item, tokens=len(off), before=before, after=after, misfit_before=before, misfit=after)
            )
        return Drawn(text, chance, tried, clear=self.farthest > FAR)


def _ordered(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return values of logits (n, V) in descending order, and how many have each: the largest, then those of bins."""
    top = logits.topk(min(ORDERED, logits.shape[1])).values
    bins = ((top[:, :1] - logits) / WIDTH).clamp(max=BINS - 1).long()
    rest = ((logits < top[:, -1:]) & logits.isfinite()).float()
    counts = logits.new_zeros(len(logits), BINS).scatter_add_(1, bins, rest)
    middles = top[:, :1] - WIDTH * (0.5 + torch.arange(BINS, device=logits.device))
    return torch.cat((top, middles.minimum(top[:, -1:])), 1), torch.cat((torch.ones_like(top), counts), 1)


def _chance(seen: Sequence[Looks], offs: Sequence[Tensor]) -> float:
    """Return the probability that drawn tokens look as strange, by Fisher's combination of two tests.

    χ² of the tokens that are off, at places that are sure and unsure, and the least likely of all tokens.
    """
    from scipy.special import chdtrc

    strange, bins = 0.0, 0
    for low, high in itertools.pairwise(SURE):
        here = [(of.choice >= low) & (of.choice < high) for of in seen]
        parts = [(of.choice[at], off[at], of.one) for of, off, at in zip(seen, offs, here, strict=True)]
        off = sum(float(own.sum()) for _, own, _ in parts)
        expected, spread = (
            sum(float(of.sum()) / one for of, one in ((1 - c, one) for c, _, one in parts)),
            sum(float((c * (1 - c)).sum()) / one for c, _, one in parts),
        )
        if expected or off:
            strange, bins = strange + (off - expected) ** 2 / max(spread, 0.5), bins + 1
    tokens = sum(len(of.own) for of in seen)
    reach = min(1.0, tokens * min(float(of.reach.min()) for of in seen))
    both = max(float(chdtrc(max(1, bins), strange)) * reach, 1e-300)
    return both * (1 - math.log(both))

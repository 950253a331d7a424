"""Read finished answers again, teacher-forced: the logit of each token that was emitted, and how far it falls short.

A shortfall is the least distance between two logits that rounding must have changed for the token to be the choice.
Without filters that is how far its logit, with the noise that it was drawn by, is below the largest. Top-k, top-p and
min-p decide by logits, too. So with them the token must be among those that may be kept if each limit moves by the
shortfall, and none that is surely kept may be further above it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.models.runner import ModelRunner
from mtbench.models.whole_texts import FED_AT_ONCE, WholeTexts, tree_logits
from mtbench.sampling import GREEDY, Filters, Sampling

HALVINGS = 60  # of an interval in which a distance is searched


class Answer(NamedTuple):
    """The tokens emitted for a prompt, and how they were sampled."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    seed: int = 0
    sampling: Sampling = GREEDY


class Judged(NamedTuple):
    """Tokens as the logits there judge them, `(n,)` each."""

    logits: Tensor  # of the tokens, with the noise that they were drawn by
    short: Tensor  # their shortfalls
    outside: Tensor  # how far the filters' limits must move to keep the token; 0 where they do


class Reading(NamedTuple):
    """Who reads answers again, and how."""

    name: str  # of the checkpoint, the number type, and the engine if it is not the judge's
    model: ModelRunner | WholeTexts
    width: int = FED_AT_ONCE  # positions of one forward, if not whole texts
    logits: bool = False  # the logit of each token is kept, not its shortfall alone

    def groups(self, answers: Sequence[Answer]) -> list[list[int]]:
        """Return the numbers of the answers that are read together."""
        if isinstance(self.model, WholeTexts):
            return self.model.groups([len(of.prompt) for of in answers], [len(of.tokens) for of in answers])
        before = [(), *(of.prompt for of in answers)]  # answers to an item are side by side
        new = (len(of.tokens) + (of.prompt != last) * len(of.prompt) for of, last in zip(answers, before, strict=False))
        sizes = [*accumulate(new)]
        return [[*group] for _, group in groupby(range(len(answers)), lambda n: sizes[n] // FED_AT_ONCE)]

    @torch.inference_mode()
    def forced_logits(self, answers: Sequence[Answer]) -> list[tuple[Tensor, Tensor]]:
        """Return the logit of each token of each answer, with its noise, and its shortfall, `(tokens,)` each."""
        found: list[list[tuple[Tensor, Tensor]]] = [[(torch.zeros(0),) * 2] for _ in answers]
        for n, first, logits in judged_logits(self.model, answers, self.width):
            of = judged(logits, answers[n], first)
            found[n].append((of.logits.cpu(), of.short.cpu()))
        return [(torch.cat([own for own, _ in of]), torch.cat([short for _, short in of])) for of in found]


def judged_logits(
    model: ModelRunner | WholeTexts, answers: Sequence[Answer], width: int = FED_AT_ONCE
) -> Iterator[tuple[int, int, Tensor]]:
    """Return the logits that judge tokens: number of an answer, index of a token, logits `(n, V)` from that token on.

    `width`: positions of one forward, if the model does not read whole texts. Raises UserError for logits that are no
    numbers.
    """
    texts, judged = [[*of.prompt, *of.tokens] for of in answers], [len(of.tokens) for of in answers]
    if isinstance(model, WholeTexts):
        return ((n, 0, logits) for n, logits in enumerate(model.logits(texts, judged)) if len(logits))
    return tree_logits(model, texts, judged, width)


def judged(logits: Tensor, answer: Answer, first: int) -> Judged:
    """Return how logits `(n, V)` judge the answer's tokens from `first` on."""
    emitted = torch.tensor(answer.tokens[first : first + len(logits)], device=logits.device)[:, None]
    noisy, of = logits, answer.sampling
    if of.temperature:
        positions = len(answer.prompt) + first + torch.arange(len(logits), device=logits.device)[None]
        seed = torch.tensor([answer.seed], device=logits.device)
        noisy = of.temperature * sampling.sampled(logits[None], of.temperature, seed, positions)[0]
        noisy = noisy if logits.dtype == torch.float64 else noisy.float()
    own = noisy.gather(1, emitted)[:, 0]
    short, outside = noisy.amax(1) - own, torch.zeros_like(own)
    if of.filters:
        row = logits.new_tensor([astuple(of)], dtype=torch.double).T  # its settings, (4, 1)
        kept = sampling.filtered(logits[None], row[0], Filters(row[1].long(), row[2], row[3]))[0] > float("-inf")
        removed = ~kept.gather(1, emitted)[:, 0] & (own > float("-inf"))  # by a filter: no suppressed id
        short = noisy.masked_fill(~kept, float("-inf")).amax(1) - own
        off = removed | (short > 0)
        short[off], outside[off] = _distances(logits[off], noisy[off], emitted[off], of)
        outside = outside.masked_fill(~removed, 0)
    return Judged(own, short.clamp(min=0), outside)


def _distances(logits: Tensor, noisy: Tensor, emitted: Tensor, of: Sampling) -> tuple[Tensor, Tensor]:
    """Return the shortfalls `(n,)` of tokens `(n, 1)` that the filters let none be, and their parts outside these.

    If no distance of two logits changes by more than d, the limits of top-k and min-p move by d at most, and so does
    that of top-p, of a share p whose odds change by exp(d/T) at most.
    """
    vocabulary, lowest = logits.shape[1], torch.full_like(emitted, float("-inf"), dtype=torch.double)
    own, own_noisy = logits.gather(1, emitted).double(), noisy.gather(1, emitted).double()
    falling, ids = logits.double().sort(1, descending=True)
    rising, mass = -falling, ((falling - falling[:, :1]) / of.temperature).exp().cumsum(1)
    largest = torch.cat((lowest, noisy.double().gather(1, ids).cummax(1).values), 1)  # of the likeliest 0, 1, … tokens
    falling = torch.cat((falling, lowest), 1)

    def reach(limit: Tensor) -> Tensor:
        """Return how many tokens have at least this logit."""
        return torch.searchsorted(rising, -limit, right=True)

    def kept(d: Tensor) -> Tensor:
        """Return how many tokens may be kept if distances change by d; if d is below 0, how many surely are."""
        behind = (d < 0).long()  # surely kept are those above the first that is removed
        count = torch.full_like(emitted, vocabulary)
        if of.top_k:
            count = reach(falling.gather(1, (of.top_k - 1 + behind).clamp(max=vocabulary)) - d)
        if of.top_p < 1:
            share = 1 / (1 + (1 / of.top_p - 1) * (-d / of.temperature).exp())
            first = torch.searchsorted(mass, share * mass.gather(1, (count - 1).clamp(min=0))) + 1
            last = falling.gather(1, (first - 1 + behind).clamp(max=vocabulary))
            count = torch.where(first < count, torch.minimum(count, reach(last - d)), count)
        if of.min_p:
            count = torch.minimum(count, reach(falling[:, :1] + of.temperature * math.log(of.min_p) - d))
        return count

    def least(explains: Callable[[Tensor], Tensor], most: Tensor) -> Tensor:
        low, high = torch.zeros_like(most), most
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            enough = explains(middle)
            low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
        return high[:, 0].to(noisy.dtype)

    outside = least(lambda d: own >= falling.gather(1, kept(d) - 1), falling[:, :1] - own)
    below = least(lambda d: largest.gather(1, kept(-d)) - own_noisy <= d, (largest[:, -1:] - own_noisy).clamp(min=0))
    return torch.maximum(outside, below), outside

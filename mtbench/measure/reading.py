"""Read finished answers again, teacher-forced: the logit of each token that was emitted, and the largest one there."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.models.runner import ModelRunner
from mtbench.models.whole_texts import FED_AT_ONCE, WholeTexts, tree_logits


class Answer(NamedTuple):
    """The tokens emitted for a prompt, and how they were sampled."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    seed: int = 0
    temperature: float = 0.0


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
        """Return the logit of each token of each answer and the largest logit at its position, `(tokens,)` each.

        For sampled tokens the logits include the sampling noise of their seed.
        """
        found: list[list[tuple[Tensor, Tensor]]] = [[(torch.zeros(0),) * 2] for _ in answers]
        for n, first, logits in judged_logits(self.model, answers, self.width):
            noisy = with_noise(logits, answers[n], first)
            emitted = torch.tensor(answers[n].tokens[first : first + len(logits)], device=logits.device)[:, None]
            found[n].append((noisy.gather(1, emitted)[:, 0].cpu(), noisy.amax(1).cpu()))
        return [(torch.cat([own for own, _ in of]), torch.cat([most for _, most in of])) for of in found]


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


def with_noise(logits: Tensor, answer: Answer, first: int) -> Tensor:
    """Return logits `(n, V)` that tokens from `first` on were chosen by: with the sampling noise, if any."""
    if not answer.temperature:
        return logits
    positions = len(answer.prompt) + first + torch.arange(len(logits), device=logits.device)[None]
    seed = torch.tensor([answer.seed], device=logits.device)
    noisy = answer.temperature * sampling.sampled(logits[None], answer.temperature, seed, positions)[0]
    return noisy if logits.dtype == torch.float64 else noisy.float()

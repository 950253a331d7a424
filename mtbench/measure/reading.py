"""Read finished answers again, teacher-forced: the logit of each token that was emitted, and the largest one there."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.models.runner import ModelRunner
from mtbench.models.whole_texts import FED_AT_ONCE, TextTree, WholeTexts


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
        groups, tree = list[list[int]](), TextTree()
        for n, of in enumerate(answers):
            if not groups or len(tree.ids) >= FED_AT_ONCE:
                groups, tree = [*groups, []], TextTree()
            tree.add([*of.prompt, *of.tokens])
            groups[-1].append(n)
        return groups

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
    """Yield the logits that judge tokens: number of an answer, index of a token, logits `(n, V)` from that token on.

    `width`: positions of one forward, if the model does not read whole texts. Raises UserError for logits that are no
    numbers.
    """
    if isinstance(model, WholeTexts):
        found = model.logits([[*of.prompt, *of.tokens] for of in answers], [len(of.tokens) for of in answers])
        yield from ((n, 0, logits) for n, logits in enumerate(found) if len(logits))
        return
    tree = TextTree()
    for of in answers:
        tree.add(of.prompt[:-1])  # these need no logits, so they come first
    paths = [tree.add([*of.prompt, *of.tokens])[len(of.prompt) - 1 : -1] for of in answers]
    for begin, logits in tree.logits(model, min((path[0] for path in paths if path), default=len(tree.ids)), width):
        for n, path in enumerate(paths):
            first, end = (bisect_left(path, node) for node in (begin, begin + len(logits)))
            if first < end:
                yield n, first, logits[[node - begin for node in path[first:end]]]


def with_noise(logits: Tensor, answer: Answer, first: int) -> Tensor:
    """Return logits `(n, V)` that tokens from `first` on were chosen by: with the sampling noise, if any."""
    if not answer.temperature:
        return logits
    positions = len(answer.prompt) + first + torch.arange(len(logits), device=logits.device)[None]
    seed = torch.tensor([answer.seed], device=logits.device)
    noisy = answer.temperature * sampling.sampled(logits[None], answer.temperature, seed, positions)[0]
    return noisy if logits.dtype == torch.float64 else noisy.float()

"""Read finished answers again, teacher-forced: the logit of each token that was emitted, and the largest one there."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import ModelRunner
from mtbench.models.whole_texts import TextTree, WholeTexts, tree_groups

JUDGED_AT_ONCE = 256  # positions of one forward
NARROW = 32  # positions of one forward over several answers at an arm's width


class Answer(NamedTuple):
    """The tokens emitted for a prompt, and how they were sampled."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    seed: int = 0
    temperature: float = 0.0


class Reading(NamedTuple):
    """Who reads answers again."""

    name: str  # of the checkpoint, the number type, and the engine if it is not the judge's
    model: ModelRunner | WholeTexts
    width: int | None = None  # positions of each answer in a forward; None: whole texts
    logits: bool = False  # the logit of each token is kept, not its shortfall alone

    def groups(self, answers: Sequence[Answer]) -> list[list[int]]:
        """Return the numbers of the answers that are read together."""
        prompts = [len(of.prompt) for of in answers]
        if isinstance(self.model, WholeTexts):
            return self.model.groups(prompts, [len(of.tokens) for of in answers])
        if self.width is None:
            return tree_groups([[*of.prompt, *of.tokens] for of in answers])
        rows, alike = max(1, NARROW // self.width), sorted(range(len(answers)), key=prompts.__getitem__)
        return [alike[i : i + rows] for i in range(0, len(alike), rows)]

    @torch.inference_mode()
    def forced_logits(self, answers: Sequence[Answer]) -> list[tuple[Tensor, Tensor]]:
        """Return the logit of each token of each answer and the largest logit at its position, `(tokens,)` each.

        For sampled tokens the logits include the sampling noise of their seed. Raises NotNumbersError.
        """
        found: list[list[tuple[Tensor, Tensor]]] = [[(torch.zeros(0),) * 2] for _ in answers]
        for n, first, logits in self._logits(answers):
            noisy = with_noise(logits, answers[n], first)
            emitted = torch.tensor(answers[n].tokens[first : first + len(logits)], device=logits.device)[:, None]
            found[n].append((noisy.gather(1, emitted)[:, 0].cpu(), noisy.amax(1).cpu()))
        return [(torch.cat([own for own, _ in of]), torch.cat([most for _, most in of])) for of in found]

    def _logits(self, answers: Sequence[Answer]) -> Iterator[tuple[int, int, Tensor]]:
        """Yield the number of an answer, the index of one of its tokens, and the logits (n, V) from that token on."""
        if isinstance(self.model, WholeTexts):
            texts = [[*of.prompt, *of.tokens] for of in answers], [len(of.tokens) for of in answers]
            yield from ((n, 0, logits) for n, logits in enumerate(self.model.logits(*texts)) if len(logits))
        elif self.width is None:
            yield from _by_tree(self.model, answers)
        else:
            yield from _by_rows(self.model, answers, self.width)


def _by_tree(runner: ModelRunner, answers: Sequence[Answer]) -> Iterator[tuple[int, int, Tensor]]:
    """Yield as `Reading._logits` does: all answers as one tree of tokens, prompts first, which need no logits."""
    tree = TextTree()
    for of in answers:
        tree.add(of.prompt[:-1])
    paths = [tree.add([*of.prompt, *of.tokens[:-1]])[len(of.prompt) - 1 :][: len(of.tokens)] for of in answers]
    for begin, logits in tree.logits(runner, min((path[0] for path in paths if path), default=len(tree))):
        for n, path in enumerate(paths):
            first, end = (bisect_left(path, node) for node in (begin, begin + len(logits)))
            if first < end:
                yield n, first, logits[[node - begin for node in path[first:end]]]


def _by_rows(runner: ModelRunner, answers: Sequence[Answer], width: int) -> Iterator[tuple[int, int, Tensor]]:
    """Yield as `Reading._logits` does: the answers side by side, `width` positions of each in a forward."""
    device, texts = runner.device, [[*of.prompt, *of.tokens] for of in answers]
    longest, starts = max(map(len, texts)), torch.tensor([[len(of.prompt) - 1] for of in answers], device=device)
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=device)
    runner.reserve(len(answers), longest)

    def forward(slots: Tensor, judged: int) -> Tensor:
        metadata = AttentionMetadata(slots, slots, slots[:, -1] + 1, view=int(slots.max()) + 1)
        return _float(runner.forward(ids.gather(1, slots), metadata, judged).logits)

    before = torch.arange(int(starts.max()), device=device).expand(len(answers), -1)
    for chunk in before.split(JUDGED_AT_ONCE, 1) if before.shape[1] else ():
        forward(chunk, 1)
    for first in range(0, max(len(of.tokens) for of in answers), width):
        slots = starts + first + torch.arange(width, device=device)
        logits = forward(slots.clamp(max=longest - 1), width)  # (R, width, V)
        for n, of in enumerate(answers):
            if first < len(of.tokens):
                yield n, first, logits[n, : len(of.tokens) - first]


def _float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def judged_logits(
    runner: ModelRunner, answer: Answer, width: int, first: int = 0, cached: int = 0, room: int = 0
) -> Iterator[tuple[int, Tensor]]:
    """Yield the logits that judge the tokens of an answer from `first` on: a token's index, logits `(n, V)` from it on.

    The runner feeds `width` positions at a time. `cached`: leading positions that its cache holds from an earlier call,
    whose answer began alike; with 0 the cache is made anew, for `room` positions at least.
    """
    prompt, tokens, device = answer.prompt, answer.tokens, runner.device
    ids = torch.tensor([[*prompt, *tokens[:-1]]], device=device)
    if not cached:
        runner.reserve(1, max(ids.shape[1], room))
    base = torch.tensor([ids.shape[1]], device=device)
    slots = torch.arange(cached, ids.shape[1], device=device)[None]
    before, behind = slots.tensor_split((len(prompt) + first - 1 - cached,), 1)

    def forward(chunk: Tensor, judged: int) -> Tensor:
        metadata = AttentionMetadata(chunk, chunk, base, view=int(chunk[0, -1]) + 1)
        return _float(runner.forward(ids.gather(1, chunk), metadata, judged).logits[0])

    for chunk in before.split(JUDGED_AT_ONCE, 1) if before.shape[1] else ():
        forward(chunk, judged=1)
    for chunk in behind.split(width, 1):
        yield first, forward(chunk, judged=chunk.shape[1])
        first += chunk.shape[1]


def with_noise(logits: Tensor, answer: Answer, first: int) -> Tensor:
    """Return logits `(n, V)` that tokens from `first` on were chosen by: with the sampling noise, if any."""
    if not answer.temperature:
        return logits
    positions = len(answer.prompt) + first + torch.arange(len(logits), device=logits.device)[None]
    seed = torch.tensor([answer.seed], device=logits.device)
    noisy = answer.temperature * sampling.sampled(logits[None], answer.temperature, seed, positions)[0]
    return noisy if logits.dtype == torch.float64 else noisy.float()

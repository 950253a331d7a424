"""Training objectives: what a checkpoint is taught to predict, and from what it may see.

An objective is a small frozen class whose fields are its options. It lays a conversation (mtbench/training/packing.py)
and knows nothing of packing, attention, optimizer or devices. Sources: MARS (Jin, Wang, Luo, Sun, arXiv 2604.07023)
and its released code, which is more exact than its text; BD3-LM (arXiv 2503.09573); Medusa (arXiv 2401.10774).

Letters: L tokens of a conversation, B block size, N predictions, H hidden size, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from mtbench.models.medusa_heads import ResidualHead
from mtbench.options import option
from mtbench.training.linear_cross_entropy import TeacherOutput, linear_cross_entropy
from mtbench.training.packing import Example, Packed, Stream, TrainingSequence

EXACT = torch.float64  # of weights: a mean's 1/n is not exact in float32
LEAST_TIME = 1e-3  # of the diffusion times drawn from (LEAST_TIME, 1)

Model = Any  # a causal language model of transformers


class Special(NamedTuple):
    """The token ids an objective may put where the text has none."""

    mask: int | None
    end: int


class Losses(NamedTuple):
    """`total` is differentiated; `parts` (P,) are its terms, detached."""

    total: Tensor  # ()
    parts: Tensor  # (P,)


class Reading(NamedTuple):
    """Predictions that share a head: which of the batch's, their hidden states, the head's matrix, a teacher's."""

    rows: Tensor | slice  # of the batch's N predictions
    hidden: Tensor  # (n, H)
    head: Tensor  # (V, H)
    teacher_output: TeacherOutput | None = None


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What every objective has. `name` is its command, `parts` are the named terms of its loss."""

    name: ClassVar[str]
    needs_mask: ClassVar[bool] = False
    role: ClassVar[str]  # of a family, that its checkpoints have

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def needs_teacher(self) -> bool:
        return False

    def size(self, length: int, prompt: int) -> int:
        """At most how many tokens are fed for a conversation of so many."""
        raise NotImplementedError

    def share(self, length: int, prompt: int) -> int:
        """What a conversation adds to the divisor of a batch's loss: 1, unless the mean is over tokens."""
        return 1

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """How one conversation is fed. Its weights are still to be divided by the shares of the batch."""
        raise NotImplementedError

    def attach(self, model: Model) -> None:
        """Before training: give the model the parts it needs beside its own, freeze what is to stay."""

    def read(self, model: Model, hidden: Tensor, batch: Packed, teacher: TeacherOutput | None) -> Iterator[Reading]:
        """How predictions come from hidden states (N, H). `teacher`: its hidden states there, and its head."""
        yield Reading(slice(None), hidden, model.get_output_embeddings().weight, teacher)

    def detach(self, model: Model) -> Mapping[str, Tensor]:
        """After training: take off what was attached, to be saved beside the model as `<name>.safetensors`."""
        return {}


def clean_stream(ids: Tensor) -> Stream:
    """The text as it is, every token seeing itself and what came before."""
    place = torch.arange(len(ids))
    return Stream(ids, place, torch.zeros_like(place), place + 1, torch.zeros_like(place))


def joined(*streams: Stream) -> Stream:
    return Stream(*(torch.cat(columns) for columns in zip(*streams, strict=True)))


def block_start(place: Tensor, first: int, size: int) -> Tensor:
    """Where the block of each place begins, blocks being counted from place `first` (which may lie before 0)."""
    return (place - first) // size * size + first


def blocks_of(length: int, size: int) -> int:
    """The tokens of so many, once the last block is full."""
    return -(-length // size) * size


def filled(ids: Tensor, first: int, size: int, end: int) -> Tensor:
    """End tokens, to be learned, up to the end of a block: as the release does."""
    return torch.nn.functional.pad(ids, (0, (first - len(ids)) % size), value=end)


def first_target(example: Example) -> int:
    return max(example.prompt, 1)  # nothing stands before token 0 to predict it from


@dataclass(frozen=True, kw_only=True)
class Ar(Objective):
    """Next-token training on the last assistant turn (stage 1 of the MARS paper). Mean over labelled tokens."""

    name: ClassVar[str] = "ar"
    role: ClassVar[str] = "ar"

    def size(self, length: int, prompt: int) -> int:
        return length - 1

    def share(self, length: int, prompt: int) -> int:
        return length - max(prompt, 1)

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        target = torch.arange(first_target(example), len(example.ids))
        return TrainingSequence(
            *clean_stream(example.ids[:-1]),
            at=target - 1,
            target=example.ids[target],
            weight=torch.ones(len(target), 1, dtype=EXACT),
            ahead=torch.ones_like(target),
        )


@dataclass(frozen=True, kw_only=True)
class Mars(Objective):
    """Masked blocks beside the clean text (stage 2 of the MARS paper). Mean over tokens, then over conversations.

    `released`, as the authors' code: blocks from position 0, the prompt visible in its block's noisy copy, every copy's
    output predicts the next token; so a block's first token is predicted from the last mask of the block before.
    `anchored`, as decoding does it: blocks from the answer's start, each predicted from its last clean token and B-1
    masks, which makes the paper's equations 4 and 6 true. The anchor is the clean stream's own token: one more copy of
    it would see and predict the same.
    """

    name: ClassVar[str] = "mars"
    role: ClassVar[str] = "mars"
    needs_mask: ClassVar[bool] = True

    block_size: int = option(4, "B: tokens of a block", low=2)
    layout: Literal["released", "anchored"] = option(
        "released", "where blocks begin and what predicts their first token"
    )
    ar_weight: float = option(1.0, "of the next-token loss beside the masked one; 0: without SFT loss", low=0)
    timestep_weight: bool = option(False, "a random 1/t per conversation, as in the released ablation without SFT loss")
    random_offset: bool = option(False, "blocks begin elsewhere in every conversation")

    @property
    def parts(self) -> tuple[str, ...]:
        return ("mask", "ar") if self.ar_weight else ("mask",)

    def size(self, length: int, prompt: int) -> int:
        start, shift = max(prompt, 1), int(self.random_offset)
        if self.layout == "anchored":
            behind = length - 1 - start
            return length - 1 + behind - behind // self.block_size + shift
        full = blocks_of(length, self.block_size) + shift * (self.block_size - 1)
        return full - 1 + full - 1 - start

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Masks stand where a target's predecessor is not known; every other target is the clean stream's to predict.

        Where the release shows a mask the prompt's tokens of its own block as noisy copies, it sees them here in the
        clean stream, where they are the same.
        """
        assert special.mask is not None
        anchors = int(self.layout == "anchored")  # clean tokens that a block's window begins with
        start = first_target(example)
        shift = int(torch.randint(self.block_size, (), generator=random)) if self.random_offset else 0
        first = (start - 1 if anchors else 0) - shift
        ids = example.ids if anchors else filled(example.ids, first, self.block_size, special.end)

        place = torch.arange(start, len(ids) - 1)
        place = place[(place - first) % self.block_size >= anchors]
        begin = block_start(place, first, self.block_size)
        known = (begin + anchors).clamp(min=start)
        noisy = Stream(
            torch.full_like(place, special.mask), place, (begin - first) // self.block_size + 1, known, place
        )

        target, end = torch.arange(start, len(ids)), len(example.ids)
        unmasked = torch.ones(len(target), dtype=EXACT)
        unmasked[place + 1 - start] = 0  # what follows a mask is predicted by it
        counts = torch.stack([unmasked, torch.full_like(unmasked, self.ar_weight)], 1)[:, : len(self.parts)]
        told = counts.sum(1) > 0  # by the clean stream
        seen = max(int(target[told].max()), int(known.max()) if len(known) else 0)
        masked = torch.eye(2, dtype=EXACT)[0].expand(len(place), 2)[:, : len(self.parts)]
        weight = torch.cat([masked, counts[told]]) / len(target)
        if self.timestep_weight:
            weight[:, 0] /= draw_time(random) + 1e-6
        return TrainingSequence(
            *joined(clean_stream(ids[:seen]), noisy),
            at=torch.cat([seen + torch.arange(len(place)), target[told] - 1]),
            target=torch.cat([ids[place + 1], ids[target[told]]]),
            weight=weight,
            ahead=torch.cat([(place + 2 - known) * (place + 1 < end), (target[told] < end).long()]),
        )


def draw_time(random: torch.Generator) -> float:
    """A time of the masking process, uniform in (LEAST_TIME, 1)."""
    return LEAST_TIME + (1 - LEAST_TIME) * torch.rand((), generator=random).item()


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Objective):
    """BD3-LM, the baseline of the MARS paper: a time t per conversation, each labelled token masked with probability t.

    Cross-entropy of the masked tokens weighted by 1/t; inside its block a token sees both ways, the clean stream too;
    every output predicts the next token. Mean over labelled tokens, then over conversations.
    """

    name: ClassVar[str] = "block-diffusion"
    role: ClassVar[str] = "block_diffusion"
    needs_mask: ClassVar[bool] = True

    block_size: int = option(4, "B: tokens of a block", low=2)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("mask",)

    def size(self, length: int, prompt: int) -> int:
        full, before = blocks_of(length, self.block_size), (max(prompt, 1) - 1) // self.block_size * self.block_size
        return full - self.block_size + full - before

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        assert special.mask is not None
        size, start = self.block_size, first_target(example)
        ids = filled(example.ids, 0, size, special.end)
        labelled = torch.arange(start, len(ids))
        time = draw_time(random)
        masked = labelled[torch.rand(len(labelled), generator=random) < time]

        first = (start - 1) // size * size
        place = torch.arange(first, len(ids))
        begin = block_start(place, 0, size)
        noised = ids.index_fill(0, masked, special.mask)[place]
        noisy = Stream(noised, place, (begin - first) // size + 1, begin, begin + size - 1)

        shown = torch.arange(len(ids) - size)  # nobody sees the last block's clean copy
        zero = torch.zeros_like(shown)
        clean = Stream(ids[shown], shown, zero, block_start(shown, 0, size) + size, zero)
        return TrainingSequence(
            *joined(clean, noisy),
            at=len(shown) + masked - 1 - first,
            target=ids[masked],
            weight=torch.full((len(masked), 1), 1 / (time * len(labelled)), dtype=EXACT),
            ahead=(masked + 1 - block_start(masked, 0, size).clamp(min=start)) * (masked < len(example.ids)),
        )


@dataclass(frozen=True, kw_only=True)
class Draft(Ar):
    """A smaller model that another one's guesses come from: trained as `ar`, or towards a teacher's distribution."""

    name: ClassVar[str] = "draft"
    role: ClassVar[str] = "draft"

    distil: Literal["none", "logits"] = option("none", "learn from the teacher's distribution in place of the text")

    @property
    def needs_teacher(self) -> bool:
        return self.distil == "logits"


@dataclass(frozen=True, kw_only=True)
class Medusa(Objective):
    """Medusa-1: the target stays as it is, K residual heads learn the tokens 2 … K+1 ahead (arXiv 2401.10774, 2.2.1).

    Head k counts 0.8 to the power of k. Mean over labelled tokens.
    """

    name: ClassVar[str] = "medusa"
    role: ClassVar[str] = "medusa"

    heads: int = option(4, "K: how many", low=1)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"head_{k}" for k in range(1, self.heads + 1))

    def size(self, length: int, prompt: int) -> int:
        return length - 1

    def share(self, length: int, prompt: int) -> int:
        return length - max(prompt, 1)

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Which head predicts is told by how far ahead: head k, k + 1."""
        at = torch.arange(first_target(example) - 1, len(example.ids) - 1)
        ahead = torch.arange(2, self.heads + 2)[:, None].expand(-1, len(at))
        target = at + ahead
        fits = target < len(example.ids)
        weight = torch.diag(0.8 ** torch.arange(1, self.heads + 1, dtype=EXACT))[:, None].expand(-1, len(at), -1)
        return TrainingSequence(
            *clean_stream(example.ids[:-1]),
            at=at.expand(self.heads, -1)[fits],
            target=example.ids[target[fits]],
            weight=weight[fits],
            ahead=ahead[fits],
        )

    def attach(self, model: Model) -> None:
        model.requires_grad_(False)
        head = model.get_output_embeddings().weight
        model.medusa = torch.nn.ModuleList(ResidualHead(head) for _ in range(self.heads))

    def read(self, model: Model, hidden: Tensor, batch: Packed, teacher: TeacherOutput | None) -> Iterator[Reading]:
        for ahead, head in enumerate(model.medusa, start=2):
            rows = (batch.ahead == ahead).nonzero().squeeze(1)
            yield Reading(rows, head(hidden[rows]), head.head)

    def detach(self, model: Model) -> Mapping[str, Tensor]:
        heads: dict[str, Tensor] = model.medusa.state_dict()
        del model.medusa
        return heads


OBJECTIVES: Mapping[str, type[Objective]] = {kind.name: kind for kind in (Ar, Mars, BlockDiffusion, Draft, Medusa)}


def losses(
    objective: Objective, model: Model, hidden: Tensor, batch: Packed, teacher: TeacherOutput | None = None
) -> Losses:
    """The objective's loss from the hidden states (N, H) of the tokens that predict."""
    totals, parts = [], []
    for rows, states, head, teacher_output in objective.read(model, hidden, batch, teacher):
        total, terms = linear_cross_entropy(states, head, batch.target[rows], batch.weight[rows], teacher_output)
        totals.append(total)
        parts.append(terms)
    return Losses(torch.stack(totals).sum(), torch.stack(parts).sum(0))

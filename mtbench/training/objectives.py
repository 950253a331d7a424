"""Training objectives: the predictions that a checkpoint learns, and their context.

An objective is a small frozen class whose fields are its options. It builds the training sequence of one conversation
(mtbench/training/packing.py) and is independent of packing, attention, optimizer and devices. Sources: MARS (Jin, Wang,
Luo, Sun, arXiv 2604.07023) and its released code, which is more exact than its text; BD3-LM (arXiv 2503.09573); Medusa
(arXiv 2401.10774).

Letters: L tokens of a conversation, B block size, N predictions, H hidden size, V vocabulary, P parts of the loss.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from mtbench.models.medusa_heads import ResidualHead
from mtbench.options import option
from mtbench.options.common import OBJECTIVE
from mtbench.training.linear_cross_entropy import TeacherOutput, linear_cross_entropy
from mtbench.training.packing import Example, Examples, Packed, Stream, TrainingSequence

EXACT = torch.float64  # of weights: a mean's 1/n is not exact in float32
LEAST_TIME = 1e-3  # of the diffusion times, which are drawn from (LEAST_TIME, 1)

Model = Any  # a causal language model of transformers
# Where the modules are that an objective adds: in a file of their own beside the trained model, in a checkpoint of
# their own, or among the weights in a copy of the base.
Stored = Literal["beside", "alone", "inside"]


class Special(NamedTuple):
    """Special token ids that an objective may put into a sequence, and the conversations that it learns."""

    mask: int | None
    end: int
    examples: Examples | None = None


class Losses(NamedTuple):
    """`total` is differentiated; `parts` (P,) are its terms, detached."""

    total: Tensor  # ()
    parts: Tensor  # (P,)


class TargetStates(NamedTuple):
    """The result of one forward pass of the model for a batch."""

    predicting: Tensor  # (N, H) last hidden states of the predicting tokens
    features: Mapping[int, Tensor]  # tap -> (R, T, H): the hidden states that the objective requested


class HeadInput(NamedTuple):
    """The input of one LM head: the predictions made by it, their hidden states, its matrix, a teacher's output.

    A head of a trimmed vocabulary names the token id of each row. It leaves out predictions of other
    tokens, and learns from a teacher.
    """

    rows: Tensor | slice  # indices into the batch's N predictions
    hidden: Tensor  # (n, H)
    head: Tensor  # (V, H)
    teacher_output: TeacherOutput | None = None  # of as many tokens
    ids: Tensor | None = None  # (V,); None: 0, 1, …


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The interface of an objective. `name` is its command, `parts` are the named terms of its loss."""

    name: ClassVar[str]
    panel: ClassVar[str] = OBJECTIVE  # of its options, in `--help`
    needs_mask: ClassVar[bool] = False
    freezes_model: ClassVar[bool] = False  # only added modules learn
    taught_by_base: ClassVar[bool] = False  # its teacher is the base as it was, if no other is named
    stored: ClassVar[Stored] = "beside"
    role: ClassVar[str]  # role of its checkpoints in a family

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,)

    @property
    def needs_teacher(self) -> bool:
        return self.taught_by_base

    def max_fed_tokens(self, length: int, prompt: int) -> int:
        """Return an upper bound of the tokens fed for a conversation of `length` tokens: here all but the last."""
        return length - 1

    def divisor_share(self, length: int, prompt: int) -> int:
        """Return what a conversation adds to the divisor of a step's loss.

        1 makes the loss a mean over conversations; the number of labels makes it a mean over tokens.
        """
        return 1

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Build the training sequence of one conversation. Its weights are not yet divided by the step's divisor."""
        raise NotImplementedError

    def attach(self, model: Model, special: Special) -> None:
        """Before training: add the objective's modules to the model and freeze the parameters it must not change."""

    def note(self, model: Model, data: Sequence[Examples]) -> str | None:
        """Return a message before training, given the training and the held-out conversations."""
        return None

    def taps(self, model: Model) -> tuple[int, ...]:
        """Return the hidden states of all tokens that it needs, numbered as transformers' `hidden_states`."""
        return ()

    def head_inputs(
        self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None
    ) -> Iterator[HeadInput]:
        """Yield the input of each head for all predictions."""
        yield HeadInput(slice(None), states.predicting, model.get_output_embeddings().weight, teacher)

    def read_by_teacher(self, model: Model, states: TargetStates, batch: Packed) -> Packed:
        """Return the batch that a teacher reads, given the model's own states: here the same."""
        return batch

    def losses(self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None = None) -> Losses:
        """Return the loss of a batch: the cross-entropy of every head's predictions."""
        totals, parts = [], []
        for rows, hidden, head, teacher_output, *_ in self.head_inputs(model, states, batch, teacher):
            total, terms = linear_cross_entropy(hidden, head, batch.target[rows], batch.weight[rows], teacher_output)
            totals.append(total)
            parts.append(terms)
        return Losses(torch.stack(totals).sum(), torch.stack(parts).sum(0))

    def detach(self, model: Model) -> Mapping[str, Tensor]:
        """After training: remove the added modules; return their tensors by the names that they are stored by."""
        return {}

    def checkpoint_config(self, model: Model) -> Mapping[str, Any]:
        """Return the config.json of modules stored alone; for those stored inside, the entries for the base's."""
        return {}


def clean_stream(ids: Tensor) -> Stream:
    """Return the text unchanged, every token attending to itself and to all tokens before it."""
    position = torch.arange(len(ids))
    return Stream(ids, position, torch.zeros_like(position), position + 1, torch.zeros_like(position))


def joined(*streams: Stream) -> Stream:
    return Stream(*(torch.cat(columns) for columns in zip(*streams, strict=True)))


def block_start(position: Tensor, first: int, size: int) -> Tensor:
    """Return the first position of each position's block; blocks are counted from `first`."""
    return (position - first) // size * size + first


def full_blocks(length: int, size: int) -> int:
    """Return `length` rounded up to whole blocks."""
    return -(-length // size) * size


def filled(ids: Tensor, size: int, end: int) -> Tensor:
    """Append end tokens up to the end of the last block. They are labels, as in the released code."""
    return torch.nn.functional.pad(ids, (0, -len(ids) % size), value=end)


def first_target(prompt: int) -> int:
    """Return the index of the first label. Token 0 is never a label, because no token precedes it."""
    return max(prompt, 1)


@dataclass(frozen=True, kw_only=True)
class Ar(Objective):
    """Next-token training on the last assistant turn (stage 1 of the MARS paper). Mean over labelled tokens."""

    name: ClassVar[str] = "ar"
    role: ClassVar[str] = "ar"

    def divisor_share(self, length: int, prompt: int) -> int:
        return length - first_target(prompt)

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        target = torch.arange(first_target(example.prompt), len(example.ids))
        return TrainingSequence(
            *clean_stream(example.ids[:-1]),
            predictor=target - 1,
            target=example.ids[target],
            weight=torch.ones(len(target), 1, dtype=EXACT),
            ahead=torch.ones_like(target),
        )


@dataclass(frozen=True, kw_only=True)
class Mars(Objective):
    """Masked blocks beside the clean text (stage 2 of the MARS paper). Mean over tokens, then over conversations.

    `released`, as the authors' code: blocks start at position 0, the noisy copy of a block shows its prompt tokens, and
    every output predicts the next token. So the last mask of a block predicts the first token of the next block.
    `anchored`, as in decoding: blocks start at the answer, and the last clean token and B-1 masks predict a block,
    which makes equations 4 and 6 of the paper true. The anchor is the clean stream's own token: a noisy copy of it
    would attend to the same keys and predict the same.
    """

    name: ClassVar[str] = "mars"
    role: ClassVar[str] = "mars"
    needs_mask: ClassVar[bool] = True

    block_size: int = option(4, "B: tokens of a block", low=2)
    layout: Literal["released", "anchored"] = option(
        "released", "where blocks start and which token predicts their first token"
    )
    ar_weight: float = option(1.0, "weight of the next-token loss; 0 turns it off (without SFT loss)", low=0)
    timestep_weight: bool = option(False, "a random 1/t per conversation, as in the released ablation without SFT loss")

    @property
    def parts(self) -> tuple[str, ...]:
        return ("mask", "ar") if self.ar_weight else ("mask",)

    def max_fed_tokens(self, length: int, prompt: int) -> int:
        start = first_target(prompt)
        if self.layout == "anchored":
            after_start = length - 1 - start
            return length - 1 + after_start - after_start // self.block_size
        full = full_blocks(length, self.block_size)
        return full - 1 + full - 1 - start

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Build a clean stream and one mask for each target whose predecessor is unknown.

        The clean stream predicts all other targets. The released code shows a mask the prompt tokens of its own block
        as noisy copies; here the mask attends to the same tokens in the clean stream.
        """
        assert special.mask is not None
        anchors = 1 if self.layout == "anchored" else 0  # clean tokens at the start of a block's window
        start = first_target(example.prompt)
        first = start - 1 if anchors else 0
        ids = example.ids if anchors else filled(example.ids, self.block_size, special.end)

        position = torch.arange(start, len(ids) - 1)
        position = position[(position - first) % self.block_size >= anchors]
        begin = block_start(position, first, self.block_size)
        known = (begin + anchors).clamp(min=start)
        segment = (begin - first) // self.block_size + 1
        noisy = Stream(torch.full_like(position, special.mask), position, segment, known, position)

        target, end = torch.arange(start, len(ids)), len(example.ids)
        weights, by_clean = self._weights(position + 1 - start, len(target))
        clean_target = target[by_clean]
        clean_length = int(clean_target.max())
        if len(known):
            clean_length = max(clean_length, int(known.max()))
        if self.timestep_weight:
            weights[:, 0] /= draw_time(random) + 1e-6
        return TrainingSequence(
            *joined(clean_stream(ids[:clean_length]), noisy),
            predictor=torch.cat([clean_length + torch.arange(len(position)), clean_target - 1]),
            target=torch.cat([ids[position + 1], ids[clean_target]]),
            weight=weights,
            ahead=torch.cat([(position + 2 - known) * (position + 1 < end), (clean_target < end).long()]),
        )

    def _weights(self, masked: Tensor, targets: int) -> tuple[Tensor, Tensor]:
        """Return the weights (N, P) of masks, then of clean tokens, and which targets (bool) clean tokens predict.

        `masked`: which of the `targets` targets a mask predicts. Without a next-token loss the clean stream predicts
        only the others.
        """
        not_masked = torch.ones(targets, dtype=EXACT)
        not_masked[masked] = 0
        clean = torch.stack([not_masked, torch.full_like(not_masked, self.ar_weight)], 1)[:, : len(self.parts)]
        by_clean = clean.sum(1) > 0
        mask = torch.eye(2, dtype=EXACT)[0].expand(len(masked), 2)[:, : len(self.parts)]
        return torch.cat([mask, clean[by_clean]]) / targets, by_clean


def draw_time(random: torch.Generator) -> float:
    """Draw a time of the masking process, uniform in (LEAST_TIME, 1)."""
    return LEAST_TIME + (1 - LEAST_TIME) * torch.rand((), generator=random).item()


@dataclass(frozen=True, kw_only=True)
class BlockDiffusion(Objective):
    """BD3-LM, the baseline of the MARS paper: a time t per conversation, each labelled token masked with probability t.

    Cross-entropy of the masked tokens, weighted by 1/t. Attention inside a block is bidirectional, in the clean stream
    too; every output predicts the next token. Mean over labelled tokens, then over conversations.
    """

    name: ClassVar[str] = "block-diffusion"
    role: ClassVar[str] = "block_diffusion"
    needs_mask: ClassVar[bool] = True

    block_size: int = option(4, "B: tokens of a block", low=2)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("mask",)

    def max_fed_tokens(self, length: int, prompt: int) -> int:
        full = full_blocks(length, self.block_size)
        before = (first_target(prompt) - 1) // self.block_size * self.block_size
        return full - self.block_size + full - before

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        assert special.mask is not None
        size, start = self.block_size, first_target(example.prompt)
        ids = filled(example.ids, size, special.end)
        labels = torch.arange(start, len(ids))
        time = draw_time(random)
        masked = labels[torch.rand(len(labels), generator=random) < time]

        first = (start - 1) // size * size
        position = torch.arange(first, len(ids))
        begin = block_start(position, 0, size)
        noised_ids = ids.index_fill(0, masked, special.mask)[position]
        noisy = Stream(noised_ids, position, (begin - first) // size + 1, begin, begin + size - 1)

        clean_position = torch.arange(len(ids) - size)  # no token attends to the last block's clean copy
        zero = torch.zeros_like(clean_position)
        context = block_start(clean_position, 0, size) + size
        clean = Stream(ids[clean_position], clean_position, zero, context, zero)
        return TrainingSequence(
            *joined(clean, noisy),
            predictor=len(clean_position) + masked - 1 - first,
            target=ids[masked],
            weight=torch.full((len(masked), 1), 1 / (time * len(labels)), dtype=EXACT),
            ahead=(masked + 1 - block_start(masked, 0, size).clamp(min=start)) * (masked < len(example.ids)),
        )


@dataclass(frozen=True, kw_only=True)
class Draft(Ar):
    """A smaller model that drafts tokens for a target: trained as `ar`, or distilled from a teacher's distribution."""

    name: ClassVar[str] = "draft"
    role: ClassVar[str] = "draft"

    distil: Literal["none", "logits"] = option("none", "logits: learn the teacher's distribution instead of the text")

    @property
    def needs_teacher(self) -> bool:
        return self.distil == "logits"


@dataclass(frozen=True, kw_only=True)
class Medusa(Objective):
    """Medusa-1: the target is frozen, K residual heads learn the tokens 2 … K+1 ahead (arXiv 2401.10774, 2.2.1).

    The loss of head k has the weight 0.8 to the power of k. Mean over labelled tokens.
    """

    name: ClassVar[str] = "medusa"
    role: ClassVar[str] = "medusa"
    freezes_model: ClassVar[bool] = True

    heads: int = option(4, "K: number of heads", low=1)

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(f"head_{k}" for k in range(1, self.heads + 1))

    def divisor_share(self, length: int, prompt: int) -> int:
        return length - first_target(prompt)

    def build(self, example: Example, special: Special, random: torch.Generator) -> TrainingSequence:
        """Build the sequence; `ahead` identifies the head that makes a prediction: head k predicts k + 1 ahead."""
        predictor = torch.arange(first_target(example.prompt) - 1, len(example.ids) - 1)
        ahead = torch.arange(2, self.heads + 2)[:, None].expand(-1, len(predictor))
        target = predictor + ahead
        exists = target < len(example.ids)
        head_weights = torch.diag(0.8 ** torch.arange(1, self.heads + 1, dtype=EXACT))
        weight = head_weights[:, None].expand(-1, len(predictor), -1)
        return TrainingSequence(
            *clean_stream(example.ids[:-1]),
            predictor=predictor.expand(self.heads, -1)[exists],
            target=example.ids[target[exists]],
            weight=weight[exists],
            ahead=ahead[exists],
        )

    def attach(self, model: Model, special: Special) -> None:
        model.requires_grad_(False)
        head = model.get_output_embeddings().weight
        model.medusa = torch.nn.ModuleList(ResidualHead(head) for _ in range(self.heads))

    def head_inputs(
        self, model: Model, states: TargetStates, batch: Packed, teacher: TeacherOutput | None
    ) -> Iterator[HeadInput]:
        for ahead, head in enumerate(model.medusa, start=2):
            rows = (batch.ahead == ahead).nonzero().squeeze(1)
            yield HeadInput(rows, head(states.predicting[rows]), head.head)

    def detach(self, model: Model) -> Mapping[str, Tensor]:
        heads: dict[str, Tensor] = model.medusa.state_dict()
        del model.medusa
        return heads

"""Training objectives: what a checkpoint is taught to predict, and from what it may see.

An objective is a small frozen class: how long its sequences must be (`multiple`) and its loss on a batch. It knows
nothing of data, optimizer or devices. `mars` follows the released code of MARS (Jin, Wang, Luo, Sun, arXiv
2604.07023, sections 3.2 and 3.3), which is more exact than the text in three places: the noisy copy keeps the prompt
visible, blocks are counted from sequence position 0, and the logits of both copies are shifted by one together.

Letters: R rows, L tokens, B block size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

IGNORE = -100  # the label of a token without loss

Model = Any  # a causal language model of transformers


class Example(NamedTuple):
    """One tokenised conversation; `labels` are the ids of the last assistant turn and IGNORE before it."""

    input_ids: list[int]
    labels: list[int]


class Batch(NamedTuple):
    input_ids: Tensor  # (R, L)
    labels: Tensor  # (R, L)


class Losses(NamedTuple):
    """`total` is differentiated; `parts` are its named terms, detached, for the log."""

    total: Tensor  # ()
    parts: dict[str, Tensor]


class Objective(Protocol):
    name: ClassVar[str]

    @property
    def multiple(self) -> int:
        """Every example is padded with the end token, with loss, to a multiple of this many tokens."""

    def __call__(self, model: Model, batch: Batch) -> Losses: ...


def collate(examples: Sequence[Example], *, multiple: int, end_id: int, pad_id: int) -> Batch:
    """Lay examples side by side: first end tokens with loss up to `multiple`, then pad tokens without."""
    rows = []
    for ids, labels in examples:
        ends = [end_id] * (-len(ids) % multiple)
        rows.append((ids + ends, labels + ends))
    length = max(len(ids) for ids, _ in rows)
    return Batch(
        torch.tensor([ids + [pad_id] * (length - len(ids)) for ids, _ in rows]),
        torch.tensor([labels + [IGNORE] * (length - len(labels)) for _, labels in rows]),
    )


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of every label, predicted one position before it; 0 where there is none. (R, L, V) -> (R, L-1)"""
    flat = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="none")
    return flat.view(labels.shape[0], -1)


@lru_cache(maxsize=64)
def two_stream_mask(length: int, block_size: int) -> Tensor:
    """Who sees whom in [noisy | clean], (2L, 2L) of bool; paper Eq. 2.

    clean -> clean: itself and earlier. noisy -> noisy: itself and earlier in its block. noisy -> clean: the blocks
    before its own. clean -> noisy: nothing. Padding needs no rule: it stands on the right, where nobody looks.
    """
    position = torch.arange(length)
    block = position // block_size
    earlier = position[:, None] >= position
    noisy = torch.cat([earlier & (block[:, None] == block), block[:, None] > block], 1)
    clean = torch.cat([torch.zeros_like(earlier), earlier], 1)
    return torch.cat([noisy, clean])


@dataclass(frozen=True, slots=True)
class Ar:
    """Next-token prediction of the last assistant turn, mean over the labelled tokens (stage 1 of the paper)."""

    name: ClassVar[str] = "ar"
    multiple: ClassVar[int] = 1

    def __call__(self, model: Model, batch: Batch) -> Losses:
        losses = token_losses(model(input_ids=batch.input_ids, use_cache=False).logits, batch.labels)
        total = losses.sum() / (batch.labels[:, 1:] != IGNORE).sum()
        return Losses(total, {"loss_ar": total.detach()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Mars:
    """Masked blocks beside the clean text, one forward for both (stage 2 of the paper, as released).

    The noisy copy has every labelled token masked. Each copy's logits predict the next token, so the first target of
    a block is predicted from the last mask of the block before. Mean over a row's labelled tokens, then over rows.
    """

    name: ClassVar[str] = "mars"
    block_size: int
    mask_id: int

    @property
    def multiple(self) -> int:
        return self.block_size

    def __call__(self, model: Model, batch: Batch) -> Losses:
        ids, labels = batch
        rows, length = ids.shape
        noisy = torch.where(labels == IGNORE, ids, self.mask_id)
        skip = self._unused(labels)
        positions = torch.arange(length, device=ids.device)
        sees = two_stream_mask(length, self.block_size)[skip:, skip:].to(ids.device)
        logits = model(
            input_ids=torch.cat([noisy[:, skip:], ids], 1),
            position_ids=torch.cat([positions[skip:], positions]).expand(rows, -1),  # (R, 2L - skip)
            attention_mask=additive(sees, model.dtype).expand(rows, 1, -1, -1),
            use_cache=False,
        ).logits  # (R, 2L - skip, V)
        count = (labels[:, 1:] != IGNORE).sum(1)
        mask = (token_losses(logits[:, :-length], labels[:, skip:]).sum(1) / count).mean()
        ar = (token_losses(logits[:, -length:], labels).sum(1) / count).mean()
        return Losses(mask + ar, {"loss_mask": mask.detach(), "loss_ar": ar.detach()})

    def _unused(self, labels: Tensor) -> int:
        """How many leading noisy tokens no prediction of any row rests on: the blocks before the first target's."""
        first_target = int((labels != IGNORE).long().argmax(1).min())
        return max(first_target - 1, 0) // self.block_size * self.block_size


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a query sees a key, the least number of `dtype` where not: the form every attention of ours takes."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill(~sees, torch.finfo(dtype).min)

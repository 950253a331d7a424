"""Tokenised conversations in memory, and how many of them were dropped."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple, overload

import torch
from torch import Tensor

from mtbench.training.packing import Example


class Counts(NamedTuple):
    """How many conversations were read, dropped and cut."""

    read: int
    empty: int  # dropped: a turn has no content
    long: int  # dropped: the prompt alone reaches the maximum length
    cut: int  # kept, with the end of the answer cut off

    @property
    def dropped(self) -> int:
        return self.empty + self.long

    def summary(self, max_length: int) -> str:
        """Return the counts as one line of text.

        >>> Counts(7473, 0, 12, 3).summary(512)
        '7,473 conversations: 12 dropped (prompt of 512 tokens or more), 3 cut'
        """
        reasons = {f"prompt of {max_length:,} tokens or more": self.long, "a turn without content": self.empty}
        dropped = [f"{count:,} dropped ({reason})" for reason, count in reasons.items() if count]
        if not dropped:
            dropped = ["0 dropped"]
        return f"{self.read:,} conversations: {', '.join([*dropped, f'{self.cut:,} cut'])}"


class Examples(Sequence[Example]):
    """n tokenised conversations in one flat tensor of tokens. Selections made by `take` share the tensor."""

    def __init__(self, ids: Tensor, starts: Tensor, lengths: Tensor, prompts: Tensor) -> None:
        self.ids = ids  # (tokens,) int32
        self.starts = starts  # (n,) index of each conversation's first token
        self.lengths = lengths  # (n,) number of tokens
        self.prompts = prompts  # (n,) number of leading tokens without loss

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> "Examples": ...
    def __getitem__(self, index: int | slice) -> "Example | Examples":
        if isinstance(index, slice):
            return self.take(index)
        start = int(self.starts[index])
        return Example(self.ids[start : start + int(self.lengths[index])].long(), int(self.prompts[index]))

    def take(self, indices: Sequence[int] | Tensor | slice) -> "Examples":
        """Return the examples at `indices`, in that order, without copying tokens."""
        if isinstance(indices, slice):
            indices = range(*indices.indices(len(self)))
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return Examples(self.ids, self.starts[chosen], self.lengths[chosen], self.prompts[chosen])

    @cached_property
    def sha256(self) -> str:
        """The hash of lengths, prompts and token ids, in order."""
        digest = hashlib.sha256(self.lengths.numpy().tobytes() + self.prompts.numpy().tobytes())
        tokens = self.ids.numpy().data
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            digest.update(tokens[start : start + length])
        return digest.hexdigest()


def contiguous_examples(tokens: Tensor, lengths: Tensor, prompts: Tensor) -> Examples:
    """Return conversations whose tokens follow one another in `tokens`."""
    return Examples(tokens, lengths.cumsum(0) - lengths, lengths, prompts)

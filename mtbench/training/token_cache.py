"""Tokenised conversations, and their cache on disk.

One file per data source. Its name is a hash of everything its tokens depend on: content, not names and places. A
damaged or missing file is made again.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtbench import files
from mtbench.errors import UserError
from mtbench.evaluation.suite import Messages
from mtbench.files import cache_home
from mtbench.training.packing import Example

FORMAT = 1  # of the stored tokens; a new number invalidates all files


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
        self.ids = ids  # (tokens,) int32; may be memory-mapped
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


def concatenate(sources: Sequence[Examples]) -> Examples:
    """Return all examples, source by source. A single source is returned as it is, without copying."""
    if len(sources) == 1:
        return sources[0]
    offsets = [0, *accumulate(len(source.ids) for source in sources[:-1])]
    return Examples(
        torch.cat([source.ids for source in sources]),
        torch.cat([source.starts + offset for source, offset in zip(sources, offsets, strict=True)]),
        torch.cat([source.lengths for source in sources]),
        torch.cat([source.prompts for source in sources]),
    )


# --- The cache ----------------------------------------------------------------------------------------------------


def token_file(conversations: Iterable[Messages | None], tokenizer: Any, max_length: int) -> Path:
    """Return the cache file of these conversations (None: a turn is empty). It can be deleted at any time."""
    digest = hashlib.sha256(json.dumps([FORMAT, max_length, _identity(tokenizer)], sort_keys=True).encode())
    for turns in conversations:
        plain = None if turns is None else [[turn["role"], turn["content"]] for turn in turns]
        digest.update(json.dumps(plain).encode() + b"\n")
    return cache_home() / "tokens" / f"{digest.hexdigest()}.safetensors"


def _identity(tokenizer: Any) -> list[Any]:
    """Return everything the tokens depend on, apart from truncation and padding, which are not used."""
    try:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    except AttributeError:  # a tokenizer written in Python
        rules = tokenizer.get_vocab()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [type(tokenizer).__qualname__, rules, tokenizer.chat_template, special]


def load(file: Path) -> tuple[Examples, Counts] | None:
    """Return the stored examples, memory-mapped; None if the file is missing or damaged."""
    try:
        with safe_open(file, "pt") as stored:
            metadata = stored.metadata()
            examples = contiguous_examples(*(stored.get_tensor(name) for name in ("ids", "lengths", "prompts")))
        counts = Counts(*(int(metadata[name]) for name in Counts._fields))
        return (examples, counts) if examples.sha256 == metadata["sha256"] else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def store(file: Path, examples: Examples, counts: Counts) -> None:
    """Store the examples atomically. If the disk refuses it, nothing is stored: the tokens are made again next time."""
    metadata = {name: str(value) for name, value in counts._asdict().items()} | {"sha256": examples.sha256}
    tensors = {"ids": examples.ids, "lengths": examples.lengths, "prompts": examples.prompts}
    try:
        with files.atomic_write(file) as temporary:
            save_file(tensors, temporary, metadata=metadata)
    except (UserError, SafetensorError):
        pass

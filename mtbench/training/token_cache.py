"""Conversations as tokens, and how they are kept for the next time.

One file per source, named after all that its tokens depend on: content, not names and places. What is spoilt, or could
not be written, is made again.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mtbench.cache import cache_home
from mtbench.evaluation.suite import Messages
from mtbench.training.packing import Example

FORMAT = 1  # of the stored tokens; a new one makes all of them anew


class Counts(NamedTuple):
    """What became of the conversations that were read."""

    read: int
    empty: int  # dropped: a turn has no content
    long: int  # dropped: the prompt fills the length by itself
    cut: int  # kept, with the end of the answer cut off

    @property
    def dropped(self) -> int:
        return self.empty + self.long

    def summary(self, max_length: int) -> str:
        """A line for people.

        >>> Counts(7473, 0, 12, 3).summary(512)
        '7,473 conversations: 12 dropped (prompt of 512 tokens or more), 3 cut'
        """
        reasons = {f"prompt of {max_length:,} tokens or more": self.long, "a turn without content": self.empty}
        dropped = [f"{count:,} dropped ({reason})" for reason, count in reasons.items() if count]
        return f"{self.read:,} conversations: {', '.join([*(dropped or ['0 dropped']), f'{self.cut:,} cut'])}"


class Examples(Sequence[Example]):
    """Tokenised conversations, n of them, over one flat tensor of tokens that `take` shares."""

    def __init__(self, ids: Tensor, starts: Tensor, lengths: Tensor, prompts: Tensor) -> None:
        self.ids = ids  # (tokens,) int32, maybe in a mapped file
        self.starts = starts  # (n,) where in them each begins
        self.lengths = lengths  # (n,) its tokens
        self.prompts = prompts  # (n,) its leading tokens without loss

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
        """Some of them, in that order. Copies no tokens."""
        if isinstance(indices, slice):
            indices = range(*indices.indices(len(self)))
        chosen = torch.as_tensor(indices, dtype=torch.long)
        return Examples(self.ids, self.starts[chosen], self.lengths[chosen], self.prompts[chosen])

    @cached_property
    def sha256(self) -> str:
        """Of lengths, prompts and token ids, in order."""
        digest = hashlib.sha256(self.lengths.numpy().tobytes() + self.prompts.numpy().tobytes())
        tokens = self.ids.numpy().data
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            digest.update(tokens[start : start + length])
        return digest.hexdigest()


def lined_up(tokens: Tensor, lengths: Tensor, prompts: Tensor) -> Examples:
    """Conversations that lie one behind the other."""
    return Examples(tokens, lengths.cumsum(0) - lengths, lengths, prompts)


def joined(sources: Sequence[Examples]) -> Examples:
    """All of them, source by source. One alone stays where it lies, maybe in a mapped file."""
    if len(sources) == 1:
        return sources[0]
    begins = [0, *accumulate(len(source.ids) for source in sources[:-1])]
    return Examples(
        torch.cat([source.ids for source in sources]),
        torch.cat([source.starts + begin for source, begin in zip(sources, begins, strict=True)]),
        torch.cat([source.lengths for source in sources]),
        torch.cat([source.prompts for source in sources]),
    )


# --- Kept ---------------------------------------------------------------------------------------------------------


def token_file(conversations: Iterable[Messages | None], tokenizer: Any, max_length: int) -> Path:
    """Where the tokens of these conversations (None: a turn is empty) are kept. It can be deleted at any time."""
    digest = hashlib.sha256(json.dumps([FORMAT, max_length, _identity(tokenizer)], sort_keys=True).encode())
    for turns in conversations:
        plain = None if turns is None else [[turn["role"], turn["content"]] for turn in turns]
        digest.update(json.dumps(plain).encode() + b"\n")
    return cache_home() / "tokens" / f"{digest.hexdigest()}.safetensors"


def _identity(tokenizer: Any) -> list[Any]:
    """What a tokenizer makes of texts and turns, apart from cutting and filling, which it is not asked for."""
    try:
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules = {name: rule for name, rule in rules.items() if name not in ("truncation", "padding")}
    except AttributeError:  # one written in Python
        rules = tokenizer.get_vocab()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return [type(tokenizer).__qualname__, rules, tokenizer.chat_template, special]


def load(file: Path) -> tuple[Examples, Counts] | None:
    """What was kept, mapped from its file; None if there is nothing or it is not what was written."""
    try:
        with safe_open(file, "pt") as stored:
            about = stored.metadata()
            examples = lined_up(*(stored.get_tensor(name) for name in ("ids", "lengths", "prompts")))
        counts = Counts(*(int(about[name]) for name in Counts._fields))
        return (examples, counts) if examples.sha256 == about["sha256"] else None
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None


def store(file: Path, examples: Examples, counts: Counts) -> None:
    """Written aside, then renamed. Where that cannot be done, the tokens are made again the next time."""
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    about = {name: str(value) for name, value in counts._asdict().items()} | {"sha256": examples.sha256}
    tensors = {"ids": examples.ids, "lengths": examples.lengths, "prompts": examples.prompts}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            save_file(tensors, partial, metadata=about)
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
    except (OSError, SafetensorError):
        pass

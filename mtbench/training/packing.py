"""Tokenised conversations, training sequences, their packing into rows, and the attention mask of a packed batch.

An objective builds one training sequence per conversation; `pack` puts sequences into rows. A clean stream holds the
text unchanged; the noisy segments after it hold blocks of the text with mask tokens, at the same positions (Block
Diffusion, arXiv 2503.09573; MARS, arXiv 2604.07023, section 3.2). One rule defines which key a query attends to. A CPU
evaluates it for every pair of tokens (a dense mask), a GPU per tile of 128 x 128 tokens (FlexAttention).

Letters: L tokens of a conversation, T fed tokens, N predictions, P parts of a loss, R rows.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mtbench import kernels

PADDING = -1  # the document of padding tokens


class Example(NamedTuple):
    """One tokenised conversation. The tokens after the prompt are labels."""

    ids: Tensor  # (L,)
    prompt: int  # leading tokens without loss


class Examples(Sequence[Example]):
    """n tokenised conversations in one flat tensor of tokens. Selections made by `take` share the tensor."""

    def __init__(self, ids: Tensor, starts: Tensor, lengths: Tensor, prompts: Tensor) -> None:
        self.ids = ids  # (tokens,) int32
        self.starts = starts  # (n,) index of each conversation's first token
        self.lengths = lengths  # (n,) number of tokens
        self.prompts = prompts  # (n,) number of leading tokens without loss

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:  # type: ignore[override] # of slices, see `take`
        start = int(self.starts[index])
        return Example(self.ids[start : start + int(self.lengths[index])].long(), int(self.prompts[index]))

    def take(self, indices: Tensor) -> "Examples":
        """Return the examples at `indices`, in that order, without copying tokens."""
        return Examples(self.ids, self.starts[indices], self.lengths[indices], self.prompts[indices])

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


class Stream(NamedTuple):
    """Tokens to feed, and which keys each of them attends to."""

    ids: Tensor  # (T,)
    position: Tensor  # (T,) in the text
    segment: Tensor  # (T,) 0: the clean stream; k: the k-th noisy block
    context: Tensor  # (T,) attends to the clean tokens at positions below this one
    reach: Tensor  # (T,) in a noisy segment: attends to its own segment up to this position, inclusive


class TrainingSequence(NamedTuple):
    """One conversation as an objective feeds it: a stream, and the predictions made from it."""

    ids: Tensor  # (T,); this and the next four as in Stream
    position: Tensor
    segment: Tensor
    context: Tensor
    reach: Tensor
    predictor: Tensor  # (N,) index of the fed token whose hidden state predicts
    target: Tensor  # (N,) token id to predict
    weight: Tensor  # (N, P) float64, weight in each part of the loss
    ahead: Tensor  # (N,) distance from the last known token to the target; 1 is next-token prediction.
    # 0: the target fills up a block after the end of the text; evaluation ignores it


class Packed(NamedTuple):
    """A batch of rows, each with one or more conversations: the input of a forward pass in training."""

    ids: Tensor  # (R, T)
    position: Tensor  # (R, T)
    segment: Tensor  # (R, T)
    context: Tensor  # (R, T)
    reach: Tensor  # (R, T)
    document: Tensor  # (R, T) number of the conversation in its row, or PADDING
    predictor: Tensor  # (N,) index into the flattened (R, T)
    target: Tensor  # (N,)
    weight: Tensor  # (N, P)
    ahead: Tensor  # (N,)

    @property
    def pairs(self) -> Tensor:
        """The query-key pairs that attend, without padding, (): the work of one attention head."""
        noisy = (self.reach + 1 - self.context) * (self.segment != 0)
        return ((self.context + noisy) * (self.document != PADDING)).sum()


def pack(rows: Sequence[Sequence[TrainingSequence]], length: int, parts: int) -> Packed:
    """Put sequences into rows of `length` tokens each, for a loss of `parts` parts.

    The rest of a row is padding, which attends to padding only. Raises ValueError if a row's sequences do not fit.
    """

    def column(field: str, fill: int) -> Tensor:
        return torch.stack([_padded([getattr(sequence, field) for sequence in row], length, fill) for row in rows])

    document = [
        _padded([torch.full_like(sequence.ids, n) for n, sequence in enumerate(row)], length, PADDING) for row in rows
    ]
    empty = torch.empty(0, dtype=torch.long)
    sequences: list[TrainingSequence] = []
    predictors = [empty]
    for number, row in enumerate(rows):
        offset = number * length
        for sequence in row:
            sequences.append(sequence)
            predictors.append(sequence.predictor + offset)
            offset += len(sequence.ids)
        if offset > (number + 1) * length:
            raise ValueError(f"{offset - number * length} tokens do not fit into a row of {length}")
    no_weights = torch.empty(0, parts, dtype=torch.float64)
    return Packed(
        ids=column("ids", 0),
        position=column("position", 0),
        segment=column("segment", 1),
        context=column("context", 0),
        reach=column("reach", 0),
        document=torch.stack(document),
        predictor=torch.cat(predictors),
        target=torch.cat([empty, *(sequence.target for sequence in sequences)]),
        weight=torch.cat([no_weights, *(sequence.weight for sequence in sequences)]),
        ahead=torch.cat([empty, *(sequence.ahead for sequence in sequences)]),
    )


def _padded(pieces: Sequence[Tensor], length: int, fill: int) -> Tensor:
    joined = torch.cat([*pieces, torch.empty(0, dtype=torch.long)])
    return torch.nn.functional.pad(joined, (0, max(0, length - len(joined))), value=fill)


class AttentionMask:
    """The attention mask of a packed batch, in the form that mtbench/models/attention.py calls during a forward pass.

    A token attends, within its own conversation, to the clean stream below its `context` and to its own noisy segment
    up to its `reach`. With a sliding window, it attends only to keys less than that many positions before it.
    """

    def __init__(self, batch: Packed) -> None:
        self.batch = batch
        self._masks: dict[int | None, Any] = {}  # by sliding window: a bias tensor on a CPU, a block mask on a GPU

    def rule(self, sliding_window: int | None = None) -> Callable[[Any, Any, Any, Any], Tensor]:
        """Return FlexAttention's mask function `rule(r, head, q, k)`: may query q of row r attend to key k?"""
        _, position, segment, context, reach, document = self.batch[:6]

        def may_attend(r: Any, head: Any, q: Any, k: Any) -> Tensor:
            clean = (segment[r, k] == 0) & (position[r, k] < context[r, q])
            noisy = (segment[r, k] != 0) & (segment[r, k] == segment[r, q]) & (position[r, k] <= reach[r, q])
            allowed = (document[r, k] == document[r, q]) & (clean | noisy)
            if sliding_window is None:
                return allowed
            return allowed & (position[r, k] > position[r, q] - sliding_window)

        return may_attend

    def dense(self, sliding_window: int | None = None) -> Tensor:
        """Return the rule for every pair of tokens, (R, T, T) bool. A CPU uses it; tests compare the blocks with it."""
        rows, length = self.batch.ids.shape
        token = torch.arange(length, device=self.batch.ids.device)
        row = torch.arange(rows, device=token.device)[:, None, None]
        return self.rule(sliding_window)(row, None, token[:, None], token)

    def bias(self, group: int, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the rule as the additive bias of `kernels.attend_plain`, (R, 1, group·T, T)."""
        allowed = self.dense(sliding_window)
        bias = torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))
        return bias.repeat(1, group, 1)[:, None]

    def blocks(self, sliding_window: int | None = None) -> Any:
        """Return the rule as FlexAttention's block mask: which tiles of 128 x 128 tokens need work.

        Compiled layers are not compiled again for another batch: the code of the rule is the same, only its tensors
        differ.
        """
        rows, length = self.batch.ids.shape
        return create_block_mask(self.rule(sliding_window), rows, None, length, length, device=self.batch.ids.device)

    def prepare(self, sliding_windows: Iterable[int | None], group: int, dtype: torch.dtype) -> "AttentionMask":
        """Build the masks before the forward pass, one per sliding window of the model's layers.

        `group` query heads share a key head; `dtype` is that of the scores.
        """
        for window in set(sliding_windows):
            on_gpu = self.batch.ids.is_cuda
            self._masks[window] = self.blocks(window) if on_gpu else self.bias(group, window, dtype)
        return self

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Attention of query (R, H, T, d) to key and value (R, K, T, d): (R, T, H, d)."""
        mask = self._masks[sliding_window]
        if isinstance(mask, Tensor):
            return kernels.attend_plain(query, key, value, mask, scale, softcap)
        return attend_blocks(query, key, value, mask, scale, softcap)


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: Any, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """Compute `AttentionMask.attend` by FlexAttention, which skips tiles without any allowed pair.

    On a GPU it runs compiled, with the layer around it or alone: uncompiled FlexAttention materialises all scores.
    """

    def apply_softcap(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    compile_alone = query.is_cuda and not torch.compiler.is_compiling()
    attention = _compiled_flex_attention() if compile_alone else flex_attention
    score_mod = None if softcap is None else apply_softcap
    out: Tensor = attention(query, key, value, score_mod, blocks, scale, enable_gqa=True)
    return out.transpose(1, 2)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)

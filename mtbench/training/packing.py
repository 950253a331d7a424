"""How conversations are fed to a model in training: which tokens, what each of them sees, what is predicted from which.

An objective lays one conversation after another; rows are packed from what is laid. A clean stream holds the text as it
is, noisy segments behind it hold blocks of it with masks, at the same positions (Block Diffusion, arXiv 2503.09573;
MARS, arXiv 2604.07023, section 3.2). One rule says who sees whom, and is read twice: position by position on a CPU,
in blocks by FlexAttention on a GPU.

Letters: L tokens of a conversation, T fed tokens, N predictions, P parts of a loss, R rows.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from mtbench.models import kernels

PADDING = -1  # the document of a row's unused end


class Example(NamedTuple):
    """One tokenised conversation. The tokens behind the prompt are to be learned."""

    ids: Tensor  # (L,)
    prompt: int  # leading tokens without loss


class Stream(NamedTuple):
    """Tokens to feed, and what each of them sees."""

    ids: Tensor  # (T,)
    place: Tensor  # (T,) position in the text
    segment: Tensor  # (T,) 0: the clean stream; k: the k-th noisy block
    context: Tensor  # (T,) sees so many leading tokens of the clean stream
    reach: Tensor  # (T,) in a noisy segment: sees its own up to this place


class TrainingSequence(NamedTuple):
    """One conversation as an objective feeds it: a stream, and what is predicted from it."""

    ids: Tensor  # (T,), and so on as in Stream
    place: Tensor
    segment: Tensor
    context: Tensor
    reach: Tensor
    at: Tensor  # (N,) which fed token predicts
    target: Tensor  # (N,) what
    weight: Tensor  # (N, P) float64, what it counts in each part of the loss
    ahead: Tensor  # (N,) how far the target lies beyond the last token known there: 1 is next-token prediction;
    # 0: it lies behind the text's end, in what fills a block, and says nothing of what was learned


class Packed(NamedTuple):
    """Conversations side by side in rows: what a model's forward gets in training."""

    ids: Tensor  # (R, T)
    place: Tensor  # (R, T)
    segment: Tensor  # (R, T)
    context: Tensor  # (R, T)
    reach: Tensor  # (R, T)
    document: Tensor  # (R, T) which conversation of the row, or PADDING
    at: Tensor  # (N,) which fed token predicts, counted through all rows
    target: Tensor  # (N,)
    weight: Tensor  # (N, P)
    ahead: Tensor  # (N,)


def pack(rows: Sequence[Sequence[TrainingSequence]], length: int, parts: int) -> Packed:
    """Conversations in rows of `length` tokens each, for a loss of so many parts.

    What is left of a row is padding, which sees only padding. Raises ValueError if a row's conversations do not fit.
    """

    def column(field: str, fill: int) -> Tensor:
        return torch.stack([_filled([getattr(laid, field) for laid in row], length, fill) for row in rows])

    document = [_filled([torch.full_like(laid.ids, n) for n, laid in enumerate(row)], length, PADDING) for row in rows]
    nothing = torch.empty(0, dtype=torch.long)
    placed = []
    for number, row in enumerate(rows):
        begin = number * length
        for laid in row:
            placed.append((laid, begin))
            begin += len(laid.ids)
        if begin > (number + 1) * length:
            raise ValueError(f"{begin - number * length} tokens do not fit into a row of {length}")
    return Packed(
        ids=column("ids", 0),
        place=column("place", 0),
        segment=column("segment", 1),
        context=column("context", 0),
        reach=column("reach", 0),
        document=torch.stack(document),
        at=torch.cat([nothing, *(laid.at + begin for laid, begin in placed)]),
        target=torch.cat([nothing, *(laid.target for laid, _ in placed)]),
        weight=torch.cat([torch.empty(0, parts, dtype=torch.float64), *(laid.weight for laid, _ in placed)]),
        ahead=torch.cat([nothing, *(laid.ahead for laid, _ in placed)]),
    )


def _filled(pieces: Sequence[Tensor], length: int, fill: int) -> Tensor:
    joined = torch.cat([*pieces, torch.empty(0, dtype=torch.long)])
    return torch.nn.functional.pad(joined, (0, max(0, length - len(joined))), value=fill)


class AttentionMask:
    """Who sees whom in a packed batch: what the attention function of mtbench/models/runner.py goes by, in training.

    A token sees, of its own conversation, the clean stream as far as its `context`, and its own noisy segment as far
    as its `reach`; with a sliding window, only what stands less than that many positions behind it.
    """

    def __init__(self, batch: Packed) -> None:
        self.batch = batch
        self._seen: dict[int | None, Any] = {}

    def rule(self, sliding_window: int | None = None) -> Callable[[Any, Any, Any, Any], Tensor]:
        """May query token q of row r see key token k? As FlexAttention asks it: `rule(r, head, q, k)`, of indices."""
        _, place, segment, context, reach, document = self.batch[:6]

        def sees(r: Any, head: Any, q: Any, k: Any) -> Tensor:
            clean = (segment[r, k] == 0) & (place[r, k] < context[r, q])
            noisy = (segment[r, k] != 0) & (segment[r, k] == segment[r, q]) & (place[r, k] <= reach[r, q])
            seen = (document[r, k] == document[r, q]) & (clean | noisy)
            return seen if sliding_window is None else seen & (place[r, k] > place[r, q] - sliding_window)

        return sees

    def dense(self, sliding_window: int | None = None) -> Tensor:
        """The rule at every pair of tokens, (R, T, T) of bool: for a CPU, and to hold the blocks against."""
        rows, length = self.batch.ids.shape
        token = torch.arange(length, device=self.batch.ids.device)
        row = torch.arange(rows, device=token.device)[:, None, None]
        return self.rule(sliding_window)(row, None, token[:, None], token)

    def bias(self, group: int, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        """The rule as what `kernels.attend_plain` adds to scores, (R, 1, group·T, T)."""
        seen = self.dense(sliding_window)
        bias = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, float("-inf"))
        return bias.repeat(1, group, 1)[:, None]

    def blocks(self, sliding_window: int | None = None) -> Any:
        """The rule as FlexAttention wants it: which tiles of 128 x 128 tokens need work.

        Every batch has a rule of its own, yet compiled layers take them all: they are the same code over other tensors.
        """
        rows, length = self.batch.ids.shape
        return create_block_mask(self.rule(sliding_window), rows, None, length, length, device=self.batch.ids.device)

    def prepare(self, sliding_windows: Iterable[int | None], group: int, dtype: torch.dtype) -> "AttentionMask":
        """Make what attention goes by ahead of the forward: for every window of the model's layers.

        `group` query heads share a key head; `dtype` is that of the scores.
        """
        for window in set(sliding_windows):
            on_gpu = self.batch.ids.is_cuda
            self._seen[window] = self.blocks(window) if on_gpu else self.bias(group, window, dtype)
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
        seen = self._seen[sliding_window]
        if isinstance(seen, Tensor):
            return kernels.attend_plain(query, key, value, seen, scale, softcap)
        return attend_blocks(query, key, value, seen, scale, softcap)


def attend_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: Any, scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """`AttentionMask.attend` by FlexAttention: tiles in which nobody sees anybody cost nothing.

    On a GPU it is compiled, with the layer around it or by itself: what is not compiled makes all scores at once.
    """

    def squash(score: Tensor, *_: Tensor) -> Tensor:
        assert softcap is not None
        return torch.tanh(score / softcap) * softcap

    alone = query.is_cuda and not torch.compiler.is_compiling()
    attention = _compiled_flex_attention() if alone else flex_attention
    squashed = None if softcap is None else squash
    out: Tensor = attention(query, key, value, squashed, blocks, scale, enable_gqa=True)
    return out.transpose(1, 2)


@cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention, dynamic=False)

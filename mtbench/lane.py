"""A lane: one model, its keys and values, its counters. Only a lane can run a forward.

Models come from transformers through its public interfaces: a cache object (`update`, `get_seq_length`) and an
attention function of our own. transformers builds no mask for a name it does not know,
hands keyword arguments of `model(...)` through to the attention function, and tells it each layer's sliding
window, so one function serves every decoder and every method runs the same code.

R = rows, W = positions fed, S = slots of the cache, V = slots in view, H = query heads, K = key heads, d = head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

if TYPE_CHECKING:
    from mtbench.models import Checkpoint

ATTENTION = "mtbench"
Visible = Callable[[Tensor, Tensor], Tensor]


def causal(query_position: Tensor, key_position: Tensor) -> Tensor:
    """A position sees itself and what came before it."""
    return key_position <= query_position


@dataclass(frozen=True, eq=False)
class Feed:
    """Where one forward's positions stand and what each of them sees.

    Pending tokens sit at their own positions. Guess g sits in slot `base + g` at position `base + offset[g]`;
    with `sees` (G, G) guess g sees guess h where `sees[g, h]`, without it `visible` decides for guesses too.
    """

    slots: Tensor  # (R, W)
    positions: Tensor  # (R, W)
    base: Tensor  # (R,)
    view: int
    view_is_full: bool = False  # every slot in view holds a decided token
    visible: Visible = causal
    sees: Tensor | None = None  # (G, G) bool
    _biases: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def mask(self, sliding_window: int | None = None) -> Tensor:
        """May query w see slot v? (R, W, V) bool."""
        slot = torch.arange(self.view, device=self.slots.device)
        query = self.positions[:, :, None]
        if self.sees is None:
            mask = self.visible(query, slot)
            return mask if sliding_window is None else mask & (slot > query - sliding_window)
        guesses = len(self.sees)
        guess = slot - self.base[:, None]  # (R, V): which guess stands in this slot
        is_guess = ((guess >= 0) & (guess < guesses))[:, None]
        guess = guess.clamp(0, guesses - 1)
        guess_position = self.positions[:, -guesses:].gather(1, guess)
        position = torch.where(is_guess, guess_position[:, None], slot)  # (R, 1, V)
        mask = self.visible(query, position) & (is_guess | (slot < self.base[:, None, None]))
        mask[:, -guesses:] = torch.where(is_guess, self.sees[:, guess].transpose(0, 1), mask[:, -guesses:])
        return mask if sliding_window is None else mask & (position > query - sliding_window)

    def bias(self, group: int, sliding_window: int | None, dtype: torch.dtype) -> Tensor | None:
        """The mask as an additive term for `group` query heads folded into the query axis: (R, 1, group·W, V).

        None where nothing is hidden: one row's last position sees all that is in view.
        """
        if self.slots.numel() == 1 and self.view_is_full and sliding_window is None:
            return None
        key = (group, sliding_window)
        if key not in self._biases:
            mask = self.mask(sliding_window)
            bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
            self._biases[key] = bias.repeat(1, group, 1)[:, None]
        return self._biases[key]


def windowed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    feed: Feed,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention under `feed`: query (R, H, W, d), key and value (R, K, V, d), result (R, W, H, d).

    The H/K query heads that share a key head are folded into the query axis, so keys are never expanded.
    """
    rows, heads, width, size = query.shape
    group = heads // key.shape[1]
    query = query.reshape(rows, key.shape[1], group * width, size)
    bias = feed.bias(group, sliding_window, query.dtype)
    if softcap is None:
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    else:  # Gemma 2: scores are squashed before the mask, which the fused kernel cannot do
        scores = query @ key.transpose(2, 3) * (size**-0.5 if scaling is None else scaling)
        scores = torch.tanh(scores / softcap) * softcap
        out = (scores if bias is None else scores + bias).softmax(-1) @ value
    return out.reshape(rows, heads, width, -1).transpose(1, 2), None


AttentionInterface.register(ATTENTION, windowed_attention)


class KeyValues:
    """A static cache with ragged rows. Its storage is (R, S, K, d); a forward writes the slots of its feed."""

    def __init__(self, rows: int, slots: int) -> None:
        self.rows, self.slots = rows, slots
        self.feed: Feed
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._index: Tensor

    def aim(self, feed: Feed) -> None:
        """The next forward writes the slots of `feed` and sees its view."""
        self.feed = feed
        row = torch.arange(self.rows, device=feed.slots.device)[:, None] * self.slots
        self._index = (row + feed.slots).flatten()

    def get_seq_length(self, *_: Any) -> int:
        return 0  # positions are always given

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write (R, K, W, d); return keys and values in view, (R, K, V, d). Called by the model."""
        if layer not in self.layers:  # head sizes from the first keys: config fields differ by model
            self.layers[layer] = (self._empty(key), self._empty(value))
        return self._write(self.layers[layer][0], key), self._write(self.layers[layer][1], value)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots (R, D) to slots (R, D) in every layer: an accepted path becomes contiguous."""
        row = torch.arange(self.rows, device=source.device)[:, None]
        for pair in self.layers.values():
            for store in pair:
                store[row, target] = store[row, source]

    @property
    def bytes(self) -> int:
        return sum(t.nbytes for pair in self.layers.values() for t in pair)

    def _empty(self, like: Tensor) -> Tensor:
        return like.new_zeros(self.rows, self.slots, like.shape[1], like.shape[3])

    def _write(self, store: Tensor, new: Tensor) -> Tensor:
        store.view(self.rows * self.slots, *store.shape[2:]).index_copy_(
            0, self._index, new.transpose(1, 2).flatten(0, 1)
        )
        return store[:, : self.feed.view].transpose(1, 2)


class Lane:
    """A checkpoint that can be run, with its cache and its count of forwards and positions."""

    def __init__(self, checkpoint: "Checkpoint") -> None:
        self.checkpoint = checkpoint
        self.model = checkpoint.model
        self.device: torch.device = checkpoint.model.device
        self.forwards = 0
        self.cache = KeyValues(0, 0)

    def reserve(self, rows: int, slots: int) -> None:
        """Have room for `rows` rows of `slots` slots; what was cached is forgotten."""
        if self.cache.rows != rows or self.cache.slots < slots:
            self.cache = KeyValues(rows, slots)

    def forward(self, ids: Tensor, feed: Feed, judged: int) -> Tensor:
        """Run the model on (R, W) ids; logits of the last `judged` positions, (R, judged, vocabulary).

        Ids that no arm may emit (the mask, ids the tokenizer cannot decode) have logit −∞.
        """
        self.forwards += 1
        self.cache.aim(feed)
        logits: Tensor = self.model(
            input_ids=ids,
            position_ids=feed.positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=judged,
            feed=feed,
        ).logits
        return logits.index_fill_(-1, self.checkpoint.suppressed, float("-inf"))

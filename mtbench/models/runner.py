"""A lane: one model, its keys and values, its counters. Only a lane can run a forward.

Models come from transformers through its public interfaces: a cache object (`update`, `get_seq_length`) and an
attention function of our own. transformers builds no mask for a name it does not know,
hands keyword arguments of `model(...)` through to the attention function, and tells it each layer's sliding
window, so one function serves every model and every method runs the same code.

R = rows, W = positions fed, S = slots of the cache, V = slots in view, H = query heads, K = key heads, d = head size.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface

from mtbench.models import kernels

if TYPE_CHECKING:
    from mtbench.models.fused_decoder import Decoder
    from mtbench.models.loading import Checkpoint

ATTENTION = "mtbench"
FEW = 64  # positions per row: more are a prefill, which the library's attention serves best
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
    rows: Tensor | None = None  # (R,) rows of the cache these are; None: all of them, in order
    _masks: dict[int | None, Tensor] = field(default_factory=dict)
    _biases: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @cached_property
    def length(self) -> Tensor:
        """Slots up to the last one fed, (R,)."""
        return self.slots[:, -1] + 1

    def mask(self, sliding_window: int | None = None) -> Tensor:
        """May query w see slot v? (R, W, V) bool."""
        if sliding_window not in self._masks:
            self._masks[sliding_window] = self._mask(sliding_window)
        return self._masks[sliding_window]

    def _mask(self, sliding_window: int | None) -> Tensor:
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

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        invariant: bool = False,
    ) -> Tensor:
        """Attention under this feed: query (R, H, W, d), key and value in view (R, K, V, d), result (R, W, H, d).

        `invariant`: on a GPU by the kernel whose results do not depend on neighbours, however wide the feed.
        """
        if scale is None:
            scale = query.shape[3] ** -0.5
        if query.is_cuda and (invariant or query.shape[2] <= FEW):
            return kernels.attend(query, key, value, self.mask(sliding_window), self.length, scale, softcap)
        bias = self.bias(query.shape[1] // key.shape[1], sliding_window, query.dtype)
        return kernels.attend_plain(query, key, value, bias, scale, softcap)


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
    """What transformers' modules call: attention under `feed`."""
    return feed.attend(query, key, value, scaling, sliding_window, softcap), None


AttentionInterface.register(ATTENTION, windowed_attention)


class KeyValues:
    """A static cache with ragged rows: a forward writes the slots of its feed and sees its view.

    Storage is (positions, K, d) per layer, shaped as (R, S) for the batch at hand and kept for the next; `epoch` counts
    how often it had to be made anew, for what remembers its place.
    """

    def __init__(self) -> None:
        self.rows, self.slots, self.positions, self.epoch = 0, 0, 0, 0
        self.feed: Feed
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.index: Tensor  # (R·W,) where the feed's positions are written

    def shape(self, rows: int, slots: int) -> None:
        """Have room for `rows` rows of `slots` slots; what was cached is forgotten."""
        if rows * slots > self.positions:
            self.layers.clear()
            self.positions = rows * slots
            self.epoch += 1
        self.rows, self.slots = rows, slots

    def aim(self, feed: Feed) -> None:
        """The next forward writes the slots of `feed` and sees its view."""
        self.feed = feed
        if len(feed.slots) == 1 and feed.rows is None:
            self.index = feed.slots[0]
            return
        row = torch.arange(self.rows, device=feed.slots.device) if feed.rows is None else feed.rows
        self.index = (row[:, None] * self.slots + feed.slots).flatten()

    def get_seq_length(self, *_: Any) -> int:
        return 0  # positions are always given

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write (R, K, W, d); return keys and values in view, (R, K, V, d). Called by transformers' modules."""
        for store, new in zip(
            self.storage(layer, key.transpose(1, 2), value.transpose(1, 2)), (key, value), strict=True
        ):
            store.index_copy_(0, self.index, new.transpose(1, 2).flatten(0, 1))
        return self.view(layer)

    def storage(self, layer: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, (positions, K, d) each; made at the first call, sized like keys and values given.

        (Head sizes come from tensors since configurations name them differently.)
        """
        if layer not in self.layers:
            keys, values = (t.new_zeros(self.positions, *t.shape[-2:]) for t in like)
            self.layers[layer] = (keys, values)
        return self.layers[layer]

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values that the feed sees, (R, K, V, d) each."""
        rows = slice(None) if self.feed.rows is None else self.feed.rows
        keys, values = (self._by_row(store)[rows, : self.feed.view].transpose(1, 2) for store in self.layers[layer])
        return keys, values

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots (R, D) to slots (R, D) in every layer: an accepted path becomes contiguous."""
        row = torch.arange(self.rows, device=source.device)[:, None]
        for pair in self.layers.values():
            for store in map(self._by_row, pair):
                store[row, target] = store[row, source]

    @property
    def bytes_per_slot(self) -> int:
        return sum(t[0].nbytes for pair in self.layers.values() for t in pair)

    def _by_row(self, store: Tensor) -> Tensor:
        return store[: self.rows * self.slots].view(self.rows, self.slots, *store.shape[1:])


class Forwarded(NamedTuple):
    """What a forward gave at its last positions."""

    logits: Tensor  # (R, judged, V); −∞ for ids no arm may emit: the mask, ids the tokenizer cannot decode
    hidden: Tensor | None  # (R, judged, C) what the LM head read, if asked for


class Lane:
    """A checkpoint that can be run, with its cache and its count of forwards.

    With a `decoder` that runs the checkpoint's weights in place of transformers' modules.
    """

    def __init__(self, checkpoint: "Checkpoint", decoder: "Decoder | None" = None) -> None:
        self.checkpoint, self.decoder = checkpoint, decoder
        self.model = checkpoint.model
        self.device: torch.device = checkpoint.model.device
        self.forwards = 0
        self.host_s = 0.0  # seconds spent in forwards; on a CPU that is their whole time
        self.beside_s = 0.0  # of these, in what a method computes beside the model
        self.cache = KeyValues()

    def reserve(self, rows: int, slots: int) -> None:
        """Have room for `rows` rows of `slots` slots; what was cached is forgotten."""
        self.cache.shape(rows, slots)
        if self.decoder is not None:
            self.decoder.reach(slots)

    @property
    def epoch(self) -> tuple[int, ...]:
        """Changes when memory that a forward uses was made anew."""
        return (self.cache.epoch, 0 if self.decoder is None else self.decoder.epoch)

    def forward(self, ids: Tensor, feed: Feed, judged: int, *, hidden: bool = False) -> Forwarded:
        """Run the model on (R, W) ids; what it gives at the last `judged` positions."""
        began = time.perf_counter()
        self.forwards += 1
        self.cache.aim(feed)
        run = self._modules if self.decoder is None else self.decoder
        out = Forwarded(*run(ids, feed, self.cache, judged, hidden))
        out.logits.index_fill_(-1, self.checkpoint.suppressed, float("-inf"))
        self.host_s += time.perf_counter() - began
        return out

    def beside(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """What a method computes beside the model, such as heads of its own, on this lane's clock."""
        began = time.perf_counter()
        result = function(*tensors)
        spent = time.perf_counter() - began
        self.host_s += spent
        self.beside_s += spent
        return result

    def _modules(
        self, ids: Tensor, feed: Feed, cache: KeyValues, judged: int, hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        """By transformers' modules. What the LM head reads, a hook on it tells, whatever the architecture."""
        read: list[Tensor] = []
        head = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])) if hidden else None
        logits = self.model(
            input_ids=ids,
            position_ids=feed.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=judged,
            feed=feed,
        ).logits
        if hook is not None:
            hook.remove()
        return logits, read[0] if read else None

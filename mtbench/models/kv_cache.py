"""The KV cache: static storage whose rows have different lengths.

transformers' modules call it by the methods of transformers' own caches: `update` and `get_seq_length`. Beside keys and
values it can hold features: hidden states of chosen layers (taps) at every position fed, which draft models read. They
lie in the same slots, so they follow prefill, refill and the accepted path as keys and values do.

R = rows, W = positions fed, S = slots of the cache, V = slots in view, K = key heads, d = head size, C = hidden size,
T = taps.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mtbench import kernels
from mtbench.models.attention import AttentionMetadata


class KVCache:
    """A static KV cache with rows of different lengths.

    A forward pass writes the slots of its metadata and reads the slots in view. Storage is (positions, K, d) per layer.
    Each batch divides it into (R, S); later batches reuse it. `epoch` counts its reallocations: a captured CUDA graph
    holds addresses, and is invalid after one.
    """

    def __init__(self) -> None:
        self.rows, self.slots, self.positions, self.epoch = 0, 0, 0, 0
        self.metadata: AttentionMetadata
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.taps: tuple[int, ...] = ()  # hidden states kept as features, numbered as transformers' `hidden_states`
        self._features: dict[int, Tensor] = {}  # tap -> (positions, C); those of other taps stay for their next batch
        self.graphs: dict[Any, Any] = {}  # captured forward passes that write here (mtbench/decoding/cuda_graph.py)
        self._mover: Callable[[Tensor, Tensor, int], None] | None = None  # for the layers that are there
        self.index: Tensor  # (R·W,) storage positions that the next forward pass writes

    def shape(self, rows: int, slots: int, taps: Sequence[int] = (), like: Tensor | None = None) -> None:
        """Make room for `rows` rows of `slots` slots, with features of these taps. The cached data are lost.

        `like` (…, C): whose last dimension and type features have; needed if there are taps. They are allocated at
        once, because a method may read them before the first forward pass: prompts of one token have no prefill.
        """
        self.taps = tuple(taps)
        if rows * slots > self.positions:
            for held in (self.layers, self._features, self.graphs):
                held.clear()
            self.positions = rows * slots
            self.epoch += 1
        self.rows, self.slots = rows, slots
        for tap in self.taps:
            if tap not in self._features:
                assert like is not None
                self._features[tap] = like.new_zeros(self.positions, like.shape[-1])

    def set_batch(self, metadata: AttentionMetadata) -> None:
        """Set the slots that the next forward pass writes and reads."""
        self.metadata = metadata
        if metadata.index is not None:
            self.index = metadata.index
            return
        if len(metadata.slots) == 1 and metadata.rows is None:
            self.index = metadata.slots[0]
            return
        row = torch.arange(self.rows, device=metadata.slots.device) if metadata.rows is None else metadata.rows
        self.index = (row[:, None] * self.slots + metadata.slots).flatten()

    def get_seq_length(self, *_: Any) -> int:
        """Return 0: transformers derives positions from it, and callers always pass positions."""
        return 0

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values (R, K, W, d); return those in view, (R, K, V, d). transformers' modules call it."""
        key, value = key.transpose(1, 2), value.transpose(1, 2)
        keys, values = self.storage(layer, key, value)
        keys.index_copy_(0, self.index, key.flatten(0, 1))
        values.index_copy_(0, self.index, value.flatten(0, 1))
        return self.view(layer)

    def storage(self, layer: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, (positions, K, d) each. The first call allocates them.

        `like`: keys and values whose last two dimensions and type it takes. (Configurations do not agree on the name
        of the head size.)
        """
        if layer not in self.layers:
            keys, values = (t.new_zeros(self.positions, *t.shape[-2:]) for t in like)
            self.layers[layer] = (keys, values)
            self._mover = None
        return self.layers[layer]

    def view(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values in view, (R, K, V, d) each."""
        rows = slice(None) if self.metadata.rows is None else self.metadata.rows
        keys, values = (self._by_row(store)[rows, : self.metadata.view].transpose(1, 2) for store in self.layers[layer])
        return keys, values

    def keep_feature(self, tap: int, hidden: Tensor) -> None:
        """Write the hidden states (R·W, C) of the positions fed if `tap` is kept."""
        if tap in self.taps:
            self._features[tap].index_copy_(0, self.index, hidden)

    def features(self, taps: Sequence[int], slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return the features in slots (R, W), tap after tap, (R, W, T·C). `rows` (R,): cache rows; None: all."""
        row = torch.arange(self.rows, device=slots.device) if rows is None else rows
        index = row[:, None] * self.slots + slots
        return torch.cat([self._features[tap][index] for tap in taps], -1)

    def clear(self, rows: Sequence[int]) -> None:
        """Zero the data of some rows: NaN in a slot spoils a later text there, since 0 · NaN is NaN under a mask."""
        for store in (*(store for pair in self.layers.values() for store in pair), *self._features.values()):
            self._by_row(store)[list(rows)] = 0

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy slots (R, D) to slots (R, D) in every layer, so that the accepted path of a draft tree is contiguous.

        The sources of a row ascend, and no slot lies before its target.
        """
        stores = [store for pair in self.layers.values() for store in pair]
        self._mover = self._mover or kernels.slot_mover(stores)
        rest = [self._features[tap] for tap in self.taps]
        if self._mover is not None and kernels.off() is None:
            self._mover(source, target, self.slots)
        else:
            rest += stores
        row = torch.arange(self.rows, device=source.device)[:, None]
        for store in map(self._by_row, rest):
            store[row, target] = store[row, source]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token: its keys and values over all layers, and its features."""
        stores = [store for pair in self.layers.values() for store in pair]
        return sum(t[0].nbytes for t in (*stores, *(self._features[tap] for tap in self.taps)))

    def _by_row(self, store: Tensor) -> Tensor:
        return store[: self.rows * self.slots].view(self.rows, self.slots, *store.shape[1:])

"""The cache of keys and values: static storage whose rows are filled to different lengths.

transformers' modules call it through its public cache interface (`update`, `get_seq_length`).

R = rows, W = positions fed, S = slots of the cache, V = slots in view, K = key heads, d = head size.
"""

from typing import Any

import torch
from torch import Tensor

from mtbench.models.attention import AttentionMetadata


class KVCache:
    """A static cache with ragged rows: a forward writes the slots of its feed and sees its view.

    Storage is (positions, K, d) per layer, shaped as (R, S) for the batch at hand and kept for the next; `epoch` counts
    how often it had to be made anew, for what remembers its place.
    """

    def __init__(self) -> None:
        self.rows, self.slots, self.positions, self.epoch = 0, 0, 0, 0
        self.metadata: AttentionMetadata
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.index: Tensor  # (R·W,) where the feed's positions are written

    def shape(self, rows: int, slots: int) -> None:
        """Have room for `rows` rows of `slots` slots; what was cached is forgotten."""
        if rows * slots > self.positions:
            self.layers.clear()
            self.positions = rows * slots
            self.epoch += 1
        self.rows, self.slots = rows, slots

    def set_batch(self, metadata: AttentionMetadata) -> None:
        """The next forward writes the slots of `metadata` and sees its view."""
        self.metadata = metadata
        if len(metadata.slots) == 1 and metadata.rows is None:
            self.index = metadata.slots[0]
            return
        row = torch.arange(self.rows, device=metadata.slots.device) if metadata.rows is None else metadata.rows
        self.index = (row[:, None] * self.slots + metadata.slots).flatten()

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
        rows = slice(None) if self.metadata.rows is None else self.metadata.rows
        keys, values = (self._by_row(store)[rows, : self.metadata.view].transpose(1, 2) for store in self.layers[layer])
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

"""Cache and attention mask of a draft that is trained step by step (draft_objectives.py).

They replace the KV cache and the metadata of a step in decoding. Letters: R rows, H heads, T and W tokens, Q
queries, K key heads, d size of a head.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mtbench import kernels


class StepKeys:
    """Keys and values of the steps so far, with the interface of transformers' caches."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values (R, K, T, d); return all of them."""
        if layer in self.layers:
            before = self.layers[layer]
            key, value = torch.cat((before[0], key), 2), torch.cat((before[1], value), 2)
        self.layers[layer] = (key, value)
        return key, value


@dataclass(eq=False)
class DraftMask:
    """Positions and attention mask of a draft's forward pass in training, as `AttentionMetadata` in decoding."""

    positions: Tensor  # (R, W)
    mask: Tensor  # (R, Q, keys) bool; the last Q positions attend
    _biases: dict[int, Tensor] = field(default_factory=dict)

    def of_block(self, count: int, causal: bool, sliding_window: int | None = None) -> "DraftMask":
        """Return the metadata of the last positions, those that attend. Drafts trained here have full attention."""
        assert (causal, sliding_window) == (False, None), "no objective makes such layers"
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
        """Attention of query (R, H, Q, d) to keys and values: (R, Q, H, d). Drafts trained here have no window."""
        group = query.shape[1] // key.shape[1]
        if group not in self._biases:
            bias = torch.zeros_like(self.mask, dtype=query.dtype).masked_fill_(~self.mask, float("-inf"))
            self._biases[group] = bias.repeat(1, group, 1)[:, None]
        return kernels.attend_plain(query, key, value, self._biases[group], scale or query.shape[3] ** -0.5, softcap)

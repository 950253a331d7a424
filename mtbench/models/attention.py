"""Attention: where the positions of a forward stand, what each of them sees, and the function that computes it.

Models come from transformers through its public interfaces: an attention function of our own, registered by name.
transformers builds no mask for a name it does not know, hands keyword arguments of `model(...)` through to the
attention function, and tells it each layer's sliding window, so one function serves every model and every method runs
the same code.

R = rows, W = positions fed, S = slots of the cache, V = slots in view, H = query heads, K = key heads, d = head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from mtbench.models import kernels

ATTENTION = "mtbench"
FEW = 64  # positions per row: more are a prefill, which the library's attention serves best
Visible = Callable[[Tensor, Tensor], Tensor]


def causal(query_position: Tensor, key_position: Tensor) -> Tensor:
    """A position sees itself and what came before it."""
    return key_position <= query_position


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
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
    metadata: AttentionMetadata,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """What transformers' modules call: attention under `metadata`."""
    return metadata.attend(query, key, value, scaling, sliding_window, softcap), None


AttentionInterface.register(ATTENTION, windowed_attention)

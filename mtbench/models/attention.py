"""The attention function that mtbench registers with transformers, and the metadata of one forward pass.

transformers builds no mask for an attention function that it does not know. It passes the keyword arguments of
`model(...)` to that function, and each layer's sliding window. So one function serves every model, and every decoding
method runs the same code.

R = rows, W = positions fed, S = slots of the cache, V = slots in view, G = draft tokens fed, D = draft tokens in slots,
H = query heads, K = key heads, d = head size.
"""

from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from mtbench import kernels

ATTENTION = "mtbench"
OWN = "eager"  # transformers' name of the attention that each of its classes has
ALIGNED = 16  # slots of a row and in view are a multiple of it: kernels then read the mask in whole words
KERNEL_POSITIONS = 64  # per row; wider passes are prefills, for which PyTorch's attention is faster


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Slots, positions and attention mask of one forward pass.

    Committed tokens have equal slots and positions. Draft token g has slot `base + g` and position `base + offset[g]`.
    With `sees`, draft token g attends to draft token h where `sees[…, g, h]`, for all rows or by row; without it,
    `block` decides for draft tokens too. Draft tokens fed before, by a draft model that reads a tree level by level,
    need `offset`.
    """

    slots: Tensor  # (R, W)
    positions: Tensor  # (R, W)
    base: Tensor  # (R,) slot of the first draft token
    view: int  # V
    view_is_full: bool = False  # every slot in view holds a committed token
    block: int = 1  # a position attends to its whole block and to those before; 1: attention is causal
    sees: Tensor | None = None  # (G, D) or (R, G, D) bool
    offset: Tensor | None = None  # (D,) or (R, D) positions of draft tokens from `base`; None: all fed now, and G = D
    rows: Tensor | None = None  # (R,) cache row of each row; None: all cache rows, in order
    index: Tensor | None = None  # (R·W,) places in a cache's storage; None: the cache computes them
    _masks: dict[int | None, Tensor] = field(default_factory=dict)  # by sliding window
    _biases: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @cached_property
    def length(self) -> Tensor:
        """Number of slots up to the last one fed, (R,)."""
        return self.slots[:, -1] + 1

    def of_block(self, count: int, causal: bool, sliding_window: int | None = None) -> "AttentionMetadata":
        """Return the metadata of the last `count` positions alone, a block of draft tokens.

        It attends to the slots before it and to itself: to all of it within a sliding window, or causally.
        """
        sees = block_sees(count, causal, sliding_window, self.slots.device)
        slots, positions = self.slots[:, -count:], self.positions[:, -count:]
        return replace(self, slots=slots, positions=positions, sees=sees, _masks={}, _biases={})

    def mask(self, sliding_window: int | None = None) -> Tensor:
        """Return which slot each query may attend to, (R, W, V) bool."""
        if sliding_window not in self._masks:
            self._masks[sliding_window] = self._mask(sliding_window)
        return self._masks[sliding_window]

    def _mask(self, sliding_window: int | None) -> Tensor:
        slot = torch.arange(self.view, device=self.slots.device)
        query = self.positions[:, :, None]
        if self.sees is None:
            mask = self._visible(query, slot)
            return mask if sliding_window is None else mask & (slot > query - sliding_window)
        rows, (fed, drafts) = len(self.slots), self.sees.shape[-2:]
        draft = slot - self.base[:, None]  # (R, V): index of the draft token in this slot
        is_draft = ((draft >= 0) & (draft < drafts))[:, None]
        draft = draft.clamp(0, drafts - 1)
        if self.offset is None:
            draft_position = self.positions[:, -drafts:].gather(1, draft)
        else:
            draft_position = self.base[:, None] + self.offset.expand(rows, -1).gather(1, draft)
        position = torch.where(is_draft, draft_position[:, None], slot)  # (R, 1, V)
        mask = self._visible(query, position) & (is_draft | (slot < self.base[:, None, None]))
        sees = self.sees.expand(rows, -1, -1).gather(2, draft[:, None].expand(-1, fed, -1))
        mask[:, -fed:] = torch.where(is_draft, sees, mask[:, -fed:])
        return mask if sliding_window is None else mask & (position > query - sliding_window)

    def _visible(self, query: Tensor, key: Tensor) -> Tensor:
        return key <= query if self.block == 1 else key // self.block <= query // self.block

    def bias(self, group: int, sliding_window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the mask as an additive term, (R, 1, group·W, V), with `group` query heads folded into the query axis.

        None if nothing is masked: the only position of a single row attends to every slot in view.
        """
        if self.slots.numel() == 1 and self.view_is_full and sliding_window is None:
            return None
        key = (group, sliding_window)
        if key not in self._biases:
            self._biases[key] = self._additive(sliding_window, dtype).repeat(1, 1, group, 1)
        return self._biases[key]

    def _additive(self, sliding_window: int | None, dtype: torch.dtype) -> Tensor:
        mask = self.mask(sliding_window)[:, None]
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))

    def arguments(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return the keyword arguments by which transformers' modules attend so: by our function, or under masks."""
        config: Any = model.config
        if config._attn_implementation != OWN:
            return {"metadata": self}
        full = self._additive(None, model.dtype)
        if "sliding_attention" not in (getattr(config, "layer_types", None) or ()):
            return {"attention_mask": full}
        sliding = self._additive(config.sliding_window, model.dtype)
        return {"attention_mask": {"full_attention": full, "sliding_attention": sliding}}

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
        """Return attention under this mask: query (R, H, W, d), key and value in view (R, K, V, d) to (R, W, H, d).

        `invariant`: on a GPU, always use the batch-invariant kernel (`kernels.attend`), also for wide passes.
        """
        if scale is None:
            scale = query.shape[3] ** -0.5
        if kernels.ours(query) and (invariant or query.shape[2] <= KERNEL_POSITIONS):
            return kernels.attend(query, key, value, self.mask(sliding_window), self.length, scale, softcap)
        bias = self.bias(query.shape[1] // key.shape[1], sliding_window, query.dtype)
        return kernels.attend_plain(query, key, value, bias, scale, softcap)


@cache
def block_sees(count: int, causal: bool, sliding_window: int | None, device: torch.device) -> Tensor:
    """Return which positions of a block each one sees, (count, count) bool. Made once, as tensors of windows are."""
    place = torch.arange(count, device=device)
    back = place[:, None] - place
    near = back.abs() < (sliding_window or count)
    return near & (back >= 0) if causal else near


def windowed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    metadata: AttentionMetadata | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return attention under `metadata` and no attention weights. transformers' modules call this function.

    Raises TypeError for an argument that it would have to use and does not know: a mask of the class's own, or numbers
    such as attention sinks (`s_aux`).
    """
    if metadata is None:
        raise TypeError("its attention does not pass keyword arguments on")
    for name, given in {"attention_mask": attention_mask, **others}.items():
        if isinstance(given, Tensor) and given.is_floating_point():
            raise TypeError(f"mtbench's attention takes no {name!r}")
    return metadata.attend(query, key, value, scaling, sliding_window, softcap), None


AttentionInterface.register(ATTENTION, windowed_attention)

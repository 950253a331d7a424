"""Faults for tests of the audit and its corpus: what a token reads, from when on, and in which answers.

R = rows, W = positions fed, V = slots in view.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from planted_faults import Fault, around, both, chosen
from torch import Tensor

from mtbench.decoding import output as answers
from mtbench.decoding import run_state
from mtbench.decoding.loop import Batch
from mtbench.measure.model_pool import ModelPool
from mtbench.models.attention import AttentionMetadata
from mtbench.models.kv_cache import KVCache
from mtbench.models.runner import ModelRunner

BEGINS = 1  # id of <|im_start|>, which begins a message, in both models of the corpus


# --- When, and in which answers ---------------------------------------------------------------------------------------


def from_token(number: int, fault: Fault) -> Fault:
    """Return the fault from a new token on; the rows of a batch begin together."""

    @around(Batch, "step")
    def late(old: Any, self: Any, *given: Any, **more: Any) -> None:
        begun = int((self.rows.known - self.rows.prompt_len).max()) >= number
        with fault() if begun else nullcontext():
            old(self, *given, **more)

    return late


def in_answers(items: Collection[int], fault: Fault) -> Fault:
    """Return the fault in the answers to some items; the others are those of a run without it."""

    @around(ModelPool, "decode")
    def some(old: Any, self: Any, cell: Any, requests: Any, **more: Any) -> Any:
        right, timing = old(self, cell, requests, **more)
        with fault():
            wrong, _ = old(self, cell, requests, **more)
        pairs = zip(requests, right, wrong, strict=True)
        return [bad if request.item in items else good for request, good, bad in pairs], timing

    return some


# --- What a token sees ------------------------------------------------------------------------------------------------

# Which slots are hidden, (R, W, V) bool: of query slots (R, W, 1), slots (V,) and prompts (R, V), −1 behind their end.
Hidden = Callable[[Tensor, Tensor, Tensor], Tensor]


def hiding(hidden: Hidden) -> Fault:
    """Some slots are not attended to, in prefill and decoding."""

    def rows_of(metadata: AttentionMetadata) -> list[int]:
        return list(range(len(metadata.slots))) if metadata.rows is None else metadata.rows.tolist()

    @around(ModelRunner, "feed")
    def remembered(old: Any, self: Any, tokens: Tensor, metadata: AttentionMetadata) -> None:
        prompts = zip(rows_of(metadata), tokens, metadata.base.tolist(), strict=True)
        self.prompts = getattr(self, "prompts", {}) | {row: ids[:length] for row, ids, length in prompts}
        old(self, tokens, metadata)

    @around(ModelRunner, "forward")
    def masked(old: Any, self: Any, ids: Tensor, metadata: AttentionMetadata, judged: int) -> Any:
        known, prompts = getattr(self, "prompts", {}), torch.full((len(ids), metadata.view), -1)
        for row, of in zip(prompts, rows_of(metadata), strict=True):
            prompt = known.get(of, row[:0])[: metadata.view]
            row[: len(prompt)] = prompt
        gone = hidden(metadata.slots[..., None], torch.arange(metadata.view), prompts)
        masks = {w: metadata.mask(w) & ~gone for w in {None, *self.sliding_windows}}
        return old(self, ids, replace(metadata, view_is_full=False, _masks=masks, _biases={}), judged)

    return both(remembered, masked)


def window(size: int, first: int = 0) -> Fault:
    """A token sees the last `size` slots, and the `first` ones."""
    return hiding(lambda query, slot, _: (slot <= query - size) & (slot >= first))


def unread(message: int, count: int = 1) -> Fault:
    """The tokens behind `count` messages, from `message` on, do not see these."""

    def hidden(query: Tensor, slot: Tensor, prompts: Tensor) -> Tensor:
        number = (prompts == BEGINS).cumsum(1)
        inside = (number > message) & (number <= message + count) & (prompts >= 0)
        end = torch.where(inside, slot, -1).amax(1)[:, None, None]
        return inside[:, None] & (query > end)

    return hiding(hidden)


def unread_slots(first: int, end: int) -> Fault:
    """Later tokens do not see the slots from `first` up to `end`."""
    return hiding(lambda query, slot, _: (slot >= first) & (slot < end) & (query >= end))


# --- Caches, prompts, choices, ends -----------------------------------------------------------------------------------


def other_layer(of: Mapping[int, int], parts: str = "keys, values") -> Fault:
    """Some layers read the keys, or values, of another layer. `of`: layer -> an earlier one."""

    @around(KVCache, "view")
    def view(old: Any, self: Any, layer: int) -> tuple[Tensor, Tensor]:
        own, other = old(self, layer), old(self, of.get(layer, layer))
        return other[0] if "keys" in parts else own[0], other[1] if "values" in parts else own[1]

    return view


def coarse_cache(bits: int | None = None) -> Fault:
    """Keys and values are rounded to integers, with a scale for each token and head; None: to float8_e4m3."""

    def rounded(store: Tensor) -> Tensor:
        if bits is None:
            return store.to(torch.float8_e4m3fn).to(store.dtype)
        scale = store.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
        whole: Tensor = (store / scale).round() * scale
        return whole.to(store.dtype)

    return around(KVCache, "view")(lambda old, self, layer: tuple(map(rounded, old(self, layer))))


def other_prompts(change: Callable[[list[int], int], Sequence[int]]) -> Fault:
    """The server changes prompts, and does not record it. `change`: of the ids, and the longest prompt of the batch."""

    @around(ModelPool, "decode")
    def decode(old: Any, self: Any, cell: Any, requests: Any, **more: Any) -> Any:
        longest = max(len(request.prompt_ids) for request in requests)
        changed = [replace(one, prompt_ids=change(list(one.prompt_ids), longest)) for one in requests]
        return old(self, cell, changed, **more)

    return decode


def padded(pad: int, *, behind: bool = False) -> Fault:
    """Shorter prompts of a batch are padded, and the padding is read: before them, or before their last token."""

    def change(ids: list[int], longest: int) -> list[int]:
        padding = [pad] * (longest - len(ids))
        return [*ids[:-1], *padding, ids[-1]] if behind else [*padding, *ids]

    return other_prompts(change)


def without_message(number: int) -> Fault:
    """A message is left out."""

    def change(ids: list[int], _: int) -> list[int]:
        begins = [place for place, token in enumerate(ids) if token == BEGINS]
        return [*ids[: begins[number]], *ids[begins[number + 1] :]]

    return other_prompts(change)


def suppressed(*ids: int) -> Fault:
    """Some tokens are never chosen."""
    return chosen(lambda _, logits, __: logits.index_fill(-1, torch.tensor(ids), float("-inf")).argmax(-1))


def stopless() -> Fault:
    """Stop strings stop nothing."""
    return both(
        around(run_state, "contains")(lambda *_: False),
        around(answers, "cut_at_string")(lambda _, *__: None),
    )

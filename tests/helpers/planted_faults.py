"""Faults for tests of the audit: a context manager replaces one function of mtbench by a wrong one.

Nothing here comes from the audit. R = rows, n = positions, V = vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Rows
from mtbench.decoding.verification import VerifiedMethod
from mtbench.measure import model_pool
from mtbench.models.kv_cache import KVCache
from mtbench.models.loading import Checkpoint

Fault = Callable[[], AbstractContextManager[Any]]


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace a function by the one that `make` makes of it."""
    with patch.object(owner, name, make(getattr(owner, name))):
        yield


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Fault]:
    """Make a fault of a function that is called in place of another one, which is its first argument."""
    return lambda wrong: lambda: replaced(owner, name, lambda old: lambda *a, **k: wrong(old, *a, **k))


def both(*faults: Fault) -> Fault:
    """Return several faults at once."""

    @contextmanager
    def fault() -> Iterator[None]:
        with ExitStack() as stack:
            for one in faults:
                stack.enter_context(one())
            yield

    return fault


def weights(change: Callable[[Checkpoint], None]) -> Fault:
    """The target's weights are changed after loading."""

    @around(model_pool, "load")
    def load(old: Any, source: str, **how: Any) -> Checkpoint:
        loaded: Checkpoint = old(source, **how)
        with torch.no_grad():
            change(loaded)
        return loaded

    return load


def coarse_weights(bits: int) -> Fault:
    """Weights of the layers are rounded to integers, with a scale for each row."""

    def change(checkpoint: Checkpoint) -> None:
        for weight in checkpoint.model.base_model.layers.parameters():
            if weight.dim() == 2:
                scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
                weight.copy_((weight / scale).round() * scale)

    return weights(change)


def without_layers(*numbers: int) -> Fault:
    """Layers add nothing."""

    def change(checkpoint: Checkpoint) -> None:
        for number in numbers:
            layer = checkpoint.model.base_model.layers[number]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

    return weights(change)


def chosen(pick: Callable[[Rows, Tensor, Tensor], Tensor]) -> Fault:
    """Tokens are chosen by another rule, of rows, logits (R, n, V) and positions (R, n)."""
    return lambda: replaced(Rows, "choose", lambda _: pick)


def sampled(temperature: float = 1.0, seed: int = 0) -> Fault:
    """Tokens are drawn, as a checkpoint's generation_config.json asks for."""
    chance = torch.Generator().manual_seed(seed)

    def pick(_: Rows, logits: Tensor, __: Tensor) -> Tensor:
        p = (logits.float() / temperature).softmax(-1)
        return torch.multinomial(p.flatten(0, 1), 1, generator=chance).view(p.shape[:2])

    return chosen(pick)


def unfiltered() -> Fault:
    """Tokens are drawn from all, and drafts accepted, whatever top-k, top-p and min-p of the plan remove."""
    return lambda: replaced(Rows, "filtered", lambda _: lambda self, logits: logits)


def penalised(by: float) -> Fault:
    """Logits of tokens of the text so far are divided by `by`, or multiplied where they are below 0."""

    def pick(rows: Rows, logits: Tensor, _: Tensor) -> Tensor:
        there = (torch.arange(rows.tokens.shape[1]) < rows.known[:, None]).float()
        seen = torch.zeros(logits.shape[0], logits.shape[2]).scatter_add_(1, rows.tokens, there) > 0
        changed = torch.where(logits > 0, logits / by, logits * by)
        return torch.where(seen[:, None], changed, logits).argmax(-1)

    return chosen(pick)


def suppressed(*ids: int) -> Fault:
    """Some tokens are never chosen."""
    return chosen(lambda _, logits, __: logits.index_fill(-1, torch.tensor(ids), float("-inf")).argmax(-1))


def coarse_logits(dtype: torch.dtype) -> Fault:
    """Logits are rounded to a coarser type."""
    return chosen(lambda _, logits, __: logits.to(dtype).argmax(-1))


def shifted_rope(by: int, start: int = 0) -> Fault:
    """Decode steps from position `start` on rotate by a position that is off; the mask and the prefill are right."""

    @around(Batch, "feed")
    def feed(old: Any, self: Any, guess: Tensor, shape: Any) -> Any:
        ids, metadata = old(self, guess, shape)
        masks = {window: metadata.mask(window) for window in {None, *self.target.sliding_windows}}
        off = metadata.positions + by * (metadata.positions >= start)
        return ids, replace(metadata, positions=off, _masks=masks, _biases={})

    return feed


def windowed(size: int) -> Fault:
    """Decode steps see the last `size` slots only."""

    @around(Batch, "feed")
    def feed(old: Any, self: Any, guess: Tensor, shape: Any) -> Any:
        ids, metadata = old(self, guess, shape)
        near = torch.arange(metadata.view) > metadata.slots[..., None] - size
        masks = {window: metadata.mask(window) & near for window in {None, *self.target.sliding_windows}}
        return ids, replace(metadata, view_is_full=False, _masks=masks, _biases={})

    return feed


def other_layer(layer: int, read: int) -> Fault:
    """A layer reads the keys and values of another layer."""
    return around(KVCache, "view")(lambda old, self, n: old(self, read if n == layer else n))


def coarse_cache(bits: int) -> Fault:
    """Keys and values are rounded to integers, with a scale for each token and head."""

    def rounded(store: Tensor) -> Tensor:
        scale = store.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
        whole: Tensor = (store / scale).round() * scale
        return whole

    return around(KVCache, "view")(lambda old, self, layer: tuple(map(rounded, old(self, layer))))


def other_prompts(change: Callable[[list[int]], list[int]]) -> Fault:
    """Other prompts are read than those that are stored."""

    @around(model_pool, "decode")
    def decode(old: Any, method: Any, runners: Any, requests: Any, **more: Any) -> Any:
        changed = [replace(one, prompt_ids=change(list(one.prompt_ids))) for one in requests]
        return old(method, runners, changed, **more)

    return decode


def short_budget(by: int) -> Fault:
    """The budget is some tokens short, and nothing records it."""

    @around(model_pool, "decode")
    def decode(old: Any, method: Any, runners: Any, requests: Any, **more: Any) -> Any:
        changed = [replace(one, max_new_tokens=one.max_new_tokens - by) for one in requests]
        return old(method, runners, changed, **more)

    return decode


def endless() -> Fault:
    """End tokens end nothing."""

    @around(Batch, "open")
    def begin(old: Any, self: Any, run: Any) -> None:
        self.ends.zero_()
        old(self, run)

    return begin


def unverified(share: float) -> Fault:
    """A draft is accepted if its probability is at least a share of the largest."""

    @around(VerifiedMethod, "verified")
    def verified(_: Any, *given: Any) -> tuple[Tensor, Tensor]:
        output = given[-1]
        p = output.logits[:, :-1].float().softmax(-1)
        fine = p.gather(2, output.guess.clamp(min=0)[..., None])[..., 0] >= share * p.amax(-1)
        accepted = (output.agrees(output.guess) | fine).long().cumprod(1).sum(1)
        padded = torch.cat((output.guess, output.guess[:, :1]), 1)
        taken = torch.arange(padded.shape[1]) < accepted[:, None]
        return torch.where(taken, padded, output.choice), accepted

    return verified


def stale_after_rejection() -> Fault:
    """The cache keeps the keys and values of the first rejected draft: those of the token in its place are lost."""

    @around(Batch, "step")
    def step(old: Any, self: Any, shape: Any, **more: Any) -> None:
        cache, kept, known = self.target.cache, self.__dict__.pop("kept", None), self.rows.known.clone()
        old(self, shape, **more)
        if kept is not None:
            for store, (index, was) in zip(stores(cache), kept, strict=True):
                store[index] = was
        rejected = (self.rows.known - known <= self.windows[shape.variant].guesses) & ~self.rows.done
        index = (torch.arange(self.width) * self.slots + self.rows.known - 1)[rejected]
        self.kept = [(index, store[index].clone()) for store in stores(cache)]

    @around(Batch, "start")
    def refill(old: Any, self: Any, *given: Any) -> None:
        self.__dict__.pop("kept", None)
        old(self, *given)

    return both(step, refill)


def stores(cache: KVCache) -> list[Tensor]:
    return [store for pair in cache.layers.values() for store in pair]


def swapped_caches(at: int, one: int = 0, two: int = 1) -> Fault:
    """From a step on, two rows have each other's cache."""

    @around(Batch, "step")
    def step(old: Any, self: Any, shape: Any, **more: Any) -> None:
        old(self, shape, **more)
        self.stepped = getattr(self, "stepped", 0) + 1
        if self.stepped == at and self.width > max(one, two):
            for store in stores(self.target.cache):
                rows = store[: self.width * self.slots].view(self.width, self.slots, -1)
                rows[[one, two]] = rows[[two, one]]

    return step

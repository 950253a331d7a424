"""Faults for tests of the audit: a context manager replaces one function of mtbench by a wrong one.

Nothing here comes from the audit. benchmarks/audit_faults.py has many more.
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


def sampled(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> Fault:
    """Tokens are sampled, as a checkpoint's generation_config.json asks for."""
    chance = torch.Generator().manual_seed(seed)

    def pick(_: Rows, logits: Tensor, __: Tensor) -> Tensor:
        p = (logits.float() / temperature).softmax(-1)
        if top_k:
            p = torch.where(p >= p.topk(top_k).values[..., -1:], p, 0)
        ordered, order = p.sort(-1, descending=True)
        ordered = torch.where(ordered.cumsum(-1) - ordered < top_p * p.sum(-1, keepdim=True), ordered, 0)
        drawn = torch.multinomial(ordered.flatten(0, 1), 1, generator=chance).view(*ordered.shape[:2], 1)
        return order.gather(-1, drawn)[..., 0]

    return chosen(pick)


def shifted_rope(by: int, *, guesses_only: bool = False) -> Fault:
    """Decode steps rotate by a position that is off; the mask and the prefill are right."""

    @around(Batch, "feed")
    def feed(old: Any, self: Any, guess: Tensor, shape: Any) -> Any:
        ids, metadata = old(self, guess, shape)
        masks = {window: metadata.mask(window) for window in {None, *self.target.sliding_windows}}
        first = metadata.positions.shape[1] - guess.shape[1] if guesses_only else 0
        off = metadata.positions.clone()
        off[:, first:] += by
        return ids, replace(metadata, positions=off, _masks=masks, _biases={})

    return feed


def late_rope(by: int, start: int) -> Fault:
    """Positions are off behind `start`: a scaling that begins there."""

    @around(Batch, "feed")
    def feed(old: Any, self: Any, guess: Tensor, shape: Any) -> Any:
        ids, metadata = old(self, guess, shape)
        masks = {window: metadata.mask(window) for window in {None, *self.target.sliding_windows}}
        off = torch.where(metadata.positions >= start, metadata.positions + by, metadata.positions)
        return ids, replace(metadata, positions=off, _masks=masks, _biases={})

    return feed


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

"""A lane: one model, its keys and values, its counters. Only a lane can run a forward.

R = rows, W = positions fed, V = vocabulary, C = hidden size.
"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import Decoder
from mtbench.models.kv_cache import KVCache
from mtbench.models.loading import Checkpoint


class Forwarded(NamedTuple):
    """What a forward gave at its last positions."""

    logits: Tensor  # (R, judged, V); −∞ for ids no arm may emit: the mask, ids the tokenizer cannot decode
    hidden: Tensor | None  # (R, judged, C) what the LM head read, if asked for


class ModelRunner:
    """A checkpoint that can be run, with its cache and its count of forwards.

    With a `decoder` that runs the checkpoint's weights in place of transformers' modules.
    """

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder | None = None) -> None:
        self.checkpoint, self.decoder = checkpoint, decoder
        self.model = checkpoint.model
        self.device: torch.device = checkpoint.model.device
        self.forwards = 0
        self.host_s = 0.0  # seconds spent in forwards; on a CPU that is their whole time
        self.beside_s = 0.0  # of these, in what a method computes beside the model
        self.cache = KVCache()

    def reserve(self, rows: int, slots: int) -> None:
        """Have room for `rows` rows of `slots` slots; what was cached is forgotten."""
        self.cache.shape(rows, slots)
        if self.decoder is not None:
            self.decoder.reach(slots)

    @property
    def epoch(self) -> tuple[int, ...]:
        """Changes when memory that a forward uses was made anew."""
        return (self.cache.epoch, 0 if self.decoder is None else self.decoder.epoch)

    def forward(self, ids: Tensor, metadata: AttentionMetadata, judged: int, *, hidden: bool = False) -> Forwarded:
        """Run the model on (R, W) ids; what it gives at the last `judged` positions."""
        began = time.perf_counter()
        self.forwards += 1
        self.cache.set_batch(metadata)
        run = self._modules if self.decoder is None else self.decoder
        out = Forwarded(*run(ids, metadata, self.cache, judged, hidden))
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
        self, ids: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int, hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        """By transformers' modules. What the LM head reads, a hook on it tells, whatever the architecture."""
        read: list[Tensor] = []
        head = self.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])) if hidden else None
        logits = self.model(
            input_ids=ids,
            position_ids=metadata.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=judged,
            metadata=metadata,
        ).logits
        if hook is not None:
            hook.remove()
        return logits, read[0] if read else None

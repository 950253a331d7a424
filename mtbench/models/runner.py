"""The model runner: one checkpoint with its KV cache and counters. All forward passes of our loop go through it.

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
    """The output of a forward pass at its last `judged` positions."""

    logits: Tensor  # (R, judged, V); −∞ for suppressed ids: the mask and ids that the tokenizer cannot decode
    hidden: Tensor | None  # (R, judged, C), input of the LM head, if requested


class ModelRunner:
    """Runs a checkpoint's forward passes, with a KV cache, and counts and times them.

    With a `decoder` (mtbench/models/fused_decoder.py), that runs the weights in place of transformers' modules.
    """

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder | None = None) -> None:
        self.checkpoint, self.decoder = checkpoint, decoder
        self.model = checkpoint.model
        self.device: torch.device = checkpoint.model.device
        self.forwards = 0
        self.host_s = 0.0  # host time of forward passes and extra heads; on a CPU their whole time
        self.heads_s = 0.0  # the part of `host_s` in a method's extra heads
        self.cache = KVCache()

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for `rows` rows of `slots` slots. Cached keys and values are lost."""
        self.cache.shape(rows, slots)
        if self.decoder is not None:
            self.decoder.reserve(slots)

    @property
    def epoch(self) -> tuple[int, ...]:
        """Changes when memory that a forward pass uses was reallocated."""
        return (self.cache.epoch, 0 if self.decoder is None else self.decoder.epoch)

    @property
    def sliding_windows(self) -> list[int | None]:
        """The sliding windows of the decoder's layers, None for a layer without; empty without a decoder."""
        layers = [] if self.decoder is None else self.decoder.attention
        return list(dict.fromkeys(layer.sliding_window for layer in layers))

    def forward(self, ids: Tensor, metadata: AttentionMetadata, judged: int, *, hidden: bool = False) -> Forwarded:
        """Run the model on ids (R, W); return its output at the last `judged` positions."""
        started_at = time.perf_counter()
        self.forwards += 1
        self.cache.set_batch(metadata)
        run = self._modules if self.decoder is None else self.decoder
        out = Forwarded(*run(ids, metadata, self.cache, judged, hidden))
        out.logits.index_fill_(-1, self.checkpoint.suppressed, float("-inf"))
        self.host_s += time.perf_counter() - started_at
        return out

    def run_heads(self, heads: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return `heads(*tensors)`, a method's extra prediction heads, and add its time to `host_s` and `heads_s`."""
        started_at = time.perf_counter()
        result = heads(*tensors)
        spent_s = time.perf_counter() - started_at
        self.host_s += spent_s
        self.heads_s += spent_s
        return result

    def _modules(
        self, ids: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int, hidden: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run transformers' modules. With `hidden`, a hook on the LM head records its input, on any architecture."""
        head_inputs: list[Tensor] = []
        hook = None
        if hidden:
            head = self.model.get_output_embeddings()
            hook = head.register_forward_pre_hook(lambda _, inputs: head_inputs.append(inputs[0]))
        logits = self.model(
            input_ids=ids,
            position_ids=metadata.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=judged,
            metadata=metadata,
        ).logits
        if hook is None:
            return logits, None
        hook.remove()
        return logits, head_inputs[0]

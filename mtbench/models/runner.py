"""The model runner: one checkpoint with its KV cache and counters. All forward passes of our loop go through it.

R = rows, W = positions fed, V = vocabulary, C = hidden size.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import Decoder
from mtbench.models.kv_cache import KVCache
from mtbench.models.loading import Checkpoint

Result = TypeVar("Result")


class Forwarded(NamedTuple):
    """The output of a forward pass at its last `judged` positions."""

    logits: Tensor  # (R, judged, V); −∞ for suppressed ids: the mask and ids that the tokenizer cannot decode
    feature: Tensor | None = None  # (R, judged, C), a draft's own feature for its next step


class ModelRunner:
    """Runs a checkpoint's forward passes, with a KV cache, and counts and times them.

    With a `decoder` (mtbench/models/fused_decoder.py), that runs the weights in place of transformers' modules.
    """

    behind = 1  # decided tokens that a prefill leaves out, since the first step feeds them
    taps: tuple[int, ...] = ()  # hidden states of the target that it reads
    parallel = False  # one forward drafts all tokens of a step
    longest = 1  # most of its own tokens that stand for one of the target's
    feed_reads = False  # `feed` reads lengths from the device, so no CUDA graph can hold it

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder | None = None) -> None:
        self.checkpoint, self.decoder = checkpoint, decoder
        self.model = checkpoint.model
        self.device: torch.device = checkpoint.model.device
        self.forwards = 0
        self.host_s = 0.0  # host time of forward passes and extra heads; on a CPU their whole time
        self.heads_s = 0.0  # the part of `host_s` in a method's extra heads
        self.cache = KVCache()
        self.vocabulary = checkpoint.vocabulary  # V

    def reserve(self, rows: int, slots: int, taps: Sequence[int] = ()) -> None:
        """Make room for `rows` rows of `slots` slots, and for features of these taps. The cached data are lost."""
        self.cache.shape(rows, slots, taps, like=self.model.get_output_embeddings().weight if taps else None)
        if self.decoder is not None:
            self.decoder.reserve(slots)

    @cached_property
    def parameters(self) -> int:
        """How many the model has."""
        return int(self.model.num_parameters())

    @property
    def epoch(self) -> tuple[int, ...]:
        """Changes when memory that a forward pass uses was reallocated."""
        return (self.cache.epoch, 0 if self.decoder is None else self.decoder.epoch)

    @property
    def sliding_windows(self) -> list[int | None]:
        """The sliding windows of the decoder's layers, None for a layer without; empty without a decoder."""
        layers = [] if self.decoder is None else self.decoder.attention
        return list(dict.fromkeys(layer.sliding_window for layer in layers))

    def forward(self, ids: Tensor, metadata: AttentionMetadata, judged: int) -> Forwarded:
        """Run the model on ids (R, W); return its output at the last `judged` positions."""
        with self._counted(metadata):
            run = self._modules if self.decoder is None else self.decoder
            logits = run(ids, metadata, self.cache, judged)
        return Forwarded(logits.index_fill_(-1, self.checkpoint.suppressed, float("-inf")))

    # --- A draft's text: that of the target in its own tokens, here the same (mtbench/models/vocabularies.py) ---

    def length(self, tokens: Tensor, known: Tensor, free: int = 0) -> Tensor:
        """Return the length of the first `known` (R,) of the target's tokens (R, S) in its own tokens, (R,).

        At most as many as leave `free` slots of its cache.
        """
        return known

    def text(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Return its own ids in its slots (R, W), given the target's tokens (R, S)."""
        return tokens.gather(1, slots)

    def own(self, tokens: Tensor) -> Tensor:
        """Return its own ids of tokens that it drafted."""
        return tokens

    def feed(self, tokens: Tensor, metadata: AttentionMetadata) -> None:
        """Cache the tokens (R, S) in the slots of the metadata, without an output."""
        self.forward(tokens.gather(1, metadata.slots), metadata, judged=1)

    @contextmanager
    def _counted(self, metadata: AttentionMetadata) -> Iterator[None]:
        started_at = time.perf_counter()
        self.forwards += 1
        self.cache.set_batch(metadata)
        yield
        self.host_s += time.perf_counter() - started_at

    def run_heads(self, heads: Callable[..., Result], *tensors: Tensor) -> Result:
        """Return `heads(*tensors)`, a method's extra prediction heads, and add its time to `host_s` and `heads_s`."""
        started_at = time.perf_counter()
        result = heads(*tensors)
        spent_s = time.perf_counter() - started_at
        self.host_s += spent_s
        self.heads_s += spent_s
        return result

    def _modules(self, ids: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int) -> Tensor:
        """Return the logits of transformers' modules, (R, judged, V). Hooks keep the features."""
        with watched_hidden_states(self.model, cache.taps, lambda tap, x: cache.keep_feature(tap, x.flatten(0, 1))):
            logits: Tensor = self.model(
                input_ids=ids,
                position_ids=metadata.positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=judged,
                **metadata.arguments(self.model),
            ).logits
        return logits


@contextmanager
def watched_hidden_states(model: Any, taps: Sequence[int], keep: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Call `keep(tap, hidden)` with hidden states (R, W, C) in every forward pass of transformers' modules meanwhile.

    Tap i is the input of layer i, and the last one the LM head's input, as in transformers' `hidden_states`. Works on
    any architecture with a list of layers.
    """
    hooks, layers = [], model.base_model.layers if taps else ()
    for tap in taps:
        if tap < len(layers):
            hooks.append(layers[tap].register_forward_pre_hook(lambda _, inputs, tap=tap: keep(tap, inputs[0])))
        else:
            hooks.append(
                model.base_model.register_forward_hook(lambda _, __, out, tap=tap: keep(tap, out.last_hidden_state))
            )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

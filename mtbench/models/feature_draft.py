"""Drafts that read the target's hidden states: the interface of their checkpoints, and the runner that feeds them.

EAGLE (arXiv 2401.15077, 2503.01840), DFlash, DSpark (arXiv 2607.05147) and multi-token-prediction layers (arXiv
2412.19437) are small models without an embedding or LM head of their own. At position i they read a feature, made of
the target's hidden states at position i, and the token at position i + 1. Their formats are in `mtbench/models/drafts`.

The draft has its own KV cache. An entry for slot i is final if it was made from a feature of the target.

R = rows, P = features fed, W = tokens fed, T = taps, C = hidden size of the target, V = the target's vocabulary.
"""

import copy
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mtbench.models.attention import ALIGNED, ATTENTION, AttentionMetadata
from mtbench.models.configuration import SERVED_ROPES
from mtbench.models.kv_cache import KVCache
from mtbench.models.loading import Calls, Checkpoint, layer_parameters
from mtbench.models.runner import Forwarded, ModelRunner


class FeatureDraft(nn.Module):
    """A draft model. Embedding and LM head may be the target's; they are then no parameters of the module.

    A sequential draft reads as many tokens as features: token i + 1 with the feature of position i. It predicts one
    token from each, and makes its own feature for the next step (`advance`); or, if it is `parallel`, it reads masks,
    each the mask token with the feature `mask_hidden`, and predicts a token from each mask. A block draft caches the
    features fed, with any tokens, then reads the tokens of a block in the slots after them, and predicts
    several at once.

    It also has the attributes of a model of transformers: `config`, `dtype`, `device`, `num_parameters`, and both
    embeddings.
    """

    settled: tuple[str, ...] = ("embed_tokens.", "lm_head.")  # names of parts that `settle` makes or drops

    def __init__(self, format: "DraftConfig", config: Any, target: Any) -> None:
        """`config`: a configuration of transformers for its layers. `target`: a model of transformers."""
        super().__init__()
        self.format, self.config = format, config
        self._target = [target]  # in a list, so that it does not become a submodule

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the embedding that it reads: its own if it has one, else the target's."""
        embedding: nn.Embedding = getattr(self, "embed_tokens", None) or self._target[0].get_input_embeddings()
        return embedding

    def get_output_embeddings(self) -> nn.Linear:
        """Return the LM head that it uses: its own if it has one, else the target's."""
        head: nn.Linear = getattr(self, "lm_head", None) or self._target[0].get_output_embeddings()
        return head

    def settle(self, stored: dict[str, Tensor]) -> None:
        """Make or drop the parts that a checkpoint may lack, given its tensors by the module's names.

        Called once, before they are loaded. Here: room for an embedding and an LM head that are stored; copies of the
        target's are removed from `stored`. Raises ValueError for values that it cannot run with.
        """
        target = self._target[0]
        for name, theirs in (
            ("embed_tokens", target.get_input_embeddings()),
            ("lm_head", target.get_output_embeddings()),
        ):
            weight = stored.get(f"{name}.weight")
            if weight is None or hasattr(self, name):
                continue
            if weight.shape == theirs.weight.shape and torch.equal(weight.to(theirs.weight), theirs.weight):
                del stored[f"{name}.weight"]
            else:
                setattr(self, name, copy.deepcopy(theirs))

    @property
    def drafted_ids(self) -> Tensor | None:
        """The target's ids of the LM head's rows, (D,), if the vocabulary is trimmed."""
        return None

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def num_parameters(self) -> int:
        """Return how many parameters a forward reads: of the LM head too if it is the target's, of no embedding."""
        own = sum(parameter.numel() for parameter in layer_parameters(self))
        return self.get_output_embeddings().weight.numel() + own // self.format.modules

    def forward(
        self,
        ids: Tensor,
        features: Tensor,
        metadata: AttentionMetadata,
        cache: KVCache,
        judged: int,
        depth: int,
    ) -> tuple[Tensor, Tensor]:
        """Return logits (R, judged, V) and features (R, judged, C) of the last `judged` positions.

        `ids`: (R, W) target ids. `features`: (R, P, T·C) hidden states of the target if `depth` is 0, else (R, P, C)
        what the step before returned. A draft of several modules returns the features of all positions.
        `metadata`: slots and positions of these; of a block draft P + W. `KVCache.set_batch` was called with it.
        Logits are in the target's vocabulary, −∞ for ids it cannot draft.
        """
        read, feature = self.advance(ids, features, metadata, cache, judged, depth)
        return self.logits(read), feature

    def logits(self, read: Tensor) -> Tensor:
        """Return the logits (R, judged, V) of the LM head's input."""
        logits: Tensor = self.get_output_embeddings()(read)
        return logits

    def advance(
        self, ids: Tensor, features: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int, depth: int
    ) -> tuple[Tensor, Tensor]:
        """Return the LM head's input, and the features; both (R, judged, C). Sequential drafts only.

        It is `forward` without the LM head. Training calls it with its own metadata and cache.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """The configuration of a draft in any format. Each format has a subclass."""

    sequential: ClassVar[bool] = True  # it drafts token by token; else a block at once
    modules: int = 1  # of one size, that draft in turn, a token in each forward

    name: str  # of the format, for messages
    raw: Mapping[str, Any]  # config.json
    taps: tuple[int, ...] = ()  # hidden states of the target that it reads, numbered as transformers' `hidden_states`
    width: int  # C that it expects of the target
    vocabulary: int  # V that it expects of the target
    max_position_embeddings: int
    mask_id: int | None = None

    def for_target(self, target: Any) -> "DraftConfig":
        """Return the configuration with the parts that depend on the target, given the target's text configuration.

        Raises ValueError, with the draft's needs, for a target that it cannot be run with.
        """
        return self

    @property
    def parallel(self) -> bool:
        """Whether masks after the last token predict more tokens in the same forward, of a sequential draft."""
        return False

    @property
    def served(self) -> bool:
        """Whether serving engines run such a draft."""
        return True

    @abstractmethod
    def build(self, target: Any) -> FeatureDraft:
        """Return the module with unset weights, for a target model of transformers; on the target's device and dtype.

        It must run on the meta device, too.
        """

    @property
    def room(self) -> int:
        """How many slots of a row its cache needs more than the target's."""
        return 0

    def rename(self, name: str) -> str | None:
        """Return the module's name of a stored tensor; None if it is not needed."""
        return name


class DraftRunner(ModelRunner):
    """Runs a draft on the features that the target's runner keeps. It counts and times as every model runner."""

    def __init__(self, checkpoint: Checkpoint, target: ModelRunner) -> None:
        super().__init__(checkpoint)
        self.target = target
        self.taps, self.parallel = self.draft.format.taps, self.draft.format.parallel
        self.room = -(-self.draft.format.room // ALIGNED) * ALIGNED
        self.modules = self.draft.format.modules
        self.behind = 1 + self.modules  # the last decided token has no feature yet; a later module reads later tokens

    @property
    def draft(self) -> FeatureDraft:
        """The draft model."""
        draft: FeatureDraft = self.model
        return draft

    def reserve(self, rows: int, slots: int, taps: Sequence[int] = ()) -> None:
        super().reserve(rows, slots + self.room, taps)

    def step(
        self, ids: Tensor, features: Tensor, metadata: AttentionMetadata, judged: int, *, depth: int = 0
    ) -> Forwarded:
        """Run the draft; the arguments are those of `FeatureDraft.forward`."""
        with self._counted(metadata):
            logits, feature = self.draft(ids, features, metadata, self.cache, judged, depth)
        return Forwarded(logits.index_fill_(-1, self.checkpoint.suppressed, float("-inf")), feature)

    def feed(self, tokens: Tensor, metadata: AttentionMetadata) -> None:
        """Cache the entries of decided positions: the target's features there, and the tokens (R, S) after them."""
        features: Tensor | None = self.read(metadata.slots, metadata.rows)
        for depth in range(self.modules):
            assert features is not None
            ids = self.following(tokens, metadata.slots + depth)
            features = self.step(ids, features, metadata, judged=0, depth=depth).feature

    def following(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """Return the ids that it reads with the features in slots (R, P): of each position the token after it."""
        following = (slots + 1).clamp(max=tokens.shape[1] - 1)
        return tokens.gather(1, following) if self.draft.format.sequential else tokens[:, :0]

    def read(self, slots: Tensor, rows: Tensor | None = None) -> Tensor:
        """Return its features of the target in slots (R, P), (R, P, T·C)."""
        return self.target.cache.features(self.taps, slots, rows)


def draft_checkpoint(source: str, draft: FeatureDraft, target: Checkpoint) -> Checkpoint:
    """Return a loaded draft as a checkpoint beside its target, whose tokenizer and special ids it shares."""
    calls = Calls(target.model.device)
    calls.watch(draft)
    return replace(
        target,
        source=source,
        model=draft,
        mask_id=draft.format.mask_id,
        max_positions=draft.format.max_position_embeddings,
        calls=calls,
    )


LAYER = (  # the entries of config.json for layers; the file may have more, such as the attention that runs them
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "attention_bias"),
    *("mlp_bias", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters"),
    *("layer_types", "use_sliding_window", "sliding_window", "max_window_layers"),
)


def layers_of(kind: Any, raw: Mapping[str, Any], others: Sequence[str] = ()) -> Any:
    """Return the configuration of a draft's layers, of a class of transformers. Raises ValueError for other ropes.

    `others`: entries of config.json for such layers beside LAYER.
    """
    read = {name: raw[name] for name in (*LAYER, *others) if name in raw}
    config = kind.from_dict(read, attn_implementation=ATTENTION)
    rope = str((config.rope_parameters or {}).get("rope_type", "default"))
    if rope not in SERVED_ROPES:
        raise ValueError(f"rope type {rope!r:.60} is not supported; {', '.join(sorted(SERVED_ROPES))} are")
    return config

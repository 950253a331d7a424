"""EAGLE-3, EAGLE-3.1 and P-EAGLE drafts, in the formats of SpecForge, speculators, vLLM and DeepSpec.

Li, Wei, Zhang, Zhang: "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test",
NeurIPS 2025, arXiv 2503.01840; EAGLE-3.1: arXiv 2605.09992. One decoder layer, whose attention reads the embedding of a
token beside a feature. The first feature is a product of the target's hidden states, each later one the draft's own
output, before the last norm (3) or after it (3.1: `norm_output`). The vocabulary may be cut: draft id j is the target's
j + d2t[j].

P-EAGLE (Hui et al.: "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training", arXiv 2602.01469) drafts all tokens in
one forward. Masks follow the last entry, at the next positions: each has a learned row of hidden states, `mask_hidden`,
in place of the target's, and the mask token in place of the token. Attention stays causal. There may be several layers;
those after the first read the layer before. A draft is one if its config.json names the mask token.

Hidden states are named in three ways, which differ by one (`_taps`). Formats, read in the sources of August 2026:

- SpecForge's, which SGLang serves and SafeAILab/EAGLE began: `LlamaForCausalLMEagle3`, weights `midlayer.`.
- speculators', which vLLM serves: `speculators_model_type`, layer in `transformer_layer_config`, weights `layers.0.`.
- DeepSpec's: `Qwen3Eagle3Model`, five hidden states, the whole vocabulary, weights `layers.0.`.
- P-EAGLE's, read in speculators (c05b95b: `models/peagle`), SpecForge (`modeling/draft/peagle.py`) and vLLM 0.32
  (`llama_eagle3`, `qwen3_eagle3`, `llm_base_proposer`, `speculators/algos.py`): `speculators_model_type` is `peagle`,
  or a configuration of SpecForge's format has a mask token; weights `layers.N.`, and `mask_hidden` of shape (1, 1, T·C)
  or (1, T·C), which is normed and projected as hidden states are. vLLM calls the mask token `mask_token_id`,
  `pard_token` or `ptd_token_id`; it ignores `fc_norm` of speculators' `peagle`. The config.json of the checkpoints that
  the authors released could not be read.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config
from transformers.modeling_utils import local_torch_dtype
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from mtbench.models.attention import AttentionMetadata
from mtbench.models.checkpoint_files import check_sizes
from mtbench.models.feature_draft import DraftConfig, FeatureDraft, layers_of
from mtbench.models.kv_cache import KVCache

LLAMA, QWEN3 = LlamaConfig.model_type, Qwen3Config.model_type
CONFIGS: dict[str, type[PretrainedConfig]] = {LLAMA: LlamaConfig, QWEN3: Qwen3Config}
ROTARY = {LLAMA: modeling_llama.LlamaRotaryEmbedding, QWEN3: modeling_qwen3.Qwen3RotaryEmbedding}
ATTENTIONS = {LLAMA: modeling_llama.LlamaAttention, QWEN3: modeling_qwen3.Qwen3Attention}
MLPS = {LLAMA: modeling_llama.LlamaMLP, QWEN3: modeling_qwen3.Qwen3MLP}
RMSNorm = modeling_llama.LlamaRMSNorm  # Qwen3's is the same
ARCHITECTURES = SPECFORGE, DEEPSPEC, PARALLEL = "LlamaForCausalLMEagle3", "Qwen3Eagle3Model", "PEagleDraftModel"
SPECULATORS = EAGLE3, PEAGLE = "eagle3", "peagle"  # values of speculators_model_type
MASK_IDS = ("mask_token_id", "pard_token", "ptd_token_id")  # in the order in which vLLM looks for them
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Stored in some checkpoints and not used here: the reverse of d2t, the target's own weights, constants, and a norm that
# vLLM's later layers have and never apply.
UNUSED = re.compile(r"t2d$|verifier_(norm|lm_head)\.|.*rotary_emb\.inv_freq$|layers\.[1-9]\d*\.hidden_norm\.")
Raw = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DraftConfig):
    """The configuration of an EAGLE-3 draft."""

    layer: PretrainedConfig
    tap_count: int
    draft_vocabulary: int
    norm_each: bool = False  # a norm for each hidden state of the target (`fc_norm`)
    norm_all: bool = False  # one norm over all of them (`norm_before_fc`)
    residual_normed: bool = False  # the residual is the normed feature (`norm_before_residual`)
    feedback_normed: bool = False  # its own feature is its output after the last norm (`norm_output`)

    @property
    def parallel(self) -> bool:
        return self.mask_id is not None

    def for_target(self, target: Any) -> DraftConfig:
        layers = target.num_hidden_layers
        taps = self.taps or (2, layers // 2, layers - 3)  # as in all sources, if the configuration names none
        if not all(0 <= tap < layers for tap in taps):
            # Number n would be the last layer's output, before the last norm in some sources and after it in others.
            raise ValueError(f"reads the inputs of layers {', '.join(map(str, taps))}, and the target has {layers}")
        return replace(self, taps=taps)

    @property
    def trimmed(self) -> bool:
        return self.draft_vocabulary != self.vocabulary

    def build(self, target: Any) -> "EagleDraft":
        dtype = target.get_output_embeddings().weight.dtype
        with torch.device(target.device), local_torch_dtype(dtype):
            return EagleDraft(self, target)

    def rename(self, name: str) -> str | None:
        name = re.sub(r"^(midlayer|layer)\.", "layers.0.", name.removeprefix("model."))
        return None if UNUSED.match(name) or (not self.trimmed and name == "d2t") else name


def recognise(raw: Raw, part: str) -> EagleConfig | None:
    """Return the configuration of an EAGLE-3 draft, None for anything else (mtbench/models/drafts/loading.py)."""
    architectures = raw.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if part:
        return None
    if raw.get("speculators_model_type") in SPECULATORS:
        return _speculators(raw)
    if name in (SPECFORGE, PARALLEL):
        return _config(raw, "SpecForge's", raw, LLAMA, _taps(raw), _mask_id(raw, raw, needed=name == PARALLEL))
    if name == DEEPSPEC:
        if "target_layer_ids" not in raw:
            raise ValueError("target_layer_ids is missing")
        return _config(raw, "DeepSpec's", raw, QWEN3, _ids(raw["target_layer_ids"], 1))
    if isinstance(name, str) and "eagle3" in name.lower():
        raise ValueError(f"architecture {name!r:.60} is not supported; {', '.join(ARCHITECTURES)} are")
    return None


def _speculators(raw: Raw) -> EagleConfig:
    nested = raw.get("transformer_layer_config")
    if not isinstance(nested, Mapping):
        raise ValueError("transformer_layer_config is not an object")
    check_sizes(nested)
    mask_id = _mask_id(raw, nested, needed=True) if raw["speculators_model_type"] == PEAGLE else None
    return _config(raw, "speculators'", nested, nested.get("model_type", QWEN3), _taps(raw), mask_id)


def _config(
    raw: Raw, whose: str, layers: Raw, kind: Any, taps: tuple[int, ...], mask_id: int | None = None
) -> EagleConfig:
    """Return the configuration. `layers`: the fields of the layers, which are of a `kind`."""
    layer = _layer(layers, kind, several=mask_id is not None)
    if _flag(raw, "fc_norm") and _flag(raw, "norm_before_fc"):
        raise ValueError("fc_norm and norm_before_fc are both true, and one of them is supported")
    draft_vocabulary, width = raw.get("draft_vocab_size"), raw.get("target_hidden_size")
    check_sizes({"vocab_size": draft_vocabulary, "hidden_size": width})
    return EagleConfig(
        name=f"{'EAGLE-3' if mask_id is None else 'P-EAGLE'}, {whose} format",
        raw=raw,
        mask_id=mask_id,
        taps=taps,
        tap_count=len(taps) or 3,
        width=width or layer.hidden_size,
        vocabulary=layer.vocab_size,
        draft_vocabulary=draft_vocabulary or layer.vocab_size,
        max_position_embeddings=layer.max_position_embeddings,
        layer=layer,
        norm_each=_flag(raw, "fc_norm"),
        norm_all=_flag(raw, "norm_before_fc"),
        residual_normed=_flag(raw, "norm_before_residual"),
        # Before September 2026 SpecForge trained with feedback before the norm, whatever this flag was; its default
        # was true. Absent means false in every source of today.
        feedback_normed=_flag(raw, "norm_output"),
    )


def _layer(raw: Raw, kind: Any, *, several: bool) -> PretrainedConfig:
    if kind not in CONFIGS:
        raise ValueError(f"a layer of type {kind!r:.60} is not supported; {', '.join(CONFIGS)} are")
    config: PretrainedConfig = layers_of(CONFIGS[kind], raw)
    if config.num_hidden_layers != 1 and not several:
        raise ValueError(f"num_hidden_layers is {config.num_hidden_layers}, and drafts of one layer are supported")
    return config


def _mask_id(raw: Raw, layers: Raw, *, needed: bool) -> int | None:
    """Return the mask token of a draft that drafts in parallel; None if none is named and none is needed."""
    named = {name: raw[name] for name in MASK_IDS if raw.get(name) is not None}
    for name, value in named.items():
        if type(value) is not int or not 0 <= value < layers.get("vocab_size", 0):
            raise ValueError(f"{name} is {value!r:.60}, and the ids are 0 to vocab_size - 1")
        return value
    if needed or _flag(raw, "parallel_drafting"):
        raise ValueError(f"it drafts in parallel and names no mask token; {', '.join(MASK_IDS)} would")
    return None


def _taps(raw: Raw) -> tuple[int, ...]:
    """Return which hidden states the configuration names; () for none.

    speculators and vLLM name the layer whose input is read. SpecForge and SGLang nest the list in `eagle_config`, and
    name the layer whose output is read, as DeepSpec does.
    """
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError("eagle_config is not an object")
    if nested.get("use_aux_hidden_state") is False:
        raise ValueError("use_aux_hidden_state is false, and drafts that read hidden states of layers are supported")
    if (ids := nested.get(LAYER_IDS)) is not None:
        return _ids(ids, 1)
    return () if (ids := raw.get(LAYER_IDS)) is None else _ids(ids, 0)


def _ids(value: Any, shift: int) -> tuple[int, ...]:
    if not isinstance(value, Sequence) or not value or any(type(i) is not int or i < 0 for i in value):
        raise ValueError(f"the layers {value!r:.60} are no list of layer numbers")
    return tuple(i + shift for i in value)


def _flag(raw: Raw, name: str) -> bool:
    value = raw.get(name) or False
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.60}, not true or false")
    return value


class EagleLayer(nn.Module):
    """A decoder layer. The attention of the first reads embedding and feature, both normed, side by side."""

    def __init__(self, config: Any, index: int, residual_normed: bool) -> None:
        super().__init__()
        self.residual_normed = residual_normed
        self.self_attn: Any = ATTENTIONS[config.model_type](config, layer_idx=index)
        if index == 0:
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow: nn.Linear = getattr(self.self_attn, name)
                wide = nn.Linear(2 * config.hidden_size, narrow.out_features, bias=narrow.bias is not None)
                setattr(self.self_attn, name, wide)
        self.mlp = MLPS[config.model_type](config)
        self.input_layernorm, self.post_attention_layernorm = (
            RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2)
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps) if index == 0 else None

    def forward(
        self,
        embedding: Tensor,
        feature: Tensor,
        rotary: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        cache: KVCache,
        judged: int,
    ) -> Tensor:
        """Return its output at the last `judged` positions, (R, judged, C). `feature`: of a later layer, its input."""
        if self.hidden_norm is None:
            residual, read = feature, self.input_layernorm(feature)
        else:
            normed = self.hidden_norm(feature)
            residual = normed if self.residual_normed else feature
            read = torch.cat((self.input_layernorm(embedding), normed), -1)
        attended, _ = self.self_attn(
            read,
            position_embeddings=rotary,
            attention_mask=None,
            past_key_values=cache,
            metadata=metadata,
        )
        hidden = (residual + attended)[:, residual.shape[1] - judged :]
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class EagleDraft(FeatureDraft):
    """An EAGLE-3 draft. It stores its own embedding or LM head, or uses the target's."""

    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    d2t: Tensor | None  # (D,) what to add to a draft id for the target's; None: the vocabulary is the target's
    mask_hidden: Tensor | None  # (1, 1, T·C) in place of the target's hidden states; None: it drafts token by token
    format: EagleConfig
    settled = (*FeatureDraft.settled, "mask_hidden")

    def __init__(self, format: EagleConfig, target: Any) -> None:
        config: Any = format.layer
        super().__init__(format, config, target)
        taps, eps = format.tap_count, config.rms_norm_eps
        self.fc_norm = nn.ModuleList(RMSNorm(format.width, eps) for _ in range(taps)) if format.norm_each else None
        self.input_norm = RMSNorm(taps * format.width, eps) if format.norm_all else None
        self.fc = nn.Linear(taps * format.width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(
            EagleLayer(config, index, format.residual_normed) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps)
        self.rotary_emb = ROTARY[config.model_type](config)
        mask_hidden = nn.Parameter(torch.zeros(1, 1, taps * format.width)) if format.parallel else None
        self.register_parameter("mask_hidden", mask_hidden)
        d2t = torch.zeros(format.draft_vocabulary, dtype=torch.long) if format.trimmed else None
        self.register_buffer("d2t", d2t)
        with torch.device("meta"):  # until `settle` knows whether they are stored
            self.embed_tokens = nn.Embedding(format.vocabulary, config.hidden_size)
            self.lm_head = nn.Linear(config.hidden_size, format.draft_vocabulary, bias=False)

    def settle(self, stored: dict[str, Tensor]) -> None:
        if self.mask_hidden is not None and "mask_hidden" in stored:
            stored["mask_hidden"] = stored["mask_hidden"].reshape(1, 1, -1)
        as_wide = self.config.hidden_size == self.format.width
        own = "embed_tokens.weight" in stored and self.config.tie_word_embeddings
        for name, shared in (("embed_tokens", as_wide), ("lm_head", as_wide and self.d2t is None and not own)):
            if f"{name}.weight" in stored:
                getattr(self, name).to_empty(device=self.fc.weight.device)
            elif shared:
                setattr(self, name, None)
            else:
                raise ValueError(f"{name}.weight is missing, and the target's cannot take its place")
        if self.d2t is not None and "d2t" in stored:
            ids = stored["d2t"] + torch.arange(len(stored["d2t"]))
            if ids.is_floating_point() or ids.ndim != 1 or len(ids.unique()) < len(ids):
                raise ValueError("d2t gives two ids the same token")
            if ids.min() < 0 or ids.max() >= self.format.vocabulary:
                raise ValueError(f"d2t names the token {int(ids.max())}, and there are {self.format.vocabulary:,}")

    @property
    def drafted_ids(self) -> Tensor | None:
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def trim(self, ids: Tensor) -> None:
        """Draft the target's tokens `ids` (D,), ascending, by their rows of the target's LM head, which stay frozen.

        For a draft that is trained: called once, in the place of `settle`.
        """
        assert self.d2t is not None
        self.embed_tokens = None
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        head = self._target[0].get_output_embeddings().weight
        self.lm_head = nn.Linear(head.shape[1], len(ids), bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(head.detach()[ids.to(head.device)], requires_grad=False)

    def logits(self, read: Tensor) -> Tensor:
        logits, ids = super().logits(read), self.drafted_ids
        if ids is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.format.vocabulary), float("-inf"))
        return whole.index_copy_(-1, ids, logits)

    def advance(
        self, ids: Tensor, features: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int, depth: int
    ) -> tuple[Tensor, Tensor]:
        feature = features if depth else self.fc(self._normed(features))
        rotary = self.rotary_emb(feature, metadata.positions)
        embedding, hidden = self.get_input_embeddings()(ids), feature
        for layer in self.layers:  # the later layers need all positions of the earlier
            kept = judged if layer is self.layers[-1] else ids.shape[1]
            hidden = layer(embedding, hidden, rotary, metadata, cache, kept)
        normed: Tensor = self.norm(hidden)
        return normed, normed if self.format.feedback_normed else hidden

    def _normed(self, features: Tensor) -> Tensor:
        """Return the target's hidden states (R, P, T·C), normed as the configuration says."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return features

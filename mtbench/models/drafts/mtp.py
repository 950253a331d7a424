"""Multi-token-prediction layers, which lie in the target's own checkpoint: `SOURCE#mtp`.

DeepSeek-AI: "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 2.2. The formats are those of DeepSeek-V3 (also
GLM-4.5, arXiv 2508.06471, GLM-4.7-Flash and Hunyuan 3), MiMo (arXiv 2505.07608), Qwen3.5 (also Qwen3-Next and EXAONE
MoE), ERNIE 4.5 and LongCat-Flash (arXiv 2509.01322). mtbench's loop refuses targets with recurrent layers, as the
published Qwen3.5 and Qwen3-Next have; engines serve them, and those of other formats.
At position i the token i + 1 and the target's last hidden state are normed, joined, projected and read by an ordinary
decoder layer of the target's architecture; the target's LM head reads its normed output, ERNIE's without a norm.
Layer k of several (from 0) reads the token i + k + 1 and the output of layer k - 1, and predicts the token i + k + 2.
Most checkpoints have one layer, which is repeated.

Where formats are open, it follows vLLM and SGLang. The feature is the LM head's input, so it comes after the target's
last norm, and what is handed on comes after the layer's own last norm (as in transformers; Step-3.5's layers hand on
what comes before, and MiMo-V2's all read the target's state: formats that are not read). The embedding at position 0
is blank, except in Qwen's and LongCat's format. With several layers, SGLang keeps what a layer cached for drafts;
here, in vLLM and in transformers the next step replaces it.

`mtbench train mtp` adds a layer to a target of any architecture, in MiMo's format, and an entry to its config.json.

R = rows, W = positions fed, C = hidden size.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from mtbench.models.attention import ATTENTION, AttentionMetadata
from mtbench.models.feature_draft import DraftConfig, FeatureDraft
from mtbench.models.kv_cache import KVCache

NAME = "mtp"  # of the part of a checkpoint
MOST, FULL = 64, ["full_attention"]  # layers that are read, and their kind
EXPERTS = "block.mlp.experts."
LAYERS, FIRST = "layers.", "layers.0."  # of names in the module of several layers


@dataclass(frozen=True, slots=True)
class Layout:
    """How a family of checkpoints stores its layers, and how it joins token and feature."""

    name: str
    counted_by: str  # entry of config.json: number of layers
    stem: str  # of the tensors' names; {k} stands for the layer's number, {n} for that behind the target's layers
    parts: Mapping[str, str]  # beginning of the rest -> the module's. The first that fits. Without a number: of all
    token_first: bool = True
    blank_start: bool = True  # the embedding at position 0 is zero
    last_norm: bool = True
    dense: bool = False  # the layer has no experts, whatever the target's layers have
    half: bool = False  # the layer is one of the two halves of the target's layers, without experts
    layers: str = "num_hidden_layers"  # entry of config.json: number of the target's layers
    count: int = 0  # number of layers if config.json has none


APPENDED = Layout(
    "multi-token prediction as in DeepSeek-V3",
    "num_nextn_predict_layers",
    "model.layers.{n}.",
    {
        "enorm.": "token_norm.",
        "hnorm.": "feature_norm.",
        "eh_proj.": "join.",
        "shared_head.norm.": "last_norm.",
        "shared_head.head.": "lm_head.",  # published checkpoints store the target's once more
        "embed_tokens.": "embed_tokens.",
        "": "block.",
    },
)
MIMO = Layout(
    "multi-token prediction as in MiMo",
    "num_nextn_predict_layers",
    "model.mtp_layers.{k}.",
    {
        "token_layernorm.": "token_norm.",
        "hidden_layernorm.": "feature_norm.",
        "input_proj.": "join.",
        "final_layernorm.": "last_norm.",
        "": "block.",
    },
    token_first=False,
)
HUNYUAN = replace(
    APPENDED,
    name="multi-token prediction as in Hunyuan 3",
    parts={
        "final_layernorm.": "last_norm.",
        "mlp.router.gate.": "block.mlp.gate.",
        "mlp.expert_bias": "block.mlp.e_score_correction_bias",
        "mlp.shared_mlp.": "block.mlp.shared_experts.",
        **APPENDED.parts,
    },
)
QWEN = Layout(
    "multi-token prediction as in Qwen3.5",
    "mtp_num_hidden_layers",
    "mtp.",
    {
        "pre_fc_norm_embedding.": "token_norm.",
        "pre_fc_norm_hidden.": "feature_norm.",
        "fc.": "join.",
        "norm.": "last_norm.",
        "layers.{k}.": "block.",
    },
    blank_start=False,
)
ERNIE = Layout(
    "multi-token prediction as in ERNIE 4.5",
    "num_nextn_predict_layers",
    "model.mtp_",
    {
        "emb_norm.{k}.": "token_norm.",
        "hidden_norm.{k}.": "feature_norm.",
        "linear_proj.{k}.": "join.",
        "block.{k}.": "block.",
    },
    last_norm=False,
    dense=True,
)
LONGCAT = Layout(
    "multi-token prediction as in LongCat-Flash",
    "num_nextn_predict_layers",
    "model.mtp.",
    {
        "layers.{k}.enorm.m.": "token_norm.",
        "layers.{k}.hnorm.m.": "feature_norm.",
        "layers.{k}.eh_proj.": "join.",
        "norm.": "last_norm.",
        "embed_tokens.": "embed_tokens.",
        "layers.{k}.transformer_layer.mlp.": "block.mlp.",
        "layers.{k}.": "block.",
    },
    blank_start=False,
    half=True,
    layers="num_layers",
    count=1,
)
ADDED = replace(MIMO, counted_by="num_mimo_mtp_layers")  # to a checkpoint of any architecture
LAYOUTS = {
    "deepseek_v3": APPENDED,
    "ernie4_5_moe": ERNIE,
    "exaone_moe": replace(QWEN, counted_by="num_nextn_predict_layers", dense=True, count=1),
    "glm4_moe": APPENDED,
    "glm4_moe_lite": APPENDED,
    "hy_v3": HUNYUAN,
    "longcat_flash": LONGCAT,
    "mimo": MIMO,
    "qwen3_5_moe_text": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_next": replace(QWEN, counted_by="num_nextn_predict_layers", count=1),
}


def recognise(raw: Mapping[str, Any], part: str) -> "MtpConfig | None":
    """Return the configuration of the layers in a target's checkpoint; None for another part or architecture."""
    layout = ADDED if ADDED.counted_by in raw else LAYOUTS.get(str(raw.get("model_type")))
    if part != NAME or layout is None:
        return None
    count = raw.get(layout.counted_by, layout.count)
    if type(count) is not int or not 1 <= count <= MOST:
        raise ValueError(f"{layout.counted_by} is {count!r:.60}, not a number of layers from 1 to {MOST}")
    kinds = raw.get("mtp_layer_types") or FULL * count
    if not isinstance(kinds, list) or len(kinds) < count or {*kinds} - {*FULL, "sliding_attention"}:
        raise ValueError(f"mtp_layer_types is {kinds!r:.60}, not full_attention or sliding_attention for each layer")
    if raw.get("quantization_config"):
        raise ValueError("its weights are quantized, and layers for multi-token prediction are read unquantized")
    return MtpConfig(
        name=layout.name if count == 1 else f"{layout.name}, {count} layers",
        modules=count,
        raw=raw,
        taps=(raw[layout.layers],),
        width=raw["hidden_size"],
        vocabulary=raw["vocab_size"],
        max_position_embeddings=raw.get("max_position_embeddings", 1 << 30),
        layout=layout,
    )


def has_layers(raw: Mapping[str, Any]) -> bool:
    """Return whether a target's config.json names layers."""
    try:
        return recognise(raw, NAME) is not None
    except ValueError:
        return False


def traces(raw: Mapping[str, Any], weights: Iterable[str]) -> str:
    """Return the entry that names layers in a checkpoint of another format, for a message; empty if none.

    `weights`: names of its tensors.
    """
    nested = raw.get("text_config")  # of a model that reads images, too
    entries = {**nested, **raw} if isinstance(nested, Mapping) else raw
    behind = f".layers.{entries.get('num_hidden_layers')}."
    keys = sorted(name for name in entries if "mtp" in name or "nextn" in name)
    names = sorted(name for name in weights if "mtp" in name or behind in name)
    some = ", ".join([*keys[:4], *names[:4]])
    return some and f"; found: {some:.400}{' …' if len(keys) > 4 or len(names) > 4 else ''}"


@dataclass(frozen=True, kw_only=True)
class MtpConfig(DraftConfig):
    """Layers for multi-token prediction."""

    layout: Layout

    def build(self, target: Any) -> FeatureDraft:
        config = _layers(target.config.get_text_config(), self)
        with torch.device(target.device):
            return (MtpLayer if self.modules == 1 else MtpLayers)(self, config, target)

    def rename(self, name: str) -> str | None:
        for index in range(self.modules):
            for stored, ours in self.parts(index).items():
                if name.startswith(stored) and "rotary_emb" not in name:
                    return ours + name.removeprefix(stored)
        return None

    def stored_name(self, name: str) -> str:
        """Return the name that a tensor of the only layer's module is stored by."""
        stored, ours = next((s, o) for s, o in self.parts(0).items() if name.startswith(o))
        return stored + name.removeprefix(ours)

    def parts(self, index: int) -> dict[str, str]:
        """Return the parts of a layer: beginning of a stored name -> the module's."""
        number, within = {"n": self.taps[0] + index, "k": index}, "" if self.modules == 1 else f"{LAYERS}{index}."
        return {(self.layout.stem + s).format(**number): within + o for s, o in self.layout.parts.items()}


class MtpLayer(FeatureDraft):
    """One layer for multi-token prediction. The rotary embedding, and usually embedding and head, are the target's."""

    settled = (*FeatureDraft.settled, EXPERTS)

    def __init__(self, format: MtpConfig, config: Any, target: Any, index: int = 0) -> None:
        super().__init__(format, config, target)
        self.layout = format.layout
        last, norm = target.base_model.layers[-1], type(target.base_model.norm)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.token_norm, self.feature_norm, self.last_norm = (norm(width, eps=eps) for _ in range(3))
        if not self.layout.last_norm:
            self.last_norm = nn.Identity()
        self.join = nn.Linear(2 * width, width, bias=False)
        self.block = HalfLayer(last, config, index) if self.layout.half else type(last)(config, index)
        self.to(target.dtype)
        kept = dict(last.named_buffers())  # such as a router's bias, which stays in float32
        for name, buffer in self.block.named_buffers():
            if name in kept:
                buffer.data = buffer.data.to(kept[name].dtype)

    def settle(self, stored: dict[str, Tensor]) -> None:
        _stack_experts(stored)
        super().settle(stored)

    def advance(
        self, ids: Tensor, features: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int, depth: int
    ) -> tuple[Tensor, Tensor]:
        token = self.embedded(ids, metadata.positions)
        hidden = self.join(self.joined(self.token_norm(token), self.feature_norm(features)))
        hidden = self.block(
            hidden,
            attention_mask=None,
            position_ids=metadata.positions,
            past_key_values=cache,
            use_cache=True,
            position_embeddings=self._target[0].base_model.rotary_emb(hidden, metadata.positions),
            metadata=metadata,
        )
        feature: Tensor = self.last_norm(hidden if self.format.modules > 1 else hidden[:, hidden.shape[1] - judged :])
        return feature[:, feature.shape[1] - judged :], feature

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the tokens' embeddings, (R, W, C)."""
        token: Tensor = self.get_input_embeddings()(ids)
        return token.masked_fill((positions == 0)[..., None], 0) if self.layout.blank_start else token

    def joined(self, token: Tensor, feature: Tensor) -> Tensor:
        """Return token and feature (R, W, C) in the order that the projection expects, (R, W, 2C)."""
        return torch.cat((token, feature) if self.layout.token_first else (feature, token), -1)


class MtpLayers(FeatureDraft):
    """Several layers for multi-token prediction, with one LM head, which draft in turn."""

    def __init__(self, format: MtpConfig, config: Any, target: Any) -> None:
        super().__init__(format, config, target)
        self.layers = nn.ModuleList(MtpLayer(format, config, target, index) for index in range(format.modules))
        self.shared = tuple(o.removeprefix(FIRST) for s, o in format.parts(0).items() if s in format.parts(1))
        names = (*MtpLayer.settled, *self.shared)
        self.settled = tuple(f"{LAYERS}{index}.{name}" for index in range(format.modules) for name in names)

    def settle(self, stored: dict[str, Tensor]) -> None:
        tensors = {name.removeprefix(FIRST): tensor for name, tensor in stored.items() if name.startswith(FIRST)}
        shared = {name: tensor for name, tensor in tensors.items() if name.startswith(self.shared)}
        layer: Any
        for index, layer in enumerate(self.layers):
            within = f"{LAYERS}{index}."
            own = shared | {n.removeprefix(within): stored.pop(n) for n in list(stored) if n.startswith(within)}
            layer.settle(own)
            stored |= {within + name: tensor for name, tensor in own.items()}
            if hasattr(layer, "lm_head"):
                raise ValueError(f"its layer {index} has another LM head than the target, which is not supported")

    def advance(
        self, ids: Tensor, features: Tensor, metadata: AttentionMetadata, cache: KVCache, judged: int, depth: int
    ) -> tuple[Tensor, Tensor]:
        layer: Any = self.layers[depth % len(self.layers)]
        out: tuple[Tensor, Tensor] = layer.advance(ids, features, metadata, cache, judged, depth)
        return out


class HalfLayer(nn.Module):
    """Attention and a dense network, each after a norm: the first half of a layer of LongCat-Flash."""

    def __init__(self, layer: Any, config: Any, index: int) -> None:
        super().__init__()
        norm = type(layer.input_layernorm[0])
        self.input_layernorm, self.post_attention_layernorm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = type(layer.self_attn[0])(config, index), type(layer.mlps[0])(config)

    def forward(self, hidden: Tensor, **how: Any) -> Tensor:
        """Return its output (R, W, C), as the layers of transformers do. `how`: what those take."""
        hidden = hidden + self.self_attn(hidden_states=self.input_layernorm(hidden), **how)[0]
        out: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


def _layers(config: Any, format: MtpConfig) -> Any:
    """Return the target's configuration for these layers: full attention unless config.json names another.

    They have a mixture of experts if the target has one, and their format no other layer.
    """
    config, count, dense = copy.deepcopy(config), format.modules, format.layout.dense
    setattr(config, format.layout.layers, count)
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = (format.raw.get("mtp_layer_types") or FULL * count)[:count]
    elif getattr(config, "sliding_window", None) is not None:
        config.sliding_window = None
    for name, value in (
        ("first_k_dense_replace", count * dense),
        ("mlp_layer_types", ["dense" if dense else "sparse"] * count),
        ("moe_layer_start_index", count * dense),
    ):
        if getattr(config, name, None) is not None:
            setattr(config, name, value)
    config._attn_implementation = ATTENTION
    return config


def _stack_experts(stored: dict[str, Tensor]) -> None:
    parts = {name.removeprefix(EXPERTS).partition(".")[0] for name in stored if name.startswith(EXPERTS)}
    experts = sum(map(str.isdigit, parts))
    names = [[f"{EXPERTS}{e}.{part}_proj.weight" for part in ("gate", "up", "down")] for e in range(experts)]
    if not experts or not all(name in stored for of_expert in names for name in of_expert):
        return
    each = [[stored.pop(name) for name in of_expert] for of_expert in names]
    stored[f"{EXPERTS}gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in each])
    stored[f"{EXPERTS}down_proj"] = torch.stack([down for _, _, down in each])

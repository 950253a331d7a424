"""Small checkpoints with layers for multi-token prediction, as published, and what those say by plain torch.

A model of more layers than the target has makes the layers' blocks: transformers itself names their tensors, and its
own eager attention over the whole sequence is the reference.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from small import small_config, small_tokenizer
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    Glm4MoeConfig,
    HYV3Config,
    LongcatFlashConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5TextConfig,
)

from mtbench.decoding.method import ModelRunners
from mtbench.models.drafts.loading import load_draft
from mtbench.models.drafts.mtp import NAME
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import Checkpoint, load
from mtbench.models.runner import ModelRunner

LAYERS = 3  # of the target
OURS = ("token_norm", "feature_norm", "join", "last_norm")
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}


@dataclass(frozen=True)
class Published:
    """How a family publishes its layer."""

    config: type[PretrainedConfig]
    changes: dict[str, Any]
    stem: str  # of its tensors, and of those of its block; {k}: number of the layer, {n}: behind the target's layers
    block: str
    names: tuple[str, ...]  # norms of token and feature, projection, last norm if there is one
    token_first: bool = True
    blank_start: bool = True
    centred: float = 0.0  # what a stored scale of a norm lacks
    counted_by: str = "num_nextn_predict_layers"
    copies: tuple[str, ...] = ()  # tensors of the target that are stored again
    halves: dict[str, str] | None = None  # parts of a layer's first half -> their names; the other half is not stored


APPENDED = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
COPIED = ("embed_tokens", "shared_head.head")
LAST_DENSE = ["dense", "sparse", "sparse", "dense"]
FEW = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_shared_experts": 1}
AT_END = "model.layers.{n}."
FAMILIES = {
    "mimo": Published(
        Qwen2Config,
        {},
        *("model.mtp_layers.{k}.", "model.mtp_layers.{k}."),
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        token_first=False,
    ),
    "glm": Published(
        Glm4MoeConfig,
        {**ROUTED, "head_dim": 8, "first_k_dense_replace": 1},
        *(AT_END, AT_END, APPENDED),
        copies=COPIED,
    ),
    "deepseek": Published(
        DeepseekV3Config,
        {**ROUTED, **LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 2},
        *(AT_END, AT_END, APPENDED),
        copies=COPIED,
    ),
    "hunyuan": Published(
        HYV3Config,
        {**FEW, "head_dim": 8},
        *(AT_END, AT_END, (*APPENDED[:3], "final_layernorm")),
    ),
    "qwen": Published(
        Qwen3_5TextConfig,
        {"head_dim": 8, "layer_types": ["full_attention"] * (LAYERS + 1)},
        *("mtp.", "mtp.layers.{k}.", QWEN),
        blank_start=False,
        centred=1.0,
        counted_by="mtp_num_hidden_layers",
    ),
    "exaone": Published(
        ExaoneMoeConfig,
        {
            **FEW,
            "sliding_window": 6,
            "sliding_window_pattern": 2,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": LAST_DENSE,
        },
        *("mtp.", "mtp.layers.{k}.", QWEN),
        blank_start=False,
    ),
    "ernie": Published(
        Ernie4_5_MoeConfig,
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 16,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": LAYERS - 1,
        },
        *("model.mtp_", "model.mtp_block.{k}.", ("emb_norm.{k}", "hidden_norm.{k}", "linear_proj.{k}")),
    ),
    "longcat": Published(
        LongcatFlashConfig,
        {
            **LATENT,
            **dict.fromkeys(("num_key_value_heads", "head_dim", "n_routed_experts"), 4),
            **dict.fromkeys(("moe_topk", "zero_expert_num"), 2),
            "ffn_hidden_size": 32,
            "expert_ffn_hidden_size": 16,
        },
        *("model.mtp.", "model.mtp.layers.{k}."),
        ("layers.{k}.enorm.m", "layers.{k}.hnorm.m", "layers.{k}.eh_proj", "norm"),
        blank_start=False,
        copies=COPIED[:1],
        halves={
            "mlps.0.": "transformer_layer.mlp.",
            **{f"{part}.0.": f"{part}." for part in ("input_layernorm", "self_attn", "post_attention_layernorm")},
        },
    ),
}
DENSE = ("mimo", "qwen")


def config_of(family: str, layers: int) -> PretrainedConfig:
    published = FAMILIES[family]
    changes = {
        name: (value + value[-1:] * layers)[:layers] if isinstance(value, list) else value
        for name, value in published.changes.items()
    }
    layers *= 1 if published.halves is None else 2
    changes |= {"num_hidden_layers": layers, "max_position_embeddings": 1024}
    # A tied head likes the token it has just read, so random targets and drafts often agree.
    return small_config(published.config, tie_word_embeddings=True, **changes)


@dataclass(frozen=True, eq=False)
class Headed:
    """A checkpoint on disk, the model of more layers, and the other tensors of each by our names."""

    family: str
    folder: Path
    longer: Any
    heads: list[dict[str, Tensor]]
    published: Published

    def target(self) -> Checkpoint:
        checkpoint = load(str(self.folder), dtype=torch.float64)
        if self.family not in DENSE:
            eager_experts(checkpoint.model)
        return checkpoint

    def plain(self) -> Any:
        """The target as transformers loads it."""
        how = {"dtype": torch.float64, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(self.folder, config=config_of(self.family, LAYERS), **how)
        return model if self.family in DENSE else eager_experts(model)

    def runners(self) -> ModelRunners:
        """The target and its layer."""
        target = ModelRunner(self.target())
        draft = DraftRunner(load_draft(f"{self.folder}#{NAME}", target.checkpoint), target)
        return ModelRunners("ar", {"ar": target, f"#{NAME}": draft})

    @cached_property
    def features(self) -> Callable[[list[int]], Tensor]:
        """The target's last hidden states, (L, C): what its LM head reads."""
        model = self.plain()
        found: dict[tuple[int, ...], Tensor] = {}

        @torch.no_grad()
        def features(ids: list[int]) -> Tensor:
            if tuple(ids) not in found:
                out = model(torch.tensor([ids]), use_cache=False, output_hidden_states=True)
                found[tuple(ids)] = out.hidden_states[-1][0]
            return found[tuple(ids)]

        return features

    @torch.no_grad()
    def drafts(self, text: list[int], ahead: int, suppressed: Tensor, chosen: list[int] | None = None) -> Tensor:
        """Logits (ahead, V) of the tokens after `text`, everything recomputed for each; greedy unless `chosen`.

        Layer k reads the token k + 1 places on and what layer k - 1 said. After the last layer, what each said at the
        end stands for the target's features there.
        """
        table = self.longer.get_input_embeddings().weight
        read, said = self.features(text)[:-1], text[1:]
        judged, ends = [], list[Tensor]()
        for depth in range(ahead):
            if len(ends) == len(self.heads):
                read, ends = torch.cat((read, torch.stack(ends))), []
            hidden = read
            for index in range(depth % len(self.heads) + 1):
                hidden = self.layer(index, hidden, said[index : index + len(hidden)])
            judged.append((hidden[-1] @ table.T).index_fill(0, suppressed, float("-inf")))
            ends.append(hidden[-1])
            said = [*said, int(judged[-1].argmax()) if chosen is None else chosen[len(judged) - 1]]
        return torch.stack(judged)

    def layer(self, index: int, read: Tensor, said: list[int]) -> Tensor:
        """What a layer says (L, C) for features (L, C) and tokens."""
        head, token = self.heads[index], self.longer.get_input_embeddings().weight[torch.tensor(said)].clone()
        if self.published.blank_start:
            token[0] = 0
        token, feature = self.normed(token, head["token_norm"]), self.normed(read, head["feature_norm"])
        pair = (token, feature) if self.published.token_first else (feature, token)
        hidden = self.block(index, torch.cat(pair, 1) @ head["join"].T)
        return self.normed(hidden, head["last_norm"]) if "last_norm" in head else hidden

    def normed(self, x: Tensor, scale: Tensor) -> Tensor:
        out: Tensor = x * (x.square().mean(-1, keepdim=True) + self.longer.config.rms_norm_eps).rsqrt()
        return out * scale

    def block(self, index: int, x: Tensor) -> Tensor:
        """The decoder layer over a whole sequence (L, C)."""
        base = self.longer.base_model
        places = torch.arange(len(x))[None]
        mask = torch.full((len(x), len(x)), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        layer, rotary = base.layers[LAYERS + index], base.rotary_emb(x[None], places)
        how = {"attention_mask": mask, "position_ids": places, "position_embeddings": rotary}
        if self.published.halves is None:
            out: Tensor = layer(x[None], **how)
        else:
            out = x[None] + layer.self_attn[0](layer.input_layernorm[0](x[None]), **how)[0]
            out = out + layer.mlps[0](layer.post_attention_layernorm[0](out))
        return out[0]


def eager_experts(model: Any) -> Any:
    """A mixture of experts that computes in float64, as transformers' faster ones do not."""
    model.set_experts_implementation("eager")
    return model


def save_headed(folder: Path, family: str, count: int = 1) -> Headed:
    """A random checkpoint with layers that often say what the target says."""
    published = FAMILIES[family]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family, LAYERS + count), attn_implementation="eager").double()
    if family not in DENSE:
        eager_experts(model)
    width = model.config.hidden_size
    heads = [dict[str, Tensor]() for _ in range(count)]
    for index, (name, stored) in product(range(count), zip(OURS, published.names, strict=False)):
        token, feature = torch.eye(width).double() * 2, torch.randn(width, width).double() * 0.2
        join = torch.cat((token, feature) if published.token_first else (feature, token), 1)
        made = join if name == "join" else 1 + 0.3 * torch.randn(width).double()
        shared = "{" not in published.stem + stored
        heads[index][name] = heads[0][name] if shared and index else made
    with torch.no_grad():
        # A norm of what was normed changes nothing, unless it has a scale.
        model.base_model.norm.weight.add_(0.5 * torch.randn(width))
        for name, tensor in model.base_model.layers[LAYERS:].state_dict().items():
            noise = torch.randn_like(tensor)
            if "norm" in name or name.endswith("bias"):
                tensor.add_(0.3 * noise)
            elif name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                tensor.copy_(0.1 * noise)
    model.save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    _rewrite(folder, family, heads)
    return Headed(family, folder, model.eval(), heads, published)


def _rewrite(folder: Path, family: str, heads: list[dict[str, Tensor]]) -> None:
    """Make the last layers those for multi-token prediction."""
    published, tensors = FAMILIES[family], load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    for index, head in enumerate(heads):
        number = {"k": index, "n": LAYERS + index}
        stem, block, at_end = (name.format(**number) for name in (published.stem, published.block, AT_END))
        stored = {name.removeprefix(at_end): tensors.pop(name) for name in list(tensors) if name.startswith(at_end)}
        for part in stored:
            for old, new in (published.halves or {"": ""}).items():
                if part.startswith(old):
                    tensors[f"{block}{new}{part.removeprefix(old)}"] = stored[part]
        for name, our in zip(published.names, OURS, strict=False):
            lacking = published.centred if "norm" in our else 0
            tensors[f"{stem}{name.format(**number)}.weight"] = head[our] - lacking
        tensors |= {f"{stem}{name}.weight": table.clone() for name in published.copies}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config_of(family, LAYERS).save_pretrained(folder)
    change_config(folder, **{published.counted_by: len(heads)})
    if family == "mimo":
        change_config(folder, model_type="mimo", architectures=["MiMoForCausalLM"])


def change_config(folder: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})

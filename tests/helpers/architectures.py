"""Tiny random checkpoints of architectures that serving engines have and mtbench's own loop refuses, and of others.

Heads are 32 wide, which vLLM's attention on a CPU takes. The tokenizer and the template are those of the embedded
checkpoints, so that prompts have many tokens.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from mtbench.models.families import EMBEDDED, locate

SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.1,  # large enough for answers that do not repeat one token
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
DELTA = {  # layers of a gated delta rule, as in Qwen3-Next; vLLM's kernel for a CPU takes no heads of 32
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MODELS: dict[str, dict[str, Any]] = {  # model type -> changes of the shape
    "qwen3_moe": EXPERTS | {"num_experts": 4},
    "glm4_moe": EXPERTS | {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gemma3_text": {"sliding_window": 64},
    "gemma4_text": {
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 32,
        "num_global_key_value_heads": 4,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 512,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3_next": EXPERTS | DELTA | {"num_experts": 4, "shared_expert_intermediate_size": 64},
    "qwen3_5_text": DELTA,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_n_groups": 1,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"] * 2,
        "block_auto_adjust_ff_dim": False,
        "conv_dim": 128,  # released configurations have these three, transformers' default has not
        "block_dim": 128,
        "block_ff_dim": 256,
    },
}


def save_architecture(folder: Path, name: str, **changes: Any) -> Path:
    """Write a random checkpoint of a name in ARCHITECTURES to a folder, in bfloat16; return the folder."""
    if name in PACKED:
        model = save_architecture(folder, "qwen3", **changes)
        PACKED[name](model)
        return model
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE | MODELS.get(name, {}) | changes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(locate(f"{EMBEDDED}ar")).save_pretrained(folder)
    return folder


def _pack(folder: Path, settings: dict[str, Any], packed: Callable[[Tensor], dict[str, Tensor]]) -> None:
    """Replace the matrices of the layers by packed ones. `packed`: a matrix (out, in) -> ending of a name -> tensor."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    weights: dict[str, Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stem = name.removesuffix("weight")
        parts = packed(weight.float()) if "_proj." in name else {"weight": weight}
        weights |= {stem + ending: part.contiguous() for ending, part in parts.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def _int8(folder: Path) -> None:
    """Pack to 8 bits a weight, with a scale for each output, as compressed-tensors does."""

    def packed(weight: Tensor) -> dict[str, Tensor]:
        scale = weight.abs().amax(1, keepdim=True) / 127
        return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale.bfloat16()}

    bits = {"num_bits": 8, "type": "int", "symmetric": True}
    groups = {
        "targets": ["Linear"],
        "weights": {**bits, "strategy": "channel", "dynamic": False},
        "input_activations": {**bits, "strategy": "token", "dynamic": True},
    }
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    _pack(folder, {**settings, "config_groups": {"group_0": groups}, "ignore": ["lm_head"]}, packed)


def _gptq(folder: Path, group: int = 32) -> None:
    """Pack to 4 bits a weight, with a scale for each group of inputs, as GPTQ does."""

    def nibbles(values: Tensor) -> Tensor:
        """Pack 8 numbers of the last dimension into one."""
        shifts = torch.arange(8, dtype=torch.int64) * 4
        whole = (values.long().unflatten(-1, (-1, 8)) << shifts).sum(-1)
        return torch.where(whole >= 2**31, whole - 2**32, whole).to(torch.int32)

    def packed(weight: Tensor) -> dict[str, Tensor]:
        out, inputs = weight.shape
        grouped = weight.unflatten(1, (-1, group))
        scale = grouped.abs().amax(2) / 7
        levels = (grouped / scale[..., None]).round().clamp(-8, 7).flatten(1) + 8
        zeros = torch.full((inputs // group, out), 7)  # stored less one
        return {
            "qweight": nibbles(levels).T,
            "qzeros": nibbles(zeros),
            "scales": scale.T.to(torch.float16),
            "g_idx": (torch.arange(inputs) // group).to(torch.int32),
        }

    settings = {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "sym": True}
    _pack(folder, settings | {"checkpoint_format": "gptq", "lm_head": False}, packed)


def _fp8(folder: Path, block: int = 128) -> None:
    """Pack to fp8, with a scale for each block, as DeepSeek-V3 does."""

    def packed(weight: Tensor) -> dict[str, Tensor]:
        blocks = weight.unflatten(1, (-1, block)).unflatten(0, (-1, block))
        scale = blocks.abs().amax((1, 3)) / 448
        return {
            "weight": (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn),
            "weight_scale_inv": scale,
        }

    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]}
    _pack(folder, settings, packed)


PACKED: dict[str, Callable[[Path], None]] = {"int8": _int8, "gptq": _gptq, "fp8": _fp8}
ARCHITECTURES = (*MODELS, *PACKED)

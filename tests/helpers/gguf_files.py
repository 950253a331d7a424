"""A GGUF file of a small Qwen2 checkpoint, as llama.cpp's converter names its parts."""

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFWriter, LlamaFileType, TokenType
from safetensors.torch import load_file

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(checkpoint: Path, file: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a checkpoint with tied embeddings as a GGUF file; return its path. `dtype`: of its matrices."""
    config = json.loads((checkpoint / "config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    writer = GGUFWriter(file, "qwen2")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_file_type(LlamaFileType.ALL_F32 if dtype == torch.float32 else LlamaFileType.MOSTLY_F16)
    _add_tokenizer(writer, config, tokenizer)
    template = checkpoint / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        writer.add_tensor(_renamed(name), tensor.to(dtype if tensor.ndim > 1 else torch.float32).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: GGUFWriter, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    ids = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    tokens, types = [], []
    for index in range(config["vocab_size"]):
        tokens.append(special.get(index) or ids.get(index) or f"<unused{index}>")
        kind = TokenType.CONTROL if index in special else TokenType.NORMAL if index in ids else TokenType.UNUSED
        types.append(kind)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _renamed(name: str) -> str:
    """Return llama.cpp's name of a weight."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"

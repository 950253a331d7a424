"""A checkpoint as a GGUF file, the format of llama.cpp (github.com/ggml-org/ggml, docs/gguf.md), for its server.

Weights get the names that the package `gguf` lists. A file of ours gets token ids only: its tokenizer has the
tokens and their kinds, and not the rule that splits a text.
"""

import hashlib
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from mtbench import files
from mtbench.errors import UserError
from mtbench.files import cache_home
from mtbench.models.checkpoint_files import weight_files, weights_sha256

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # `model_type` of a checkpoint, and llama.cpp's name
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOST = 2.0**-25  # by a bfloat16 value in float16, at most
HOW = "give a GGUF file that llama.cpp's convert_hf_to_gguf.py made"


def written(checkpoint: Path, dtype: str) -> Path:
    """Return the GGUF file of the checkpoint in a folder; write it first if the cache has none.

    Raises UserError as `write`.
    """
    states = tuple((file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(checkpoint.glob("*.safetensors")))
    config, sha256 = settings(checkpoint), _sha256(checkpoint, states)
    if sha256 is None or dtype not in DTYPES:
        raise UserError(f"mtbench writes no GGUF file of {str(checkpoint)!r} in {dtype}; {HOW}.")
    of_config = hashlib.sha256(json.dumps(config).encode()).hexdigest()
    file = cache_home() / "gguf" / f"{checkpoint.name}-{sha256[:12]}{of_config[:4]}.{dtype}.gguf"
    if not file.is_file():
        with files.write_errors(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            partial = file.with_suffix(f".{os.getpid()}.tmp")
            try:
                write(checkpoint, partial, dtype)
                partial.replace(file)
            finally:
                partial.unlink(missing_ok=True)
    return file


@cache
def _sha256(checkpoint: Path, states: tuple[tuple[int, int], ...]) -> str | None:
    """Return the hash of the weights of a folder whose files have these sizes and times of change."""
    return weights_sha256(checkpoint)


def settings(checkpoint: Path) -> dict[str, Any]:
    """Return the configuration of the checkpoint in a folder. Raises UserError for one that `write` does not know."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (checkpoint / name).is_file()]
    if missing:
        raise UserError(
            f"mtbench writes GGUF files of whole models, and {str(checkpoint)!r} has no {missing[0]}; {HOW}."
        )
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        raise UserError(
            f"mtbench writes no GGUF file of {checkpoint.name!r}, a {config['model_type']} model; it knows "
            f"{', '.join(ARCHITECTURES)}. Else {HOW}."
        )
    if config.get("quantization_config"):
        raise UserError(f"mtbench writes no GGUF file of {checkpoint.name!r}, whose weights are quantised; {HOW}.")
    kind = (config.get("rope_parameters") or config.get("rope_scaling") or {}).get("rope_type", "default")
    if kind != "default":
        raise UserError(f"mtbench writes no GGUF file of a model with {kind} positions; {HOW}.")
    return config


def write(checkpoint: Path, file: Path, dtype: str) -> None:
    """Write the checkpoint in a folder as a GGUF file. `dtype`: of its matrices; vectors are float32.

    Raises UserError for an architecture, a tokenizer or a dtype that this writer does not know, and for weights that
    float16 does not hold.
    """
    try:
        from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
    except ImportError:
        raise UserError("a GGUF file is written by the package gguf; run `pip install gguf`.") from None
    config = settings(checkpoint)
    writer = GGUFWriter(file, config["model_type"])
    _add_shape(writer, config)
    kinds = {"float32": LlamaFileType.ALL_F32, "bfloat16": LlamaFileType.MOSTLY_BF16}
    writer.add_file_type(kinds.get(dtype, LlamaFileType.MOSTLY_F16))
    _add_tokenizer(writer, checkpoint, config)
    for weight, tensor in sorted(_weights(checkpoint, config).items()):
        stored = tensor.to(DTYPES[dtype] if tensor.ndim > 1 else torch.float32)
        if dtype == "float16" and bool(((stored.float() - tensor.float()).abs() > LOST).any()):
            raise UserError(f"the weights of {checkpoint.name!r} lose digits in float16; {HOW}.")
        if stored.dtype == torch.bfloat16:
            bits = stored.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(weight, bits, raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(weight, stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: Any, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    from gguf import TokenType

    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    if tokenizer["model"]["type"] != "BPE":
        raise UserError(f"mtbench writes no GGUF file with a {tokenizer['model']['type']} tokenizer; {HOW}.")
    ids = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    indices = range(config["vocab_size"])
    kinds = [TokenType.CONTROL if i in special else TokenType.NORMAL if i in ids else TokenType.UNUSED for i in indices]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([special.get(i) or ids.get(i) or f"<unused{i}>" for i in indices])
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]])
    ends = config["eos_token_id"]
    writer.add_eos_token_id(ends[0] if isinstance(ends, list) else ends)
    writer.add_add_bos_token(False)


def _weights(checkpoint: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    [architecture] = [arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == config["model_type"]]
    names = get_tensor_name_map(architecture, config["num_hidden_layers"])
    found = {}
    for file in weight_files(checkpoint):
        for name, tensor in load_file(file).items():
            weight = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if weight is None:
                raise UserError(f"mtbench writes no GGUF file with the weight {name!r}; {HOW}.")
            found[weight] = _interleaved(name, tensor, config)
    return found


def _interleaved(name: str, tensor: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """Return a weight in llama.cpp's order: its `llama` rotates neighbours, and transformers rotates halves."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)

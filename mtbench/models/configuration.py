"""Read a checkpoint's configuration: its sizes, and whether mtbench can decode it.

Models that cannot be decoded exactly are rejected: those with recurrent layers, which cannot undo a rejected token,
those with the rope types `dynamic` and `longrope`, whose angles depend on the longest row of the batch, and those whose
attention cannot be ours (mtbench/models/architectures.py).
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PretrainedConfig, Qwen2Config
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.quantizers.auto import AutoHfQuantizer

from mtbench.errors import UnreadableCheckpoint, UserError, first_line
from mtbench.models.architectures import attention_of
from mtbench.models.checkpoint_files import CHECKPOINT_FILES, check_files, check_sizes
from mtbench.models.families import RANDOM, SHAPES, locate, path_of
from mtbench.programs import network

# transformers raises these for bad files.
LOADING_ERRORS = (OSError, ValueError, AttributeError, ImportError, TypeError, StrictDataclassError, SafetensorError)
ALSO_QWEN2 = {"a2d-qwen2", "Fast_dLLM_Qwen", "mimo"}  # model types; MiMo adds layers for multi-token prediction
SERVED_LAYERS = {"full_attention", "sliding_attention"}
SERVED_ROPES = {"default", "linear", "llama3", "proportional", "yarn"}


def load_config(source: str, *, offline: bool = False) -> Any:
    """Return the checkpoint's configuration. Qwen2 under another name is read as Qwen2.

    That of an architecture that transformers does not know is a PretrainedConfig with the entries of its text model.
    """
    shape = source.removeprefix(RANDOM)
    if shape != source:
        if shape in SHAPES:
            return AutoConfig.for_model(**SHAPES[shape])
        return load_config(locate(shape), offline=True)
    with explained(source, "configuration", offline):
        raw, _ = PretrainedConfig.get_config_dict(source, local_files_only=offline)
        check_sizes(raw)
        if raw.get("model_type") in ALSO_QWEN2:
            raw = {k: v for k, v in raw.items() if k not in {"model_type", "auto_map", "architectures"}}
            config: Any = Qwen2Config(**raw)
        elif (
            isinstance(kind := raw.get("model_type"), str) and kind not in CONFIG_MAPPING and "vocab_size" in _text(raw)
        ):
            config = PretrainedConfig.from_dict(_text(raw))
        else:
            config = AutoConfig.from_pretrained(source, local_files_only=offline, trust_remote_code=False)
        text = config.get_text_config()
        if not -text.vocab_size <= (getattr(text, "pad_token_id", None) or 0) < text.vocab_size:
            text.pad_token_id = None  # torch's embedding refuses such an id, which nothing here reads
        return config


def _text(raw: Mapping[str, Any]) -> dict[str, Any]:
    nested = raw.get("text_config")
    text = {**raw, **(nested if isinstance(nested, dict) else {})}
    return {name: value for name, value in text.items() if name not in ("text_config", "auto_map")}


def max_positions(config: Any) -> int:
    """Return the longest sequence that a configuration allows."""
    parts = (config, getattr(config, "text_config", None))
    known = (getattr(part, "max_position_embeddings", None) for part in parts)
    return next(filter(None, known), 1 << 30)


def cached_numbers(config: Any) -> int:
    """Return how many numbers a KV cache holds of a token, over all layers with attention; 0 if that is not known."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * getattr(text, "num_hidden_layers", 0)
    layers = sum(kind in (*SERVED_LAYERS, "attention") for kind in kinds)
    if rank := getattr(text, "kv_lora_rank", None):  # latents in place of keys and values: DeepSeek, arXiv 2405.04434
        return int(layers * (rank + text.qk_rope_head_dim))
    heads = getattr(text, "num_attention_heads", None) or 0
    size = getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(heads, 1)
    return int(layers * 2 * (getattr(text, "num_key_value_heads", None) or heads) * size)


def rope_types(config: Any) -> set[str]:
    """Return the rope types of a configuration."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [r for r in rope.values() if isinstance(r, Mapping)] or [rope]  # one per layer type, or one for all
    return {str(r.get("rope_type", r.get("type", "default"))) for r in nested}


def refuse_unserved(config: Any, source: str) -> None:
    """Raise UserError if a layer, rope type or attention of `config` cannot be decoded exactly in a batch."""
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not hasattr(config, "num_attention_heads"):
        layers = {config.model_type}
        if config.get_text_config() is not config:
            raise UserError(
                f"checkpoint {source!r} ({config.model_type}) reads more than text, and mtbench's loop decodes text "
                "models; give a checkpoint of its text model alone, or let an engine decode it: `--engine vllm`."
            )
    if unserved := sorted(layers - SERVED_LAYERS):
        raise UserError(
            f"checkpoint {source!r} has layers of type {', '.join(unserved)}, which cannot undo a rejected token; "
            f"supported: {', '.join(sorted(SERVED_LAYERS))}. See `mtbench ls families`."
        )
    if unserved := sorted(rope_types(config) - SERVED_ROPES):
        raise UserError(
            f"checkpoint {source!r} uses rope type {', '.join(unserved)}, whose angles depend on the batch; "
            f"supported: {', '.join(sorted(SERVED_ROPES))}. See `mtbench ls families`."
        )
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise UserError(
            f"checkpoint {source!r} ({config.model_type}) is an encoder, which continues no text; give a decoder."
        )
    attention, lacks = attention_of(config)
    if attention is None:
        raise UserError(
            f"checkpoint {source!r} ({config.model_type}) cannot be decoded exactly: {lacks}. Give another checkpoint; "
            "docs/troubleshooting.md names architectures that can be."
        )


def refuse_unreadable(source: str, config: Any, *, offline: bool) -> None:
    """Raise UserError for weights that transformers would misread or not read, as far as names and settings show."""
    if Path(source).is_dir():
        check_files(Path(source))
    if type(config) is PretrainedConfig:  # transformers says why it does not know it
        with explained(source, "configuration", offline):
            located = locate(source.removeprefix(RANDOM))
            AutoConfig.from_pretrained(located, local_files_only=offline, trust_remote_code=False)
    packed = getattr(config, "quantization_config", None)
    if packed is not None:
        with explained(source, "quantised weights", offline):
            quantiser = AutoHfQuantizer.from_config(packed, pre_quantized=True)  # from_pretrained drops unknown ones
            with suppress(RuntimeError, ValueError, AttributeError):  # of a machine without a GPU
                quantiser.validate_environment(device_map=None)


def downloaded(source: str, *, offline: bool) -> Path:
    """Return the folder with a checkpoint's settings, tokenizer and safetensors, given a folder or a hub id."""
    if Path(source).is_dir():
        return Path(source)
    with explained(source, "weights", offline):
        return Path(snapshot_download(source, allow_patterns=[*CHECKPOINT_FILES], local_files_only=offline))


class explained:
    """Context that turns an error of transformers while loading `what` from `source` into a UserError of one line."""

    def __init__(self, source: str, what: str, offline: bool) -> None:
        self.source, self.what, self.offline = source, what, offline

    def __enter__(self) -> None:
        local = self.offline or self.source.startswith(RANDOM) or Path(path_of(self.source)).exists()
        self.refusal = None if local else network.hub_refusal()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if kind is None or error is None:
            return
        # transformers raises many errors for bad files; a panic of tokenizers is no Exception.
        if isinstance(error, UserError) or not (isinstance(error, Exception) or kind.__name__ == "PanicException"):
            return
        reason = first_line(error)
        if not isinstance(error, LOADING_ERRORS):
            reason = f"{type(error).__name__}: {reason}"
        if Path(self.source).is_dir():
            files = sorted(os.listdir(self.source))
            raise UnreadableCheckpoint(
                f"checkpoint {self.source!r} has no usable {self.what}: {reason} "
                f"(it holds: {', '.join(files[:8]) or 'nothing'}). Give another checkpoint."
            ) from None
        where = "local cache" if self.offline or self.refusal else "hub"
        refused = f", and the hub cannot be reached ({self.refusal})" if self.refusal else ""
        raise UnreadableCheckpoint(
            f"{self.source!r} cannot be loaded from the {where} ({self.what}: {reason}){refused}; give a folder or "
            f"GGUF file of this machine, or a family that needs no download: {network.LOCAL_FAMILIES}."
        ) from None

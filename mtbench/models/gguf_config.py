"""The entries of a GGUF file that transformers does not read: it takes the sizes, and drops other keys.

A key without a place in the configuration is refused. Sources: `gguf.constants.Keys`; llama.cpp's llama-model.cpp for
defaults and positions, llama-vocab.cpp for end tokens and the rules that split a text.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtbench.errors import UserError

Keys = Mapping[str, Any]
NAMES = {  # in a configuration; other keys have their own name there. "": `_complete` reads the key
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "attention.key_length": "",
    "rope.dimension_count": "",
    "rope.freq_base": "",
}
SIZES = {  # of any architecture: names in the configuration
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
ROPE_FREQS, WINDOW = "rope_freqs.weight", "attention.sliding_window"
WIDE = {46, 62}  # layers of Gemma 2 27B and Gemma 3 27B: the scale of their scores is not that of their keys' width
END_TEXTS = {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"}
END_TEXTS |= {"<|return|>", "<|call|>", "<EOT>", "_<EOT>", "[EOT]", "<｜end▁of▁sentence｜>", "<end_of_utterance>"}
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {  # names of rules: the expressions that split a text, one after the other
    "gpt-2 mpt olmo jais phi-2": (_GPT2,),
    "smollm starcoder refact command-r codeshell exaone": (r"\p{N}", _GPT2),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "llama-bpe llama3 llama-v3 falcon3 pixtral dbrx smaug-bpe": (_GPT4 % r"\p{N}{1,3}",),
    "qwen2 deepseek-r1-qwen stablelm2 megrez": (_GPT4 % r"\p{N}",),
}
WHOLE = {"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"}  # a part that is a token is not merged


def under(prefix: str, keys: Keys) -> dict[str, Any]:
    """Return the keys that begin with a word, without it."""
    return {key.removeprefix(f"{prefix}."): value for key, value in keys.items() if key.startswith(f"{prefix}.")}


def read(file: Path, keys: Keys, rope_freqs: Any) -> Any:
    """Return the configuration of the model in a file. Raises UserError for a key that has no place in it.

    `rope_freqs`: the tensor ROPE_FREQS, if the file has it.
    """
    from transformers import AutoConfig
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    architecture = keys["general.architecture"]
    keys = under(architecture, keys)
    left = {key: keys[key] for key in keys if isinstance(keys[key], list)}  # a value for each layer
    if not left:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
        names = (GGUF_CONFIG_MAPPING.get(architecture) or GGUF_CONFIG_MAPPING[config.model_type]) | NAMES
        for key, value in keys.items():
            if (name := names.get(key, key)) and hasattr(config, name):
                setattr(config, name, value)
            else:
                left[key] = value
        _complete(config, left, rope_freqs)
    for key, value in left.items():  # these values change nothing: a factor of 1, True or 0, "none"
        neutral = (1,) if key.endswith(("_scale", "_factor")) else (key == "attention.causal", "none")
        if value not in neutral:
            raise UserError(f"mtbench does not apply {architecture}.{key} = {value!r:.40}")
    return config


def _complete(config: Any, left: dict[str, Any], rope_freqs: Any) -> None:
    """Add values without a matching entry to a configuration, and take the keys that it then holds from `left`."""
    head = config.hidden_size // config.num_attention_heads
    width = config.head_dim = left.pop("attention.key_length", head)
    own = getattr(config, "rope_parameters", None) or {}
    same = {"attention.value_length": width, "rope.dimension_count": width * own.get("partial_rotary_factor", 1)}
    for key in [key for key, value in same.items() if left.get(key) == value]:
        del left[key]
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = head if config.num_hidden_layers in WIDE else width
    by_layer = any(hasattr(config, name) for name in ("layer_types", "use_sliding_window"))
    if hasattr(config, "sliding_window") and not by_layer:  # it slides in all layers
        config.sliding_window = left.pop(WINDOW, 0) or None
    elif left.get(WINDOW, 0) >= config.max_position_embeddings:
        del left[WINDOW]
    if not own:
        return
    plain = {"rope_type": "default", "rope_theta": left.pop("rope.freq_base", 10_000.0)}
    scaling = _llama3(rope_freqs.data, plain["rope_theta"]) if rope_freqs else _linear(left)
    if "sliding_attention" in own:  # these layers are not scaled
        sliding = plain | {"rope_theta": left.pop("rope.freq_base_swa", 10_000.0)}
        config.rope_parameters = {"sliding_attention": sliding, "full_attention": plain | scaling}
    else:
        config.rope_parameters = own | plain | scaling


def _linear(left: dict[str, Any]) -> dict[str, Any]:
    """Return the changes of `rope_parameters` by positions that are scaled evenly, and take their keys from `left`."""
    for key in ("rope.scaling.finetuned", "rope.scaling.original_context_length"):
        left.pop(key, None)
    if left.get("rope.scaling.type", "linear") != "linear":
        return {}
    _, *factors = (left.pop(f"rope.{key}", None) for key in ("scaling.type", "scaling.factor", "scale_linear"))
    factor = factors[0] or factors[1] or 1.0
    return {} if factor == 1 else {"rope_type": "linear", "factor": factor}


def _llama3(divisors: np.ndarray, theta: float) -> dict[str, Any]:
    """Return Llama 3's parameters that give each frequency its divisor, as llama.cpp's converter writes them.

    All published models have these factors of 1 and 4. Raises UserError for divisors that are not Llama 3's.
    """
    divisors = divisors.astype(np.float64)
    turns = theta ** -(np.arange(len(divisors)) / len(divisors)) / (2 * math.pi)  # in one position
    originals, largest = np.arange(1, 1 << 15)[:, None], divisors.max()
    kept = np.clip((originals * turns - 1) / (4 - 1), 0, 1)  # of a frequency
    errors = abs(1 / (kept + (1 - kept) / largest) / divisors - 1).max(axis=1)
    if not errors.min() < 1e-5:
        raise UserError(f"mtbench does not apply {ROPE_FREQS}: its values are not those of Llama 3")
    parameters = {"rope_type": "llama3", "factor": float(largest), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return parameters | {"original_max_position_embeddings": int(errors.argmin()) + 1}


def sampling(keys: Keys) -> dict[str, Any]:
    """Return transformers' names and values of keys `general.sampling.KEY`; none if no temperature is among them."""
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    values = {names.get(key, key): round(v, 6) if isinstance(v, float) else v for key, v in keys.items()}
    return {"do_sample": True, "top_k": 0, **values} if "temp" in keys else {}


def end_ids(tokenizer: Keys) -> list[int]:
    """Return the ids that end an answer in llama.cpp: those of keys `tokenizer.ggml.KEY`, and those of known texts.

    It overrides another type of such a token.
    """
    ids = {tokenizer[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in tokenizer}
    texts = END_TEXTS - ({"<|end|>"} if "<|return|>" in tokenizer["tokens"] else set())  # gpt-oss: a message's end
    rows = range(len(tokenizer["tokens"]))
    return sorted({i for i in ids if i in rows} | {i for i in rows if tokenizer["tokens"][i] in texts})


def tokenizer(file: Path, keys: Keys) -> Any:
    """Return the tokenizer of a file that splits a text as llama.cpp does, by its keys `tokenizer.ggml.KEY`.

    Raises ValueError for one that transformers does not know, and UserError for another rule that splits a text.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
    except ImportError:  # transformers 5.17: of architectures that it knows
        made = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    else:
        architecture, of_file, special = get_gguf_tokenizer(str(file))
        backend, _ = convert_gguf_tokenizer(architecture, of_file)
        made = PreTrainedTokenizerFast(tokenizer_object=backend, name_or_path=str(file), **special)
    split_alike(made, keys)
    return made


def split_alike(tokenizer: Any, keys: Keys) -> None:
    """Make a tokenizer split a text as llama.cpp does, by its keys `tokenizer.ggml.KEY`. UserError for other rules."""
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    backend, name = tokenizer.backend_tokenizer, keys.get("pre", "default")
    if name in WHOLE:
        backend.model.ignore_merges = True
    if keys.get("model") == "llama":  # SentencePiece
        first = [normalizers.Prepend("▁")] if keys.get("add_space_prefix", True) else []
        backend.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = None
    elif rules := next((rules for names, rules in SPLITS.items() if name in names.split()), None):
        parts = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in rules]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
    elif name not in getattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS", ()):
        raise UserError(f"mtbench does not apply tokenizer.ggml.pre = {name!r:.40}")

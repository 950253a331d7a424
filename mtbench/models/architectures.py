"""Which attention decodes an architecture exactly: ours, its class's own under a mask of ours, or none.

A small random copy of a checkpoint's configuration decides. Its logits by the class's own attention over a whole text
are compared with those over our KV cache: rows of different lengths, a tree of drafts, rejected tokens that are undone.
So no list of architectures has to be kept, and an ignored part of attention shows, such as a bias by slots.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from mtbench import kernels
from mtbench.errors import first_line
from mtbench.models.attention import ATTENTION, OWN, AttentionMetadata
from mtbench.models.kv_cache import KVCache

LARGEST = 120_000_000  # parameters of a copy
TOLERANCE = 1e-4  # of the logits' norm, in float32: rounding gives up to 1e-5, another attention 1e-3 and more
SMALL = {  # a copy's largest value of settings whose names end so; a window is shorter than the text
    64: ("vocab_size", "_per_layer_input"),
    24: ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "_rank"),
    16: ("experts",),
    8: ("rotary_dim",),
    5: ("window", "window_size"),
    2: ("kv_n_heads",),
    0: ("_token_id",),
}
ELSEWHERE = {"architectures", "dtype", "quantization_config", "transformers_version"}  # settings that change no layer


def attention_of(config: PretrainedConfig) -> tuple[str | None, str]:
    """Return the attention by which a configuration is decoded exactly, None for none, and why not by ours."""
    settings = json.loads(config.to_json_string(use_diff=False))
    config_class: Any = type(config)
    return _attention_of(config_class, json.dumps({k: v for k, v in settings.items() if k not in ELSEWHERE}))


@cache
@torch.inference_mode()
def _attention_of(config_class: type[PretrainedConfig], settings: str) -> tuple[str | None, str]:
    try:
        model = small_copy(config_class, settings)
    except Exception as error:  # architectures fail in many ways, here and below
        return None, f"a small copy does not run ({first_line(error)})"
    reasons = list[str]()
    for attention in (ATTENTION, OWN):
        try:
            if attention == ATTENTION and not model._can_set_attn_implementation():
                raise TypeError("its attention does not use transformers' attention interface")
            with kernels.plain():
                apart = _apart(model, attention)
            if apart <= TOLERANCE:
                return attention, "".join(reasons)
            reasons.append(f"with a KV cache its logits are wrong by {apart:.2g} (relative)")
        except Exception as error:
            reasons.append(first_line(error))
    return None, f"{reasons[0]}, and its own attention takes no mask of mtbench's ({reasons[1]})"


def small_copy(
    config_class: type[PretrainedConfig], settings: str, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """Return a random model of the settings, as small as its class allows. Raises what the smallest one raises.

    Norms and biases are random too; a newly initialised model has ones and zeros, which would hide errors. The weights
    keep the magnitude of activations: with larger ones thirty layers amplify the rounding of norms to 1e-2.
    """
    faults = []
    for changed in _shrunken(config_class.from_dict(json.loads(settings))):
        try:
            config = config_class.from_dict(changed)
            with torch.device("meta"):
                if AutoModelForCausalLM.from_config(config).num_parameters() > LARGEST:
                    raise ValueError("it is too large")
            with torch.random.fork_rng([]), torch.inference_mode():
                torch.manual_seed(0)
                model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=OWN).eval()
                for name, weight in model.named_parameters():
                    vector = weight.ndim == 1  # a norm or a bias
                    weight.copy_(torch.randn_like(weight) * (0.3 if vector else weight.shape[-1] ** -0.5))
                    weight += vector and name.endswith("weight")
                model(input_ids=torch.ones(1, 2, dtype=torch.long), use_cache=False)
            return model
        except Exception as error:
            faults.append(error)
    raise faults[0]


def _shrunken(config: Any) -> Iterator[dict[str, Any]]:
    """Yield the settings of small copies: few layers, of all kinds, and few heads first, its own sizes last."""
    settings, names = _limited("", json.loads(config.to_json_string(use_diff=False))), type(config).attribute_map
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    keys, width = (settings.get(n) or getattr(config, n, None) for n in ("num_key_value_heads", "head_dim"))
    keys = keys or getattr(config, "num_kv_heads", None) or heads
    few = min(heads, 4)
    few_keys = few if keys == heads else min(keys, 2)
    by_layer = {name: kinds for name, kinds in settings.items() if isinstance(kinds, list) and len(kinds) == layers}
    cut = max([min(layers, 4), *(1 + kinds.index(kind) for kinds in by_layer.values() for kind in kinds)])
    for depth in (cut, layers):
        for size in (8, width or config.hidden_size // heads):
            narrow = {"num_attention_heads": few, "num_key_value_heads": few_keys, "num_kv_heads": few_keys}
            narrow |= {"head_dim": size, "hidden_size": few * size, "num_hidden_layers": depth}
            narrow["max_position_embeddings"] = max(32, getattr(config, "max_position_embeddings", None) or 0)
            changed = {names.get(n, n): value for n, value in narrow.items() if names.get(n, n) in settings}
            if others := settings.get("per_layer_config"):  # layers of other sizes, by number
                kept = {n: sizes | {"num_key_value_heads": 1} for n, sizes in others.items() if int(n) < depth}
                changed["per_layer_config"] = kept
            yield settings | {name: kinds[:depth] for name, kinds in by_layer.items()} | changed
    yield settings


def _limited(name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _limited(name, entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_limited(name, entry) for entry in value]
    most = next((most for most, ends in SMALL.items() if name.endswith(ends)), None)
    return value if most is None or type(value) is not int else min(value, most)


def _apart(model: PreTrainedModel, attention: str) -> float:
    """Return by how much the logits over a KV cache differ from those of the class's own attention without one."""
    ids = torch.randint(1, model.config.vocab_size, (2, 27), generator=torch.Generator().manual_seed(0))
    model.set_attn_implementation(OWN)
    expected: Tensor = model(input_ids=ids, use_cache=False).logits
    model.set_attn_implementation(attention)
    cache = KVCache()
    cache.shape(2, 32)

    def error(places: Tensor, slots: Tensor, positions: Tensor, sees: Tensor | None = None, last: int = 0) -> float:
        """Feed the text's tokens at `places`; return the error of their logits, of the `last` ones or of all.

        The second of a tree is rejected.
        """
        metadata = AttentionMetadata(slots, positions, slots[:, 0], 32, sees=sees)
        cache.set_batch(metadata)
        how = {"past_key_values": cache, "use_cache": True, **metadata.arguments(model)}
        how |= {"logits_to_keep": last}  # for which Gemma 4 may leave out positions in its last layers
        found: Tensor = model(input_ids=ids.gather(1, places), position_ids=positions, **how).logits
        kept = slice(None, None, 1 if sees is None else 2)
        own = expected.gather(1, places[:, -last:, None].expand_as(found))[:, kept]
        return float((found[:, kept] - own).norm() / own.norm())

    prefix, chain = torch.arange(24).expand(2, 24), torch.tensor([[24], [15]]) + torch.arange(3)
    sees = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 1]], dtype=torch.bool)
    tree = chain[:, [0, 2, 1]], chain, chain[:, [0, 0, 1]], sees
    return max([error(prefix, prefix, prefix), error(*tree), error(chain, chain, chain, last=2)])

"""The two formats of drafts that predict a block (dflash.py): their configuration.

Both number a tap by the layer whose output it is, so that layer 0's is
`hidden_states[1]`; −1 is the embedding.

- z-lab (github.com/z-lab/dflash): `DFlashDraftModel`, `DFlash2DraftModel`. Entries are in `dflash_config` of
  config.json or beside it. The first position of a block predicts nothing: the position of a mask predicts the token
  at that position. So B positions predict B − 1 tokens. `is_causal` holds for all layers. Domino and JetSpec name what
  differs in `dflash_config`: `projector_type` with `shift_label`, by which each position predicts the token after it,
  and `causal_head`, by which a position attends to the block's earlier positions only.
- DeepSpec (github.com/deepseek-ai/DeepSpec): `Qwen3DSparkModel` and `Gemma4DSparkModel`, of which DFlash is the case
  without heads. Each position predicts the token after it, the last decided token's position too. So B positions
  predict B tokens. A draft for Gemma 4 has layers of its kind, with full attention.
"""

import math
from collections.abc import Mapping
from typing import Any

from transformers import Gemma4TextConfig, Qwen3Config

from mtbench.models.drafts.block_heads import MARKOV_HEADS
from mtbench.models.drafts.dflash import SLIDING, BlockDraftConfig
from mtbench.models.feature_draft import LAYER, layers_of

DEEPSPEC, ITS_GEMMA = "Qwen3DSparkModel", "Gemma4DSparkModel"
Z_LAB, SECOND = "DFlashDraftModel", "DFlash2DraftModel"
NESTED = "dflash_config"
SCALES = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}  # and defaults
READ = {"target_layer_ids", "mask_token_id", "block_size", *SCALES}  # the entries that are read
DFLASH2 = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}  # and of DFlash 2
DOMINO_FIRST = "pure_draft_prefix_len"  # predictions before the first with a term
DOMINO = {"shift_label", DOMINO_FIRST, "gru_hidden_dim", "emb_dim"}  # and with this projector_type
CAUSAL = ("causal_head", "causal")  # JetSpec's own name and vLLM's
MOST_POSITIONS = 256
NEEDED = (*LAYER[:6], "max_position_embeddings", "rms_norm_eps")
GEMMA = ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config", "hidden_activation")
NOT_IN_GEMMA = ("enable_moe_block", "hidden_size_per_layer_input", "num_kv_shared_layers")  # drafts have none of these


def recognise(raw: Mapping[str, Any], part: str) -> BlockDraftConfig | None:
    """Return the configuration of a draft of either format. Raises ValueError for one that cannot be run."""
    architectures = raw.get("architectures") or []
    if part:
        return None
    if DEEPSPEC in architectures or ITS_GEMMA in architectures:
        return _deepspec(raw)
    return _z_lab(raw) if NESTED in raw or Z_LAB in architectures or SECOND in architectures else None


def _deepspec(raw: Mapping[str, Any]) -> BlockDraftConfig:
    rank, kind = _whole(raw, "markov_rank", least=0), raw.get("markov_head_type")
    if rank and kind not in MARKOV_HEADS:
        raise ValueError(f"markov_head_type is {kind!r:.60}; supported: {', '.join(MARKOV_HEADS)}")
    confidence = raw.get("enable_confidence_head") is True
    reads_token = confidence and raw.get("confidence_head_with_markov") is True
    if reads_token and not rank:
        raise ValueError("its confidence head reads the Markov head, and markov_rank is 0")
    config = _config(
        "DSpark of DeepSpec" if rank or confidence else "DFlash of DeepSpec",
        raw,
        raw,
        from_anchor=True,
        markov=kind if rank else None,
        rank=rank,
        confidence=confidence,
        confidence_reads_token=reads_token,
    )
    if raw.get("num_target_layers") in config.taps:
        # Its training reads the last layer's output before the last norm, its decoding after it.
        raise ValueError("target_layer_ids has the target's last layer, which is not supported")
    return config


def _z_lab(raw: Mapping[str, Any]) -> BlockDraftConfig:
    nested = raw.get(NESTED, {})
    if not isinstance(nested, Mapping):
        raise ValueError(f"{NESTED} is {nested!r:.60}, not an object")
    second = SECOND in (raw.get("architectures") or ())
    known = READ | {*CAUSAL} | (DFLASH2 if second else set())
    settings = {name: raw[name] for name in known if name in raw} | dict(nested)
    name, kind = "DFlash of z-lab", dict[str, Any]()
    if nested.get("projector_type") == "domino":
        known |= DOMINO | {"projector_type"}
        name = "Domino"
        kind = {"markov": "domino", "uncorrected": _whole({DOMINO_FIRST: 0, **nested}, DOMINO_FIRST, least=0)}
        kind |= {"rank": _whole(nested, "emb_dim", least=1), "state": _whole(nested, "gru_hidden_dim", least=1)}
    elif second:
        name, width = "DFlash 2", _whole(raw, "hidden_size", least=1)
        kind = {"rank": _whole(settings, "selector_rank", least=1)}
        kind["candidates"] = _whole(settings, "selector_top_k", least=1, most=_whole(raw, "vocab_size", least=1))
        kind["kernel"] = _whole(settings, "conv_kernel_size", least=1, most=MOST_POSITIONS)
        kind["group"] = _whole(settings, "conv_group_size", least=1, most=width)
        if width % kind["group"]:
            raise ValueError(f"conv_group_size is {kind['group']}, which does not divide hidden_size, {width}")
    elif any(map(nested.get, CAUSAL)):
        name = "JetSpec"
    if other := sorted(name for name, value in nested.items() if value and name not in known):
        raise ValueError(f"{NESTED} has {other[0]!r:.60}, which is not supported")
    settings.setdefault("target_layer_ids", _spread(raw))
    given = (raw.get("is_causal"), *map(nested.get, CAUSAL))
    if (causal := next((value for value in given if value is not None), None)) not in (None, False, True):
        raise ValueError(f"whether it is causal is {causal!r:.60}, not true or false")
    return _config(name, raw, settings, from_anchor=nested.get("shift_label") is True, causal=causal, **kind)


def _config(name: str, raw: Mapping[str, Any], settings: Mapping[str, Any], **kind: Any) -> BlockDraftConfig:
    """Return the configuration; `settings` holds what is in READ."""
    gemma = ITS_GEMMA in (raw.get("architectures") or ())
    supported = ("gemma4_text", "gemma4_unified_text") if gemma else ("qwen3",)
    if raw.get("model_type", supported[0]) not in supported:
        raise ValueError(f"its layers are of {raw['model_type']!r:.60}; supported: {', '.join(supported)}")
    if gemma and (other := [name for name in NOT_IN_GEMMA if raw.get(name)]):
        raise ValueError(f"{other[0]} is {raw[other[0]]!r:.60}, which is not supported")
    for needed in NEEDED:
        if raw.get(needed) is None:
            raise ValueError(f"config.json has no {needed}")
    layers = layers_of(Gemma4TextConfig, raw, GEMMA) if gemma else layers_of(Qwen3Config, raw)
    if other := sorted({*layers.layer_types} - {"full_attention", SLIDING}):
        raise ValueError(f"layer_types has {other[0]!r:.60}; supported: full_attention, {SLIDING}")
    if SLIDING in layers.layer_types and (kind["from_anchor"] or kind.get("markov")):
        raise ValueError("it has layers of sliding attention, which are not supported: is a block causal in them?")
    if SLIDING in layers.layer_types and not 0 < (layers.sliding_window or 0) < 1 << 30:
        # The owners' file for PyTorch has no window then, their file for MLX has `sliding_window`, vLLM refuses.
        raise ValueError(f"layer_types has {SLIDING}, which needs a sliding_window from 1 and use_sliding_window: true")
    taps = settings.get("target_layer_ids")
    if not isinstance(taps, list | tuple) or not taps or any(type(tap) is not int or tap < -1 for tap in taps):
        raise ValueError(f"target_layer_ids is {taps!r:.60}, not a list of layers")
    scales = {name: _number(settings, name, default) for name, default in SCALES.items()}
    return BlockDraftConfig(
        name=name,
        raw=raw,
        taps=tuple(tap + 1 for tap in taps),
        width=layers.hidden_size,
        vocabulary=layers.vocab_size,
        max_position_embeddings=layers.max_position_embeddings,
        mask_id=_whole(settings, "mask_token_id", least=0, most=layers.vocab_size - 1),
        layers=layers,
        block=_whole(settings, "block_size", least=1 if kind["from_anchor"] else 2, most=MOST_POSITIONS),
        embedding_scale=layers.hidden_size**0.5 if gemma else scales["input_embedding_scale"],
        multiplier=scales["output_multiplier"],
        softcap=scales["final_logit_softcapping"],
        **kind,
    )


def _spread(raw: Mapping[str, Any]) -> list[int]:
    """Return z-lab's layers where none are named: evenly from the second to the third last."""
    target, own = (_whole(raw, name, least=1) for name in ("num_target_layers", "num_hidden_layers"))
    if own == 1:
        return [target // 2]
    return [round(1 + i * (target - 4) / (own - 1)) for i in range(own)]


def _whole(settings: Mapping[str, Any], name: str, *, least: int, most: int = 1 << 30) -> int:
    value = settings.get(name)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name} is {value!r:.60}, not a whole number from {least} to {most:,}")
    return value


def _number(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = default if settings.get(name) is None else settings[name]
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r:.60}, not a number")
    return float(value)

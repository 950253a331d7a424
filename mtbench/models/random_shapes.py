"""Published model shapes for random weights: `random:qwen2.5-7b` decodes as fast as Qwen2.5-7B; its text is noise.

Source: config.json of huggingface.co/Qwen/Qwen2.5-{0.5B,1.5B,3B,7B}-Instruct; layers, heads and tied embeddings as in
Table 1 of the Qwen2.5 technical report, arXiv 2412.15115. Parameters: 494,032,768, 1,543,714,304, 3,085,938,688 and
7,615,616,512.
"""

from collections.abc import Mapping
from typing import Any


def _qwen2(
    layers: int, hidden: int, ff: int, heads: int, kv_heads: int, *, rows: int = 151_936, tied: bool = True
) -> dict[str, Any]:
    """Return the entries of config.json. The architecture itself adds biases to queries, keys and values."""
    return {
        "model_type": "qwen2",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": ff,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": rows,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768,
        "initializer_range": 0.02,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "qwen2.5-0.5b": _qwen2(24, 896, 4864, 14, 2),
    "qwen2.5-1.5b": _qwen2(28, 1536, 8960, 12, 2),
    "qwen2.5-3b": _qwen2(36, 2048, 11_008, 16, 2),
    "qwen2.5-7b": _qwen2(28, 3584, 18_944, 28, 4, rows=152_064, tied=False),
}

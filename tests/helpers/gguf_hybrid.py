"""A GGUF file of a hybrid, which mtbench neither writes nor reads: a tiny random LFM2, by llama.cpp's names.

Sources: llama.cpp's src/models, and gguf.constants.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mtbench.models import gguf_writer
from mtbench.models.families import EMBEDDED, locate

ROWS, WIDTH, HEADS, GROUPS, HEAD, INNER, LAYERS = 512, 64, 4, 2, 16, 128, 4
CONVOLVED = 3  # positions that a short convolution reads
EPS = "attention.layer_norm_rms_epsilon"
SIZES: dict[str, Any] = {
    "context_length": 1024,
    "embedding_length": WIDTH,
    "block_count": LAYERS,
    "feed_forward_length": INNER,
    "attention.head_count": HEADS,
    "attention.head_count_kv": [0, GROUPS] * 2,
    "shortconv.l_cache": CONVOLVED,
    "attention.key_length": HEAD,
    "attention.value_length": HEAD,
    "rope.dimension_count": HEAD,
    "rope.freq_base": 10_000.0,
    EPS: 1e-6,
    "vocab_size": ROWS,
}
SHAPES: Mapping[str, tuple[int, ...]] = {  # (out, in) of a layer's tensors
    "attn_q": (HEADS * HEAD, WIDTH),
    "attn_k": (GROUPS * HEAD, WIDTH),
    "attn_v": (GROUPS * HEAD, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD),
    "ffn_gate": (INNER, WIDTH),
    "ffn_up": (INNER, WIDTH),
    "ffn_down": (WIDTH, INNER),
    "shortconv.conv": (WIDTH, CONVOLVED),
    "shortconv.in_proj": (3 * WIDTH, WIDTH),
    "shortconv.out_proj": (WIDTH, WIDTH),
}
ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")
CONVOLUTION = ("shortconv.conv", "shortconv.in_proj", "shortconv.out_proj")
DENSE = ("ffn_gate", "ffn_up", "ffn_down")


def _layer(number: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's tensors by name."""
    mixer = ATTENTION if number % 2 else CONVOLUTION
    own = {"attn_q_norm": (HEAD,), "attn_k_norm": (HEAD,)} if number % 2 else {}
    return {name: SHAPES[name] for name in (*mixer, *DENSE)} | norms("attn_norm", "ffn_norm") | own


def norms(*names: str) -> dict[str, tuple[int, ...]]:
    return dict.fromkeys(names, (WIDTH,))


def _kinds(value: Any) -> tuple[Any, ...]:
    """Return the types of a key's value, and of its elements."""
    from gguf import GGUFValueType

    names = {int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, list: GGUFValueType.ARRAY}
    return names[type(value)], names[type(value[0])] if isinstance(value, list) else None


def write_hybrid(file: Path) -> Path:
    """Write a random LFM2 with the tokenizer of the embedded checkpoints; return the file."""
    from gguf import GGUFWriter

    chance = np.random.default_rng(0)
    tensors = {"token_embd": (ROWS, WIDTH), "output": (ROWS, WIDTH), "token_embd_norm": (WIDTH,)}
    for number in range(LAYERS):
        tensors |= {f"blk.{number}.{name}": shape for name, shape in _layer(number).items()}
    writer = GGUFWriter(file, "lfm2")
    for key, value in SIZES.items():
        writer.add_key_value(f"lfm2.{key}", value, *_kinds(value))
    tokenizer = Path(locate(f"{EMBEDDED}ar"))
    gguf_writer._add_tokenizer(writer, tokenizer, {"vocab_size": ROWS, "eos_token_id": 2})
    for name, shape in tensors.items():
        values = chance.normal(1.0 if len(shape) == 1 else 0.0, 0.1 if "." in name else 1.0, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file

"""Working checkpoints with one thing changed that matters: each is refused, or has the tokens of the changed model.

The reference is transformers' own `generate`, for a GGUF file on a folder with the same weights and settings.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import ar, run
from gguf_files import written
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from mtbench.errors import UserError
from mtbench.models.families import RANDOM_TOKENIZER, locate
from mtbench.models.gguf_writer import ARCHITECTURES, write
from mtbench.models.loading import inspect, load
from mtbench.models.runner import ModelRunner

PROMPTS = [[40, 90, 17, 60], list(range(70, 130))]  # the second: longer than a window and a scaled context
BUDGET = 8
SHAPE = {
    "vocab_size": 502,  # of the tokenizer
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
    "tie_word_embeddings": False,
}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16}),
}
Fault = Callable[[Path], Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder for each name in MODELS, made once."""
    root = tmp_path_factory.mktemp("models")

    def made(name: str) -> Path:
        folder = root / name
        if not folder.is_dir():
            kind, changes = MODELS[name]
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SHAPE, **changes}))
            for parameter in model.parameters():
                if parameter.ndim == 1:  # norms and biases that make a difference
                    parameter.data += 0.2 * torch.randn_like(parameter)
            model.save_pretrained(folder)
            for file in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(Path(locate(RANDOM_TOKENIZER)) / file, folder)
            if kind in ARCHITECTURES:
                write(folder, folder.with_suffix(".gguf"), "float32")
        return folder

    return made


def tokens(source: str) -> list[list[int]]:
    """mtbench's tokens."""
    return [answer.token_ids for answer in run(ar(), ModelRunner(load(source)), PROMPTS, BUDGET)]


def reference(folder: Path) -> list[list[int]]:
    """The tokens of transformers' generate; no arm emits the mask, 3."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    how = {"max_new_tokens": BUDGET, "do_sample": False, "suppress_tokens": [3]}
    return [model.generate(torch.tensor([ids]), **how)[0, len(ids) :].tolist() for ids in PROMPTS]


def weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Fault:
    """A fault of the weights."""

    def fault(folder: Path) -> None:
        found = load_file(folder / "model.safetensors")
        change(found)
        save_file(found, folder / "model.safetensors", {"format": "pt"})

    return fault


def without(part: str) -> Fault:
    return weights(lambda found: [found.pop(name) for name in list(found) if part in name])


def added(name: str, *shape: int) -> Fault:
    return weights(lambda found: found.update({name: torch.randn(shape, generator=torch.Generator().manual_seed(0))}))


def settings(file: str = "config.json", **changes: Any) -> Fault:
    """A fault of config.json or of another file of settings."""
    return lambda folder: (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | changes))


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


def same(folder: Path) -> None:
    """No fault."""


def ends(*ids: int) -> Fault:
    return settings("generation_config.json", eos_token_id=list(ids))


def dequantised(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Matrices after Q8_0: blocks of 32 weights, each an int8 times a float16."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    kind = GGMLQuantizationType.Q8_0
    matrices = {name: weight.numpy() for name, weight in found.items() if weight.ndim == 2}
    return {name: torch.tensor(dequantize(quantize(weight, kind), kind)) for name, weight in matrices.items()}


def sharded(fault: Fault) -> Fault:
    """A fault of a checkpoint in several files."""

    def act(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        (folder / "model.safetensors").unlink()
        model.save_pretrained(folder, max_shard_size="150KB")
        fault(folder)

    return act


def renamed(name: str) -> Fault:
    return lambda folder: (folder / "model.safetensors").rename(folder / name)


SCALED = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = rope("llama3", **SCALED, low_freq_factor=1.0, high_freq_factor=4.0)
SHARD = "model-00002-of-00004.safetensors"
FOLDERS: dict[str, tuple[str, Fault, str]] = {  # fault: model, what changes, what the refusal says ("": right tokens)
    "nothing": ("qwen2", same, ""),
    "a matrix": ("qwen2", without("1.mlp.up_proj"), r"lacks 1 weights .*up_proj"),
    "a head beside tied weights": ("qwen2", added("lm_head.weight", 502, 64), ""),
    "multi-token prediction of its own": ("qwen2", added("model.mtp_layers.0.input_proj.weight", 64, 128), ""),
    "two end ids": ("qwen2", ends(2, 44), ""),
    "a bias that the configuration lacks": ("llama", added("model.layers.0.self_attn.q_proj.bias", 64), "beyond those"),
    "llama3": ("llama", settings(**LLAMA3), ""),
    "yarn": ("llama", settings(**rope("yarn", **SCALED)), ""),
    "a matrix of another shape": ("llama", added("model.layers.0.mlp.up_proj.weight", 32, 64), r"shape \[32, 64\]"),
    "an adapter": ("llama", lambda folder: (folder / "adapter_config.json").touch(), "adapter .*merge_and_unload"),
    "only a GGUF file": ("llama", renamed("a.gguf"), r"GGUF file \(a.gguf\).* give the file"),
    "window": ("gemma3", settings(sliding_window=8), ""),
    "a part": ("llama", sharded(lambda folder: (folder / SHARD).unlink()), f"{SHARD}', which is missing"),
    "the index": ("llama", sharded(lambda f: (f / "model.safetensors.index.json").unlink()), "no model.safetensors"),
    "a number that is none": ("llama", weights(lambda w: w["model.norm.weight"].fill_(torch.nan)), "not finite"),
    "an unknown quantisation": (
        "llama",
        settings(quantization_config={"quant_method": "modelopt"}),
        "Unknown quantization type, got modelopt",
    ),
    "the vocabulary": ("llama", lambda folder: (folder / "tokenizer.json").unlink(), "no usable tokenizer"),
}


@pytest.mark.parametrize("fault", FOLDERS)
def test_a_changed_folder_is_refused_or_has_its_own_tokens(
    fault: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    model, change, said = FOLDERS[fault]
    shutil.copytree(models(model), folder := tmp_path / "model")
    change(folder)
    if said:
        with pytest.raises(UserError, match=said):
            load(str(folder))
    else:
        assert tokens(str(folder)) == reference(folder)


def llama3_divisors(width: int, theta: float, factor: float, original: int) -> np.ndarray:
    """Of each frequency, as llama.cpp's converter computes them for Llama 3.1."""
    turns = theta ** -(np.arange(0, width, 2) / width) / (2 * np.pi)
    kept = np.clip((original * turns - 1) / 3, 0, 1)
    return (1 / (kept + (1 - kept) / factor)).astype(np.float32)


SCALING = "rope.scaling."
LINEAR = {f"{SCALING}type": "linear", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 32}
FREQS = {"rope_freqs.weight": llama3_divisors(16, 10000.0, 4.0, 32)}
END = "tokenizer.ggml."
FILES: dict[str, tuple[str, dict[str, Any], Fault | str]] = {  # model, changed file, changed folder or refusal
    "nothing": ("llama", {}, same),
    "Q8_0": ("qwen2", {"quantised": "Q8_0"}, weights(lambda w: w.update(dequantised(w)))),
    "linear": ("llama", {"keys": LINEAR}, settings(**rope("linear", factor=4.0))),
    "llama3": ("llama", {"tensors": FREQS}, settings(**LLAMA3)),
    "yarn": ("llama", {"keys": {f"{SCALING}type": "yarn"}}, r"llama\.rope\.scaling\.type = 'yarn'"),
    "a part": ("llama", {"tensors_a_part": 9}, "it is a part of one, .* `llama-gguf-split --merge model-00001-of-"),
    "a scale of one": ("llama", {"keys": {"logit_scale": 1.0, "expert_count": 0, "attention.causal": True}}, same),
    "both directions": ("llama", {"keys": {"attention.causal": False}}, "llama.attention.causal = False"),
    "heads of each layer": ("llama", {"keys": {"attention.head_count_kv": [2, 2]}}, r"head_count_kv = \[2, 2\]"),
    "an adapter": ("llama", {"keys": {"general.type": "adapter"}}, "general.type adapter"),
    "the embedding": ("qwen2", {"without": ["token_embd"]}, "lacks 1 tensors, .*token_embd.weight"),
    "a tensor more": ("llama", {"tensors": {"blk.0.attn_q.bias": np.ones(64, np.float32)}}, r"place .*attn_q\.bias"),
    "a shape": (
        "llama",
        {"keys": {"feed_forward_length": 32}},
        r"other shapes: 6 .*down_proj.weight \[64, 64\] for \[64, 32\]",
    ),
    "a rule that splits text": ("llama", {"keys": {"tokenizer.ggml.pre": "made-up"}}, "tokenizer.ggml.pre = 'made-up'"),
    "a message's end": ("qwen2", {"keys": {f"{END}eom_token_id": 44, f"{END}eos_token_id": 0}}, ends(0, 2, 44)),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("fault", FILES)
def test_a_changed_gguf_file_is_refused_or_has_the_tokens_of_its_folder(
    fault: str, models: Callable[[str], Path], tmp_path: Path
) -> None:
    """Keys without a name in front are the architecture's."""
    model, changes, expected = FILES[fault]
    keys = {
        key if key.startswith(("general.", "tokenizer.")) else f"{model}.{key}": value
        for key, value in changes.get("keys", {}).items()
    }
    file = written(models(model).with_suffix(".gguf"), tmp_path / "model.gguf", **{**changes, "keys": keys})
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            load(str(file))
        assert not any((tmp_path / "cache").rglob("model*"))
    else:
        shutil.copytree(models(model), folder := tmp_path / "twin")
        ends(0, 2)(folder)
        expected(folder)
        assert tokens(str(file)) == reference(folder)


MERGED = ["34", "12", "123", "1234", "Ġ1", "Ġ12", "ĠĠ", "'s", "xs", "$=", "=+"]
BYTES = [*"abcdefghijklmnopqrstuvwxyz0123456789.'$=+ĠĊ", *MERGED]
JOINED = ["▁▁", "▁a", "ab", "▁ab", "12", "34", "1234"]
PIECES = [*(f"<0x{i:02X}>" for i in range(256)), *JOINED, *"▁ab1234.x", "<|im_end|>"]
BPE: dict[str, Any] = {
    "tokens": [*"#", *BYTES, *(f"<{i}>" for i in range(501 - len(BYTES)))],
    "token_type": [3, *[1] * len(BYTES), *[5] * (501 - len(BYTES))],
    "merges": ["3 4", "1 2", "12 3", "12 34", "Ġ 1", "Ġ 12", "Ġ Ġ", "' s", "$ =", "= +"],
    "eos_token_id": 0,
}
SENTENCE_PIECE: dict[str, Any] = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", *PIECES, *(f"<{i}>" for i in range(499 - len(PIECES)))],
    "token_type": [2, 3, 3, *[6] * 256, *[1] * (len(PIECES) - 257), 3, *[5] * (499 - len(PIECES))],
    "scores": [-float(i) for i in range(502)],
    "merges": None,
    "bos_token_id": 1,
    "add_bos_token": None,
}
OF_BYTES, OF_PIECES = "xs's  123  $=+ 1234", "ab  1234<|im_end|>ab"
# Keys, text, what llama.cpp's server (xllamacpp 2026.10.11549) answers to /tokenize.
SPLIT: dict[str, tuple[dict[str, Any], str, list[int]]] = {
    "gpt-2": (BPE, OF_BYTES, [24, 19, 51, 42, 42, 46, 42, 42, 53, 41, 42, 47]),
    "smollm": (BPE, OF_BYTES, [24, 19, 51, 50, 28, 29, 30, 42, 42, 53, 41, 42, 28, 29, 30, 31]),
    "default": (BPE, OF_BYTES, [24, 19, 38, 19, 42, 42, 46, 50, 53, 41, 42, 46, 31]),
    "llama-bpe": (BPE, OF_BYTES, [52, 51, 42, 42, 46, 42, 42, 53, 41, 42, 46, 31]),
    "qwen2": (BPE, OF_BYTES, [24, 19, 51, 42, 42, 28, 29, 30, 42, 42, 53, 41, 42, 28, 29, 30, 31]),
    "pieces": (SENTENCE_PIECE, OF_PIECES, [1, 262, 259, 265, 275, 262]),
    "no space first": (SENTENCE_PIECE | {"add_space_prefix": False}, OF_PIECES, [1, 261, 259, 265, 275, 261]),
}


@pytest.mark.parametrize("rule", SPLIT)
def test_a_text_has_the_ids_of_llama_cpp(rule: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    keys, text, ids = SPLIT[rule]
    keys = {f"{END}{key}": value for key, value in {"pre": rule, **keys}.items()}
    file = written(models("llama").with_suffix(".gguf"), tmp_path / "model.gguf", keys=keys)
    assert inspect(str(file)).tokenizer(text)["input_ids"] == ids

"""Checkpoints written as GGUF files. That llama.cpp computes the same with them: tests/engines/test_llamacpp.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from small import save_small

from mtbench.errors import UserError
from mtbench.models import families, gguf_writer


def tensors(file: Path) -> dict[str, torch.Tensor]:
    return {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(file).tensors}


def test_a_file_is_written_once_for_each_dtype() -> None:
    folder = Path(families.locate("embedded:tiny/draft"))
    file = gguf_writer.written(folder, "float32")
    before = file.stat().st_mtime_ns
    assert gguf_writer.written(folder, "float32") == file
    assert file.stat().st_mtime_ns == before
    assert gguf_writer.written(folder, "bfloat16") != file
    assert "token_embd.weight" in tensors(file)
    assert [path for path in file.parent.iterdir() if path.suffix == ".tmp"] == []


def test_float16_holds_the_weights_of_a_bfloat16_checkpoint_only(tmp_path: Path) -> None:
    """A value changes by at most 2^-25. Weights that lose more are refused, because a run would compare two models."""
    folder = Path(families.locate("embedded:tiny/draft"))
    half, whole = (tensors(gguf_writer.written(folder, dtype)) for dtype in ("float16", "float32"))
    assert half["blk.0.attn_q.weight"].dtype == torch.float16
    assert half["blk.0.attn_norm.weight"].dtype == torch.float32
    assert max((half[name].float() - whole[name]).abs().max().item() for name in whole) <= 2**-25
    shutil.copytree(folder, other := tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor.float() / 3 for name, tensor in weights.items()}, other / "model.safetensors")
    with pytest.raises(UserError, match="the weights of 'other' lose digits in float16; give a GGUF file"):
        gguf_writer.written(other, "float16")


def test_an_unknown_architecture_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="writes no GGUF file of 'small', a mamba model; it knows llama"):
        gguf_writer.written(folder, "float32")

"""Checkpoints written as GGUF files. That llama.cpp computes the same with them: tests/engines/test_llamacpp.py."""

import json
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader
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


def test_an_unknown_architecture_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    folder = save_small(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "mamba"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="writes no GGUF file of 'small', a mamba model in float32; it knows llama"):
        gguf_writer.written(folder, "float32")

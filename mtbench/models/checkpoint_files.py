"""Check the files of a checkpoint before a library reads them, and before memory is allocated for them.

A checkpoint is untrusted input. Only safetensors are loaded: an index that names another file, or one outside the
folder, is refused. A file may be a link, since the hub's cache consists of links, but it must lead to a plain file.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from pydantic_core import from_json
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from mtbench import files
from mtbench.errors import UnreadableCheckpoint, UserError, first_line

GENERATION = "generation_config.json"
CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
SETTINGS = (CONFIG, GENERATION, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
# What to copy of a checkpoint: safetensors (pickled weights could run code), tokenizer, configuration, training record,
# licence.
CHECKPOINT_FILES = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*")
LARGEST_SETTINGS, LARGEST_TOKENIZER, LARGEST_INDEX = 1 << 24, 1 << 28, 100_000_000  # bytes
HASHED_AT_ONCE = 1 << 24  # bytes
LARGEST_SIZES = {  # of a model; published ones are far below
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 30,
}
MERGE = "`PeftModel.from_pretrained(MODEL, FOLDER).merge_and_unload().save_pretrained(OUT)`, with the package peft"
OTHER_FILES = {  # unreadable weights of a folder: their name, and the remedy
    ADAPTER: ("an adapter", f"merge it into its model: {MERGE}"),
    "*.gguf": ("a GGUF file", "give the file in place of the folder"),
    "*.bin *.pt *.pth": ("pickled weights only", "they can run code when loaded: convert them to safetensors"),
}

WEIGHTS_OF_ENGINES = (".safetensors", ".bin", ".pt", ".pth")

Shapes = dict[str, tuple[int, ...]]  # of stored tensors, by name


def check_settings(folder: Path) -> None:
    """Raise UserError for a settings file that is not a JSON object, or a tokenizer file that is not a plain file."""
    for name in SETTINGS:
        if (folder / name).exists():
            _read_object(folder / name, LARGEST_SETTINGS)
    for name in TOKENIZER_FILES:
        if (folder / name).exists():
            with files.open_plain(folder / name) as file:
                if file.seek(0, 2) > LARGEST_TOKENIZER:
                    raise UserError(f"{folder / name} has over {LARGEST_TOKENIZER:,} bytes.")


def check_sizes(config: Mapping[str, Any]) -> None:
    """Raise ValueError for a size in config.json that no model has, or for sizes that contradict one another."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        for name, most in LARGEST_SIZES.items():
            value = part.get(name)
            if value is not None and (type(value) is not int or not 1 <= value <= most):
                raise ValueError(f"{name} is {value!r:.60}, not a whole number from 1 to {most:,}")
        hidden, heads, groups = (part.get(n) for n in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        if heads and hidden and not part.get("head_dim") and hidden % heads:
            raise ValueError(f"{heads} heads do not divide hidden_size {hidden}")
        if heads and groups and heads % groups:
            raise ValueError(f"{groups} key-value heads do not divide {heads} heads")


def check_files(folder: Path) -> None:
    """Raise UnreadableCheckpoint for an adapter, or without safetensors by names that transformers knows."""
    names = sorted(file.name for file in folder.iterdir())
    if {WEIGHTS, INDEX} & set(names) and ADAPTER not in names:
        return
    what, remedy = f"no {WEIGHTS}", ""
    for patterns, (other, helps) in reversed(OTHER_FILES.items()):
        if found := [name for name in names for pattern in patterns.split() if fnmatch(name, pattern)]:
            what, remedy = f"{other} ({found[0]})", f"{helps}, or "
    raise UnreadableCheckpoint(f"checkpoint {str(folder)!r} has {what}; {remedy}give another checkpoint.")


def stored_bytes(folder: Path) -> int:
    """Return the size of a folder's weights in any format, 0 without any. Raises UserError for an adapter."""
    if (folder / ADAPTER).exists():
        check_files(folder)
    return sum(file.stat().st_size for file in folder.glob("*") if file.suffix in WEIGHTS_OF_ENGINES)


def weights_sha256(folder: Path) -> str | None:
    """Return the hash of a local checkpoint's safetensors files, in the order of their names; None for a hub id."""
    digest = hashlib.sha256()
    safetensors = sorted(folder.glob("*.safetensors"))
    for file in safetensors:
        with files.open_plain(file) as opened:
            while part := opened.read(HASHED_AT_ONCE):
                digest.update(part)
    return digest.hexdigest() if safetensors else None


def stored_shapes(folder: Path) -> Shapes:
    """Return the shapes of the weights in a folder, from the headers of its safetensors files.

    Raises UserError for a file that is not safetensors, or an index that names anything else.
    """
    shapes: Shapes = {}
    for file in weight_files(folder):
        shapes |= _header(file)
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """Return the files that a folder's weights are read from; other safetensors files are ignored.

    Raises UserError as `check_files`, and for an index that names anything else.
    """
    check_files(folder)
    names = [WEIGHTS]
    if not (folder / WEIGHTS).exists() and (folder / INDEX).exists():
        names = _indexed(folder)
    return [folder / name for name in names]


def _indexed(folder: Path) -> list[str]:
    index = _read_object(folder / INDEX, LARGEST_INDEX).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise UserError(f"{folder / INDEX}: weight_map is not an object with entries; give another checkpoint.")
    names = {name if isinstance(name, str) else repr(name) for name in index.values()}
    for name in sorted(names):
        if not name.endswith(".safetensors") or "/" in name or "\\" in name or "\0" in name or name.startswith("."):
            raise UserError(
                f"{folder / INDEX}: weight_map names {name!r:.60}, and mtbench reads only safetensors files of the "
                "same folder. Convert the weights, or give another checkpoint."
            )
        if not (folder / name).exists():
            raise UserError(f"{folder / INDEX}: weight_map names {name!r:.60}, which is missing.")
    return sorted(names)


def _header(file: Path) -> Shapes:
    """Return the shapes in the header of a safetensors file, which safetensors checks: it must describe every byte."""
    try:
        with files.open_plain(file):
            pass
        with safe_open(file, "np") as stored:
            return {name: tuple(stored.get_slice(name).get_shape()) for name in stored.offset_keys()}
    except FileNotFoundError:
        raise UserError(f"{file} is missing; give another checkpoint.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} is not a safetensors file: {first_line(error)}; give another checkpoint.") from None


def _read_object(file: Path, largest: int) -> dict[str, Any]:
    try:
        value = from_json(files.read_bytes(file, largest))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{file} is not JSON ({first_line(error)}); give another checkpoint.") from None
    if not isinstance(value, dict):
        raise UserError(f"{file} is not a JSON object; give another checkpoint.")
    return value


class Layout(NamedTuple):
    """The changes that another program needs to load a checkpoint; empty: none."""

    entries: Mapping[str, Any] = {}  # of config.json, besides or in place of its own
    renamed: Mapping[str, str] = {}  # how names of weights begin -> how they begin there
    part: str = ""  # the only file it takes, of weights that lie beside the model's; config.json is `entries` alone
    without: str = ""  # a file that it must not find


def copy_with(folder: Path, layout: Layout, out: Path, *, link: bool = False) -> None:
    """Write a copy of a checkpoint in another layout. It is complete or absent.

    `link`: link to the files that stay the same, in place of copies.
    """
    partial = out.with_name(out.name + ".partial")
    with files.write_errors(out):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in _copied(folder, layout):
            if layout.renamed and file.suffix == ".safetensors":
                weights = {_in(layout, name): weight for name, weight in load_file(file).items()}
                save_file(weights, partial / (WEIGHTS if layout.part else file.name), {"format": "pt"})
            elif link:
                (partial / file.name).symlink_to(file.resolve())
            else:
                shutil.copyfile(file, partial / file.name)
        if layout.renamed and not layout.part and (folder / INDEX).exists():
            index = _read_object(folder / INDEX, LARGEST_INDEX)
            index["weight_map"] = {_in(layout, name): file for name, file in index["weight_map"].items()}
            (partial / INDEX).unlink()
            files.write_json(partial / INDEX, index)
        own = {} if layout.part else _read_object(folder / CONFIG, LARGEST_SETTINGS)
        files.write_json(partial / CONFIG, {**own, **layout.entries})
        partial.rename(out)


def linked_with(folder: Path, layout: Layout) -> Path:
    """Return a copy as `copy_with` writes it, with links, made once in the cache folder; the folder if it will do."""
    if layout == Layout():
        return folder
    states = [
        (str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(_copied(folder, layout))
    ]
    made_of = json.dumps([states, _read_object(folder / CONFIG, LARGEST_SETTINGS), layout])
    out = files.cache_home() / "exports" / hashlib.sha256(made_of.encode()).hexdigest()[:16]
    if not out.is_dir():
        copy_with(folder, layout, out, link=True)
    return out


def _copied(folder: Path, layout: Layout) -> list[Path]:
    if layout.part:
        return [folder / layout.part]
    return [
        file
        for file in folder.iterdir()
        if any(map(file.match, CHECKPOINT_FILES)) and file.name not in (CONFIG, layout.without)
    ]


def _in(layout: Layout, name: str) -> str:
    return next((new + name[len(old) :] for old, new in layout.renamed.items() if name.startswith(old)), name)

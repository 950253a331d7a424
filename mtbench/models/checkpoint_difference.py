"""How the weights of two checkpoints differ: their hashes, and the first tensor that is not the same."""

from pathlib import Path

import torch
from safetensors import safe_open

from mtbench.errors import UserError
from mtbench.models.checkpoint_files import weight_files, weights_sha256
from mtbench.models.families import locate


def difference(a: str, b: str, *, offline: bool = False) -> str | None:
    """Return how the weights of checkpoints A and B differ, in one sentence; None if they are the same.

    Only the names are known of checkpoints in other formats than folders of safetensors files.
    """
    folders = [Path(locate(source)) for source in (a, b)]
    if not all(folder.is_dir() for folder in folders):
        return f"A decoded with {a}, B with {b}"
    hashes = [weights_sha256(folder) for folder in folders]
    if hashes[0] == hashes[1] and hashes[0] is not None:
        return None
    named = " and ".join(f"{source} ({(sha or 'no weights')[:12]})" for source, sha in zip((a, b), hashes, strict=True))
    return f"A and B decoded with other weights: {named}; {_first_tensor(*folders)}"


def _first_tensor(a: Path, b: Path) -> str:
    """Return the first tensor that differs, in the order of the names, and how."""
    try:
        places = [{name: file for file in weight_files(folder) for name in _names(file)} for folder in (a, b)]
    except (UserError, OSError) as error:
        return f"they could not be compared: {error}"
    if alone := sorted(places[0].keys() ^ places[1].keys()):
        return f"only one has {alone[0]}"
    stored = ""
    for name in sorted(places[0], key=_in_order):
        first, second = (_tensor(of[name], name) for of in places)
        if first.shape != second.shape:
            return f"{name} has the shapes {tuple(first.shape)} and {tuple(second.shape)}"
        if first.dtype != second.dtype:
            stored = stored or "numbers are {} and {}; ".format(*(str(t.dtype)[6:] for t in (first, second)))
        if apart := float((first.double() - second.double()).abs().max()):
            return f"{stored}the first tensor that differs is {name}, by up to {apart:.3g}"
    return f"{stored}all values are equal"


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as stored:
        return list(stored.keys())


def _tensor(file: Path, name: str) -> torch.Tensor:
    with safe_open(file, "pt") as stored:
        tensor: torch.Tensor = stored.get_tensor(name)
        return tensor


def _in_order(name: str) -> tuple[bool, list[tuple[int, str]]]:
    """Return a key that sorts embeddings first, and layer 2 before layer 10."""
    parts = [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
    return "embed" not in name, parts

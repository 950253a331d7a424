"""How the weights of two checkpoints differ: their hashes, and the first tensor that is not the same."""

from pathlib import Path

import torch
from safetensors import safe_open

from mtbench.errors import UserError
from mtbench.models.checkpoint_files import weight_files, weights_sha256
from mtbench.models.families import locate

NOT_IN_ALL = ("lm_head.weight", "inv_freq")  # tensors that files lack if they are tied, or computed


def difference(a: str, b: str) -> tuple[bool | None, str]:
    """Return whether checkpoints A and B have the same weights, and how they differ; None: it is not known, and why.

    Only the names are known of checkpoints in other formats than folders of safetensors files.
    """
    folders = [Path(locate(source)) for source in (a, b)]
    if not all(folder.is_dir() for folder in folders):
        return None, f"A decoded with {a}, B with {b}"
    hashes = [weights_sha256(folder) for folder in folders]
    if hashes[0] == hashes[1] and hashes[0] is not None:
        return True, ""
    named = " and ".join(f"{source} ({(sha or 'no weights')[:12]})" for source, sha in zip((a, b), hashes, strict=True))
    same, how = _first_tensor(*folders)
    return same, f"A and B decoded with {'perhaps ' * (same is None)}other weights: {named}; {how}"


def _first_tensor(a: Path, b: Path) -> tuple[bool | None, str]:
    try:
        places = [{name: file for file in weight_files(folder) for name in _names(file)} for folder in (a, b)]
    except (UserError, OSError) as error:
        return None, f"they could not be compared: {error}"
    alone = sorted(places[0].keys() ^ places[1].keys())
    if surely := [name for name in alone if not name.endswith(NOT_IN_ALL)]:
        return False, f"only one has {surely[0]}"
    stored = ""
    for name in sorted(places[0].keys() & places[1].keys(), key=_in_order):
        first, second = (_tensor(of[name], name) for of in places)
        if first.shape != second.shape:
            return False, f"{name} has the shapes {tuple(first.shape)} and {tuple(second.shape)}"
        if first.dtype != second.dtype:
            stored = stored or "numbers are {} and {}; ".format(*(str(t.dtype)[6:] for t in (first, second)))
        if apart := float((first.double() - second.double()).abs().max()):
            return False, f"{stored}the first tensor that differs is {name}, by up to {apart:.3g}"
    return (None, f"only one has {alone[0]}") if alone else (True, f"{stored}all values are equal")


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

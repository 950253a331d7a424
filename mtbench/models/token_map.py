"""A token map: the target's token ids whose logits a draft computes, if it was not trained with a trimmed vocabulary.

Zhao et al.: "FR-Spec: Accelerating Large-Vocabulary Language Models via Frequency-Ranked Speculative Sampling", arXiv
2502.14856. The draft's LM head keeps the rows of the map, so it reads fewer weights; its probabilities are normalised
over them. A token outside is never drafted, and costs a forward of the target. The file is a JSON list of ids, or a
list or tensor that torch saved, as SGLang's `--speculative-token-map` reads it.

D = ids of the map, V = vocabulary, C = hidden size.
"""

import copy
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mtbench import files
from mtbench.errors import UserError
from mtbench.models.checkpoint_files import LARGEST_SIZES

TOKEN_MAP = "file of the token ids that the draft may draft, of `mtbench train token-map`; none: all"  # help
LARGEST = 1 << 27  # bytes
ADVICE = "make one with `mtbench train token-map`."


class TokenMap(NamedTuple):
    """A token map, and the hash of its file."""

    ids: list[int]  # (D,) ascending
    sha256: str


def read(path: str) -> TokenMap:
    """Read a token map. Raises UserError unless it is a list of different whole numbers, at least one."""
    try:
        data = files.read_bytes(Path(path).expanduser(), LARGEST)
    except FileNotFoundError:
        raise UserError(f"token_map={path}: there is no such file; {ADVICE}") from None
    try:
        ids = json.loads(data) if data.lstrip().startswith(b"[") else _saved_by_torch(data)
    except Exception:  # torch raises errors of many kinds
        ids = None
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(f"token_map={path}: it is no list of token ids, neither JSON nor saved by torch; {ADVICE}")
    if len(set(ids)) < len(ids):
        raise UserError(f"token_map={path}: a token id is there twice; {ADVICE}")
    return TokenMap(sorted(ids), hashlib.sha256(data).hexdigest())


def _saved_by_torch(data: bytes) -> Any:
    """Return the list in a file of torch, of which nothing is executed."""
    saved = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    if isinstance(saved, Tensor):  # a small file may describe a huge one
        return saved.tolist() if saved.ndim == 1 and saved.numel() <= LARGEST_SIZES["vocab_size"] else None
    return saved


def write(path: Path, ids: Sequence[int]) -> None:
    """Write a token map: as torch saves a list if the name ends in `.pt`, else as JSON."""
    if path.suffix != ".pt":
        return files.write_json(path, list(ids), indent=None)
    saved = io.BytesIO()
    torch.save(list(ids), saved)
    return files.write_bytes(path, saved.getvalue())


def refuse(method: Any, checkpoints: Mapping[str, Any]) -> None:
    """Raise UserError if the drafts of a method, by role behind the target's, cannot draft by its token map."""
    target, *drafts = checkpoints.values()
    ids = read(method.token_map).ids
    if ids[-1] > target.largest_id:
        raise UserError(
            f"token_map={method.token_map} has the token id {ids[-1]:,}, and {target.source!r} emits ids up to "
            f"{target.largest_id:,}; {ADVICE}"
        )
    for draft in drafts:
        if method.translates or getattr(draft.config, "trimmed", False):
            raise UserError(
                f"{method.name}: the draft {draft.source!r} has a vocabulary of its own, so `token_map` does not apply "
                "to it; leave `token_map` out."
            )


def refuse_changed(planned: Mapping[str, str]) -> None:
    """Raise UserError unless each token map of a plan is as it was planned. `planned`: path -> SHA-256."""
    for path, sha256 in planned.items():
        if read(path).sha256 != sha256:
            raise UserError(
                f"token_map={path} changed since the plan was made (SHA-256 then {sha256[:12]}…); restore it, or "
                "start another run with `mtbench run -o DIR`."
            )


def flags(path: str, checkpoints: Mapping[str, Any], target: str) -> list[str]:
    """Return which share of the target's tokens each draft can draft, by role."""
    found, rows = read(path), checkpoints[target].vocabulary
    share = f"{len(found.ids):,} of {rows:,} tokens ({len(found.ids) / rows:.0%})"
    named = f"{Path(path).name}, SHA-256 {found.sha256[:12]}…"
    return [f"{role} drafts {share}, of the map {named}" for role in checkpoints if role != target]


def with_rows(model: Any, ids: Tensor) -> Any:
    """Return a copy of a model that shares all its modules and hooks, but for an LM head of the rows `ids` (D,)."""
    head = model.get_output_embeddings()
    trimmed = nn.Linear(head.weight.shape[1], len(ids), bias=head.bias is not None, device="meta")
    for name, weight in head.named_parameters():
        setattr(trimmed, name, nn.Parameter(weight.detach()[ids], requires_grad=False))
    twin = copy.copy(model)
    twin._modules = dict(model._modules)
    setattr(twin, next((name for name, part in model.named_children() if part is head), "lm_head"), trimmed)
    return twin

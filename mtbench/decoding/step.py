"""The work of a step around its forward pass: the ids to feed, and the commit.

The functions here are the definitions. They run on a CPU, and on a GPU if our kernels are off. Else the Triton kernels
of the same names run in their place, one for each (triton_step.py): the definitions are dozens of operations on
(rows, window) tensors, each a launch of its own.

R = rows, P = pending positions, G = guesses, N = most tokens one forward commits, D = depth of a path.
"""

from collections.abc import Sequence
from types import ModuleType

import torch
from torch import Tensor

from mtbench import kernels, sampling
from mtbench.decoding.host_sync import CommitLog, Shape
from mtbench.decoding.method import Commit, Rows, Window, block_start
from mtbench.models.attention import AttentionMetadata


def feed(
    rows: Rows, guess: Tensor, places: Tensor, window: Window, shape: Shape, block: int, windows: Sequence[int | None]
) -> tuple[Tensor, AttentionMetadata]:
    """Return the ids to feed and their metadata: P pending tokens, right-aligned before `base`, then G guesses (R, G).

    A row with fewer pending tokens repeats its first one. `places` (R, G): slots of the guesses. `block`: of the
    method. `windows`: sliding windows of the model's layers, None for a layer without; for these a GPU makes the masks.
    """
    if kernels.ours(guess):
        fed: tuple[Tensor, AttentionMetadata] = _triton().feed(rows, guess, places, window, shape, block, windows)
        return fed
    base, arange = rows.base[:, None], torch.arange(shape.pending, device=guess.device)
    slots = torch.maximum(base + (arange - shape.pending), rows.cached[:, None])
    ids = rows.tokens.gather(1, slots)
    positions = slots
    if guess.shape[1]:
        ids = torch.cat((ids, guess), 1)
        positions = torch.cat((slots, places if window.offset is None else base + window.offset), 1)
        slots = torch.cat((slots, places), 1)
    return ids, AttentionMetadata(slots, positions, rows.base, shape.view, block=block, sees=window.sees)


def write(
    rows: Rows, commit: Commit, window: Window, ends: Tensor, log: CommitLog, block: int, *, own_cursors: bool = False
) -> tuple[Tensor, ...]:
    """Cut at end token and budget, write the tokens, log the forward, move the cursors.

    Return slots of the cache to copy from and to, (R, D) each, or nothing. `ends` (vocabulary,) bool: the end tokens.
    `own_cursors`: the caller moves `base` and `cached`.
    """
    if kernels.ours(commit.tokens):
        moved: tuple[Tensor, ...] = _triton().write(rows, commit, window, ends, log, block, own_cursors=own_cursors)
        return moved
    count, ended = sampling.keep(commit.tokens, commit.count, rows.limit - rows.known, ends, rows.endless)
    # Tokens written after the kept ones lie beyond `known`; they are overwritten before they are read.
    column = torch.arange(commit.tokens.shape[1], device=commit.tokens.device)
    rows.tokens.scatter_(1, rows.known[:, None] + column, commit.tokens)
    offered = window.commits - 1 if commit.offered is None else commit.offered
    log.record(count, offered * (commit.count > 0), commit.count)
    moved = ()
    if commit.path is not None:
        depth = torch.arange(commit.path.shape[1], device=commit.path.device)
        moved = (rows.base[:, None] + commit.path, rows.base[:, None] + depth)
    rows.known.add_(count)
    torch.where(ended, rows.known, rows.limit, out=rows.limit)
    torch.ge(rows.known, rows.limit, out=rows.done)
    if not own_cursors:
        move_cursors(rows, commit, block_start(rows.known, block), rows.known - 1)
    return moved


def move_cursors(rows: Rows, commit: Commit, base: Tensor, final: Tensor) -> None:
    """Move the cursors: `base`, where guesses start now, and `final`, how many tokens may be cached, (R,) each."""
    final_guesses = rows.base + commit.kept
    rows.base.copy_(base)
    torch.minimum(final_guesses, torch.minimum(final, rows.base - 1), out=rows.cached)


def _triton() -> ModuleType:
    from mtbench.decoding import triton_step

    return triton_step

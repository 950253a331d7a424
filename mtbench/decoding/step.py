"""The work of a step around its forward pass: what is fed, and what is committed.

The functions here are the definitions. They run on a CPU, and on a GPU if our kernels are off. Else the Triton kernels
of the same names run in their place, one for each (triton_step.py): the definitions are dozens of operations on
(rows, window) tensors, each a launch of its own.

R = rows, P = pending positions, G = guesses, N = most tokens one forward commits, D = depth of a path.
"""

import dataclasses
from collections.abc import Sequence
from functools import cache
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from mtbench import kernels, sampling
from mtbench.decoding.host_sync import CommitLog, Shape
from mtbench.decoding.method import Commit, Rows, Window
from mtbench.errors import first_line
from mtbench.models.attention import AttentionMetadata

CHECKED_ROWS, CHECKED_SLOTS = 19, 96


def feed(
    rows: Rows, guess: Tensor, places: Tensor, window: Window, shape: Shape, block: int, windows: Sequence[int | None]
) -> tuple[Tensor, AttentionMetadata]:
    """Return the ids to feed and their metadata: P pending tokens, right-aligned before `base`, then G guesses (R, G).

    A row with fewer pending tokens repeats its first one. `places` (R, G): slots of the guesses. `block`: of the
    method. `windows`: sliding windows of the model's layers, None for a layer without; for these a GPU makes the masks.
    """
    if kernels.ours(guess):
        return _triton().feed(rows, guess, places, window, shape, block, windows)
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

    Return slots of the cache to copy from and to, (R, D) each, or nothing. `ends` (V,) bool: the end tokens.
    `own_cursors`: the caller moves `base` and `cached`.
    """
    if kernels.ours(commit.tokens):
        return _triton().write(rows, commit, window, ends, log, block, own_cursors=own_cursors)
    count, ended = sampling.keep(commit.tokens, commit.count, rows.limit - rows.known, ends, rows.endless)
    # Tokens written after the kept ones lie beyond `known`; they are overwritten before they are read.
    column = torch.arange(commit.tokens.shape[1], device=commit.tokens.device)
    rows.tokens.scatter_(1, rows.known[:, None] + column, commit.tokens)
    offered = window.commits - 1 if commit.offered is None else commit.offered
    log.record(count, offered * (commit.count > 0), commit.count)
    moved: tuple[Tensor, ...] = ()
    if commit.path is not None:
        depth = torch.arange(commit.path.shape[1], device=commit.path.device)
        moved = (rows.base[:, None] + commit.path, rows.base[:, None] + depth)
    rows.known.add_(count)
    torch.where(ended, rows.known, rows.limit, out=rows.limit)
    torch.ge(rows.known, rows.limit, out=rows.done)
    if not own_cursors:
        move_cursors(rows, commit, rows.known // block * block, rows.known - 1)
    return moved


def move_cursors(rows: Rows, commit: Commit, base: Tensor, final: Tensor) -> None:
    """Move the cursors: `base`, where guesses start now, and `final`, how many tokens may be cached, (R,) each."""
    final_guesses = rows.base + commit.kept
    rows.base.copy_(base)
    torch.minimum(final_guesses, torch.minimum(final, rows.base - 1), out=rows.cached)


def _triton() -> ModuleType:
    from mtbench.decoding import triton_step

    return triton_step


# --- The check of the kernels on the device that runs them ------------------------------------------------------------


def check_kernels(device: torch.device) -> None:
    """Switch our kernels off if those of a step do not give the results of their definitions on this device."""
    if kernels.ours(torch.empty(0, device=device)) and (fault := _fault(device)):
        kernels.switch_off(fault)


@cache
def _fault(device: torch.device) -> str | None:
    """Return what is wrong, or None. The cases: no guess, a chain, a tree; with and without blocks; random rows."""
    try:
        for seed, ((guesses, tree), block) in enumerate(product(((0, False), (6, False), (6, True)), (1, 4))):
            if case_differs(device, seed, guesses, tree=tree, block=block):
                return "a kernel that feeds or commits does not give what its definition gives"
    except Exception as error:  # a compiler or driver may be broken
        return f"{type(error).__name__}: {first_line(error)}"
    return None


def case_differs(device: torch.device, seed: int, guesses: int, *, tree: bool, block: int) -> bool:
    """Return whether the kernels give other results than the definitions for random rows."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator).to(device)

    count, slots, pending, view = CHECKED_ROWS, CHECKED_SLOTS, 3, 90
    known = 20 + integers(20, count)
    base = known // block * block
    offset = torch.arange(guesses, device=device) // 2 if tree else None
    sees = integers(2, guesses, guesses).bool() if tree else None
    window = Window(pending, guesses, guesses + 1, sees, offset)
    guess, places = integers(50, count, guesses), base[:, None] + torch.arange(guesses, device=device)
    nothing = torch.zeros_like(known)
    rows = Rows(
        tokens=integers(50, count, slots),
        request=nothing,
        prompt_len=nothing,
        known=known,
        base=base,
        cached=base - 1 - integers(pending, count),
        limit=known + integers(2 * guesses + 2, count),
        done=integers(2, count).bool(),
        seed=nothing,
        endless=integers(2, count).bool(),
    )
    path = integers(guesses, count, 2) if tree else None
    offered = integers(guesses + 1, count) if seed % 2 else None
    numbers = integers(guesses + 2, count), integers(guesses + 1, count)
    commit = Commit(integers(50, count, guesses + 1), *numbers, path=path, offered=offered)
    ends, windows = torch.arange(50, device=device) < 9, (None, 5)

    def results() -> list[Tensor]:
        own = dataclasses.replace(rows, **{name: getattr(rows, name).clone() for name in CHANGED})
        own_log = CommitLog(count, 4, device)
        ids, metadata = feed(own, guess, places, window, Shape(0, pending, view), block, windows)
        masks = [metadata.mask(each) for each in windows]  # before the commit moves `base`
        moved = write(own, commit, window, ends, own_log, block)
        logs = own_log.forwards, own_log.commits, own_log.offered, own_log.accepted
        changed = [getattr(own, name) for name in CHANGED]
        return [ids, metadata.slots, metadata.positions, metadata.length, *masks, *logs, *moved, *changed]

    found = results()
    with kernels.plain():
        expected = results()
    return not all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


CHANGED = ("tokens", "known", "base", "cached", "limit", "done")  # tensors of `Rows` that a commit changes

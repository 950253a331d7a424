# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The Triton kernels of `mtbench.decoding.step` and their launchers. Imported only on machines that run them.

They equal their definitions exactly, since they compute with integers alone. `feed` makes the masks of
`AttentionMetadata`, too.

R = rows, P = pending positions, G = guesses, W = P + G, V = slots in view, N = most tokens one forward commits, D =
depth of a path.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtbench.decoding.host_sync import CommitLog, Shape
from mtbench.decoding.method import Commit, Rows, Window
from mtbench.models.attention import AttentionMetadata

KEYS = 1024  # slots that a program masks at a time


@triton.jit(do_not_specialize=["offset_row", "sees_row", "view", "slots"])
def _feed(
    rows,
    window,
    outputs,
    guess,
    guess_row,
    guess_column,
    offset_row,
    sees_row,
    view,
    slots,
    PENDING: tl.constexpr,
    GUESSES: tl.constexpr,
    OFFSET: tl.constexpr,
    SEES: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    KEYS: tl.constexpr,
):
    """One position of one row: its id, slot and position, its place in the cache, and its row of the mask."""
    text, base, cached = rows
    places, offset, sees = window
    ids, fed, positions, index, mask = outputs
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if OFFSET:
        offset += row * offset_row
    start = tl.load(base + row)
    slot = tl.maximum(start + column - PENDING, tl.load(cached + row))
    is_guess, number = column >= PENDING, tl.maximum(column - PENDING, 0)
    id = tl.load(text + row * slots + slot, mask=column < PENDING, other=0)
    position = slot
    if GUESSES > 0:
        place = tl.load(places + row * GUESSES + number, mask=is_guess, other=0)
        slot = tl.where(is_guess, place, slot)
        id = tl.where(is_guess, tl.load(guess + row * guess_row + number * guess_column, mask=is_guess, other=0), id)
        position = slot
        if OFFSET:
            position = tl.where(is_guess, start + tl.load(offset + number, mask=is_guess, other=0), slot)
    at = row * (PENDING + GUESSES) + column
    tl.store(ids + at, id)
    tl.store(fed + at, slot)
    tl.store(positions + at, position)
    tl.store(index + at, row * slots + slot)
    for first in range(0, view, KEYS):
        key = first + tl.arange(0, KEYS).to(tl.int64)
        key_position = key
        if SEES:
            draft = key - start
            is_draft = (draft >= 0) & (draft < GUESSES)
            if OFFSET:
                key_position = tl.where(is_draft, start + tl.load(offset + draft, mask=is_draft, other=0), key)
            else:
                key_position = tl.where(is_draft, tl.load(places + row * GUESSES + draft, mask=is_draft, other=0), key)
        seen = key_position // BLOCK <= position // BLOCK
        if SEES:
            tree = tl.load(sees + row * sees_row + number * GUESSES + draft, mask=is_draft & is_guess, other=0) != 0
            seen = tl.where(is_draft & is_guess, tree, seen & (is_draft | (key < start)))
        if WINDOW > 0:
            seen = seen & (key_position > position - WINDOW)
        tl.store(mask + at * view + key, seen.to(tl.uint8), mask=key < view)


def feed(
    rows: Rows, guess: Tensor, places: Tensor, window: Window, shape: Shape, block: int, windows: Sequence[int | None]
) -> tuple[Tensor, AttentionMetadata]:
    """Return the ids to feed and their metadata; see `step.feed`."""
    (count, slots), guesses = rows.tokens.shape, guess.shape[1]
    offset, sees = (None if x is None else x.contiguous() for x in (window.offset, window.sees))
    # A tree for all rows has no row stride.
    strides = [0 if x is None or x.dim() == all_rows else x.stride(0) for x, all_rows in ((offset, 1), (sees, 2))]
    width = shape.pending + guesses
    ids, fed, positions, index = (guess.new_empty(count, width) for _ in range(4))
    masks = {each: guess.new_empty(count, width, shape.view, dtype=torch.bool) for each in windows or [None]}
    for sliding_window, mask in masks.items():
        _feed[count, width](
            (rows.tokens, rows.base, rows.cached),
            (places.contiguous(), offset, None if sees is None else sees.view(torch.uint8)),
            (ids, fed, positions, index, mask.view(torch.uint8)),
            guess,
            *guess.stride(),
            *strides,
            shape.view,
            slots,
            PENDING=shape.pending,
            GUESSES=guesses,
            OFFSET=window.offset is not None and guesses > 0,
            SEES=window.sees is not None and guesses > 0,
            BLOCK=block,
            WINDOW=sliding_window or 0,
            KEYS=KEYS,
        )
    return ids, AttentionMetadata(
        fed,
        positions,
        rows.base,
        shape.view,
        block=block,
        sees=window.sees,
        index=index.flatten(),
        _masks=dict(masks),
    )


@triton.jit(do_not_specialize=["slots", "forwards"])
def _write(
    commit,
    rows,
    ends,
    log,
    moved,
    slots,
    forwards,
    MOST_OFFERED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,  # TOKENS, a power of two
    DEPTH: tl.constexpr,
    DEPTH_PADDED: tl.constexpr,
    OFFERED: tl.constexpr,
    CURSORS: tl.constexpr,
):
    """One row: cut, write, log, and with CURSORS move `base` and `cached`."""
    tokens, count, kept, path, offered = commit
    text, known, base, cached, limit, done, endless = rows
    made, commits_log, offered_log, accepted_log = log
    source, target = moved
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    exists = column < TOKENS
    token = tl.load(tokens + row * TOKENS + column, mask=exists, other=0)
    accepted, before = tl.load(count + row), tl.load(known + row)
    last, start = tl.load(limit + row), tl.load(base + row)
    # Behind the accepted tokens there may be others than ids, such as −1.
    is_end = (tl.load(ends + token, mask=exists & (column < accepted), other=0) != 0) & (tl.load(endless + row) == 0)
    first_end = tl.min(tl.where(is_end, column, TOKENS), 0)
    committed = tl.minimum(tl.minimum(accepted, last - before), first_end + 1)
    after = before + committed
    last = tl.where(first_end < committed, after, last)
    tl.store(text + row * slots + before + column, token, mask=exists)
    tl.store(known + row, after)
    tl.store(limit + row, last)
    tl.store(done + row, (after >= last).to(tl.uint8))
    forward = tl.load(made + row)
    most = tl.load(offered + row) if OFFERED else tl.full([], MOST_OFFERED, tl.int64)
    tl.store(commits_log + row * forwards + forward, committed)
    tl.store(offered_log + row * forwards + forward, tl.where(accepted > 0, most, 0))
    tl.store(accepted_log + row * forwards + forward, accepted)
    tl.store(made + row, tl.minimum(forward + 1, forwards - 1))
    if DEPTH > 0:
        depth = tl.arange(0, DEPTH_PADDED)
        inside = depth < DEPTH
        tl.store(source + row * DEPTH + depth, start + tl.load(path + row * DEPTH + depth, mask=inside), mask=inside)
        tl.store(target + row * DEPTH + depth, start + depth, mask=inside)
    if CURSORS:
        following = after // BLOCK * BLOCK
        tl.store(base + row, following)
        tl.store(cached + row, tl.minimum(start + tl.load(kept + row), tl.minimum(after, following) - 1))


def write(
    rows: Rows, commit: Commit, window: Window, ends: Tensor, log: CommitLog, block: int, *, own_cursors: bool = False
) -> tuple[Tensor, ...]:
    """Commit in place; return which slots of the cache to move; see `step.write`."""
    tokens, path = commit.tokens.contiguous(), None if commit.path is None else commit.path.contiguous()
    depth = 0 if path is None else path.shape[1]
    offered = None if commit.offered is None else commit.offered.contiguous()
    done, endless = rows.done.view(torch.uint8), rows.endless.view(torch.uint8)
    moved = () if path is None else (torch.empty_like(path), torch.empty_like(path))
    _write[(len(tokens),)](
        (tokens, commit.count.contiguous(), commit.kept.contiguous(), path, offered),
        (rows.tokens, rows.known, rows.base, rows.cached, rows.limit, done, endless),
        ends.view(torch.uint8),
        (log.forwards, log.commits, log.offered, log.accepted),
        moved or (None, None),
        rows.tokens.shape[1],
        log.commits.shape[1],
        MOST_OFFERED=window.commits - 1,
        BLOCK=block,
        TOKENS=tokens.shape[1],
        PADDED=triton.next_power_of_2(tokens.shape[1]),
        DEPTH=depth,
        DEPTH_PADDED=triton.next_power_of_2(max(depth, 1)),
        OFFERED=offered is not None,
        CURSORS=not own_cursors,
        num_warps=1,
    )
    return moved

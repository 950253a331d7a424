"""Prefill: refuse prompts that do not fit; feed the prompts of new requests into every KV cache, in chunks.

R = rows, W = positions fed.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mtbench.decoding.method import Method, ModelRunners, Rows
from mtbench.decoding.request import Request, refuse_unknown_ids
from mtbench.errors import UserError
from mtbench.models.attention import KERNEL_POSITIONS, AttentionMetadata
from mtbench.models.runner import ModelRunner

PREFILL_POSITIONS = 2048  # positions fed at once over all rows; limits the memory of mask and scores
PREFILL_WIDTH = 64  # minimum positions of a row fed at once
CAPTURED_WIDTHS = (16, 32, 64, 128, 256, 512)  # positions of a row in a captured chunk, padding included
CAPTURED_WORK = 4e12  # most positions × parameters of one: 30 layers are launched in 30 ms, and an H100 computes for 10
# Widths of chunks that are fed before the first request where no graph can be captured: the end of a prompt takes the
# attention kernels in other variants than a step. A run's blocks before its timed ones decode the others; a server's
# requests need every width that has kernels of its own.
WIDTHS_OF_A_RUN = (2,)
WIDTHS_OF_A_SERVER = (*(1 << power for power in range(7)), KERNEL_POSITIONS + 2)


def refuse_unfit(method: Method, runners: ModelRunners, requests: Sequence[Request], slots: int) -> None:
    """Raise UserError for a prompt too short for a block, or one with too many tokens or unknown ones."""
    lengths = [len(request.prompt_ids) for request in requests]
    shortest, longest = min(lengths), max(lengths)
    block = method.variants[-1].block
    if shortest < block:
        raise UserError(
            f"{method.name} needs prompts of at least one block, here {block} tokens, and one has {shortest}; "
            "lengthen it, or decode it by another method. See `mtbench ls methods`."
        )
    for role, runner in runners.items():
        refuse_unknown_ids(requests, runner.vocabulary, role)
        if slots > runner.checkpoint.max_positions:
            new = max(request.max_new_tokens for request in requests)
            raise UserError(
                f"a prompt of {longest} tokens and {new} new ones, in rows of {slots} positions, do not fit the "
                f"context of the {role!r} checkpoint ({runner.checkpoint.max_positions}); lower `--max-new-tokens`."
            )


def prefill(
    rows: Rows, runners: ModelRunners, method: Method, at: Tensor, feed: Callable[[ModelRunner, Tensor, int], None]
) -> None:
    """Feed the prompts of the rows `at`, ascending, in chunks, each by `feed(runner, parts, block)`.

    `parts` (3, R), on the host: rows of the cache, the first slot that is fed of each, and that behind the last. The
    target caches final tokens (`rows.cached`), other runners all tokens but the last ones (`ModelRunner.behind`). The
    target comes first, because draft models may read its features.
    """
    finals = [
        rows.cached[at] if runner is runners.target else (rows.known[at] - runner.behind).clamp(min=0)
        for runner in runners.values()
    ]
    numbers, *by_runner = torch.stack((at, *finals)).cpu()
    for runner, cached in zip(runners.values(), by_runner, strict=True):
        length, block = int(cached.max()), method.block if runner is runners.target else 1
        for begin, end in chunks((length - cached).tolist(), length, block):
            parts = torch.stack((numbers, (cached + begin - length).clamp(min=0), cached + end - length))
            feed(runner, parts[:, parts[2] > 0], block)


def feed_chunk(runner: ModelRunner, tokens: Tensor, parts: Tensor, width: int, view: int, block: int) -> None:
    """Feed `parts` (3, R) of prompts, right-aligned in `width` positions; a shorter one repeats its first slot.

    `tokens` (R, S): of these rows.
    """
    row, begin, end = parts
    slots = torch.maximum(end[:, None] + torch.arange(-width, 0, device=end.device), begin[:, None])
    some = None if len(row) == runner.cache.rows else row
    runner.feed(tokens, AttentionMetadata(slots, slots, end, view, block=block, rows=some))


def width_of(parts: Tensor) -> int:
    """Return how many positions the longest of `parts` (3, R), on the host, has."""
    return int((parts[2] - parts[1]).max())


def chunks(starts: Sequence[int], length: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of columns; row r has tokens from column `starts[r]` up to `length`. A chunk feeds rows that began.

    A row that begins at least PREFILL_WIDTH columns later ends the chunk, so that short prompts are not padded to the
    longest one. `starts` and `length` are multiples of `block`, and so are the ranges.
    """
    begin = 0
    while begin < length:
        soon = begin + PREFILL_WIDTH
        later = min((start for start in starts if start >= soon), default=length)
        end = min(begin + widest(sum(start < soon for start in starts), block), later, length)
        yield begin, end
        begin = end


def widest(rows: int, block: int) -> int:
    """Return the most positions of each row that a chunk feeds to so many rows."""
    return -(-max(PREFILL_WIDTH, PREFILL_POSITIONS // rows) // block) * block


def captured_widths(runner: ModelRunner, rows: int, view: int, block: int) -> list[int]:
    """Return the widths in which a chunk of so many rows is captured, the widest first: the others fit its memory."""
    if runner.feed_reads:
        return []
    most = min(2 * view - 1, widest(rows, block), CAPTURED_WORK / (rows * runner.parameters))
    return [width for width in reversed(CAPTURED_WIDTHS) if width <= most]

"""Prefill: refuse prompts that do not fit; feed the prompts of new requests into every KV cache, in chunks.

R = rows, W = positions fed.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtbench.decoding.method import Method, ModelRunners, Rows
from mtbench.decoding.request import Request, refuse_unknown_ids
from mtbench.errors import UserError
from mtbench.models.attention import ALIGNED, KERNEL_POSITIONS, AttentionMetadata

PREFILL_POSITIONS = 2048  # positions fed at once over all rows; limits the memory of mask and scores
PREFILL_WIDTH = 64  # minimum positions of a row fed at once
# Widths of chunks that are fed before a batch is captured. A run's blocks before its timed ones decode the others; a
# server's requests need every width that has kernels of its own.
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


def prefill(rows: Rows, runners: ModelRunners, method: Method, at: Tensor, arange: Tensor) -> None:
    """Feed the prompts of the rows `at`, right-aligned, in chunks.

    The target caches final tokens (`rows.cached`), other runners all tokens but the last ones (`ModelRunner.behind`).
    The target comes first, because draft models may read its features. `arange`: 0 … S−1.
    """
    for runner in runners.values():
        if runner is runners.target:
            cached, block = rows.cached[at], method.block
        else:
            cached, block = (rows.known[at] - runner.behind).clamp(min=0), 1
        length = int(cached.max())
        slots = cached[:, None] + arange[:length] - length
        for begin, end in chunks((length - cached).tolist(), length, block):
            begun = cached + end > length
            fed, chunk = at[begun], slots[begun, begin:end].clamp(min=0)  # before a prompt, slot 0 is repeated
            some = None if len(fed) == len(rows.done) else fed
            view = -(-end // ALIGNED) * ALIGNED
            metadata = AttentionMetadata(chunk, chunk, rows.base[fed], view, block=block, rows=some)
            runner.feed(rows.tokens[fed], metadata)


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


def warm_up(
    rows: Rows, runners: ModelRunners, method: Method, arange: Tensor, widths: Sequence[int] = WIDTHS_OF_A_RUN
) -> None:
    """Feed chunks of these widths to all rows and to one, with few and with all slots in view.

    It overwrites the first slots. The end of a prompt is a short chunk. It takes the attention kernels in other
    variants than a decode step, which a GPU would otherwise compile in whichever batch has the first.
    """
    for runner in runners.values():
        for count in {len(rows.done), 1}:
            for width in sorted({min(width, widest(count, method.block), len(arange) - 1) for width in widths}):
                for view in {-(-width // ALIGNED) * ALIGNED, len(arange)}:
                    chunk = arange[:width].expand(count, -1)
                    some = None if count == len(rows.done) else torch.zeros_like(rows.base[:1])
                    end = chunk[:, -1] + 1
                    metadata = AttentionMetadata(chunk, chunk, end, view, block=method.block, rows=some)
                    runner.feed(rows.tokens[:count], metadata)

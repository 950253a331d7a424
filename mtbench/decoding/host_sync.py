"""Data between host and device while a batch is decoded: the host sets step shapes and reads snapshots of cursors.

On a CPU a snapshot is read at once; on a GPU it is copied asynchronously, and the host waits for it some steps later.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class HostSnapshot(NamedTuple):
    """Cursors that the host read between two steps, by row."""

    base: list[int]
    cached: list[int]
    known: list[int]
    done: list[int]
    widths: list[list[int]]  # variant that suits each row, the latest choice first; empty with one variant
    tokens: list[list[int]] | None  # those asked for (`RunState.reads`)


class Shape(NamedTuple):
    """The shape of a step. A captured graph serves one shape."""

    variant: int
    pending: int  # P
    view: int  # slots in view
    drawn: bool = False  # rows have temperatures of their own, and some are above 0


class AsyncCopy:
    """A copy of cursors and tokens to the host."""

    def __init__(self, cursors: Tensor, tokens: Tensor | None, *, wait: bool) -> None:
        self.cursors, self.tokens, self.arrived = cursors, tokens, None
        if wait:
            return
        self.cursors = self._send(cursors)
        self.tokens = None if tokens is None else self._send(tokens)
        if cursors.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def get(self) -> HostSnapshot:
        """Wait for the copy and return it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        base, cached, known, done, *widths = self.cursors.tolist()
        tokens = None if self.tokens is None else self.tokens.tolist()
        return HostSnapshot(base, cached, known, done, widths, tokens)

    @staticmethod
    def _send(tensor: Tensor) -> Tensor:
        """Return a copy that later steps do not overwrite; it is complete when the event after it has passed."""
        if not tensor.is_cuda:
            return tensor.clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

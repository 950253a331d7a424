"""Data between host and device while a batch is decoded: the host sets step shapes and reads snapshots of cursors.

On a CPU a snapshot is read at once; on a GPU it is copied asynchronously, and the host waits for it some steps later.
The commits of every forward are logged on the device, and read with the answer.

R = rows.
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
    tokens: list[list[int]] | None  # those of `RunState.reads`


class Shape(NamedTuple):
    """The shape of a step. A captured graph serves one shape."""

    variant: int
    pending: int  # P
    view: int  # slots in view
    drawn: bool = False  # rows have temperatures of their own, and some are above 0
    filtered: bool = False  # some of these have filters


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


class Counts(NamedTuple):
    """Tokens of one request, by forward."""

    commits: list[int]
    offered: list[int]  # tokens beyond the first that could have been committed
    accepted: list[int]  # tokens accepted, before the cut at the end token or at the budget, as papers count them


class CommitLog:
    """Counts by row and by forward of the request in that row. All tensors keep their memory address."""

    def __init__(self, rows: int, forwards: int, device: torch.device) -> None:
        """`forwards`: the maximum that one request may take, waiting included."""
        self.forwards = torch.zeros(rows, dtype=torch.long, device=device)
        self.commits = torch.zeros(rows, forwards, dtype=torch.long, device=device)
        self.offered = torch.zeros_like(self.commits)
        self.accepted = torch.zeros_like(self.commits)

    def begin(self, at: Tensor) -> None:
        """Restart the rows `at`, which have new requests."""
        self.forwards[at] = 0

    def record(self, count: Tensor, offered: Tensor, accepted: Tensor) -> None:
        """Log one forward; each (R,)."""
        self.commits.scatter_(1, self.forwards[:, None], count[:, None])
        self.offered.scatter_(1, self.forwards[:, None], offered[:, None])
        self.accepted.scatter_(1, self.forwards[:, None], accepted[:, None])
        self.forwards.add_(1).clamp_(max=self.commits.shape[1] - 1)  # rows without a request go on

    def read(self, at: Tensor, steps: int) -> list[Counts]:
        """Return the counts of the rows `at`, for up to `steps` forwards."""
        logs = (self.commits, self.offered, self.accepted)
        by_row = torch.stack([log[at, :steps] for log in logs], 1).tolist()
        return [Counts(*counts) for counts in by_row]

"""What every forward committed, offered and accepted, per row, in tensors that a captured step can write.

R = rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Counts(NamedTuple):
    """Tokens of one request, by forward."""

    commits: list[int]
    offered: list[int]  # tokens beyond the first that could have been committed
    accepted: list[int]  # tokens accepted, before the cut at the end token or at the budget, as papers count them


class CommitLog:
    """Counts by row and by forward of the request in that row. All tensors keep their memory address."""

    def __init__(self, rows: int, forwards: int, device: torch.device) -> None:
        """`forwards`: the maximum that one request may take, waiting included."""
        self._forwards = torch.zeros(rows, dtype=torch.long, device=device)
        self._commits = torch.zeros(rows, forwards, dtype=torch.long, device=device)
        self._offered = torch.zeros_like(self._commits)
        self._accepted = torch.zeros_like(self._commits)

    def begin(self, at: Tensor) -> None:
        """Restart the rows `at`, which have new requests."""
        self._forwards[at] = 0

    def record(self, count: Tensor, offered: Tensor, accepted: Tensor) -> None:
        """Log one forward; each (R,)."""
        self._commits.scatter_(1, self._forwards[:, None], count[:, None])
        self._offered.scatter_(1, self._forwards[:, None], offered[:, None])
        self._accepted.scatter_(1, self._forwards[:, None], accepted[:, None])
        self._forwards.add_(1).clamp_(max=self._commits.shape[1] - 1)  # rows without a request go on

    def read(self, at: Tensor, steps: int) -> list[Counts]:
        """Return the counts of the rows `at`, for up to `steps` forwards."""
        logs = (self._commits, self._offered, self._accepted)
        by_row = torch.stack([log[at, :steps] for log in logs], 1).tolist()
        return [Counts(*counts) for counts in by_row]

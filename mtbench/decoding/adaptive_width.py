"""Which of a method's widths the next step takes: the one that promises the most tokens for what it costs.

How much a window will commit is told by what was lately accepted (Leviathan et al., arXiv 2211.17192, section 3); what
it costs, by the positions it feeds and by the forwards of other lanes. Positions whose arithmetic takes as long as
reading the weights are `EVEN`: a GPU does both at once, so fewer come for free; a CPU does one after the other.

R = rows.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtbench.decoding.method import Window
from mtbench.models import sampling
from mtbench.models.runner import ModelRunner

RECENT = 8  # forwards: how far back a row remembers
EXPECTED = 0.7  # share of guesses accepted, before a row has seen any
EVEN = {"cuda": 184, "cpu": 24}  # an H200 in bfloat16; a small model on a core


class Widths:
    """What each row's guesses were lately worth, and so which window it wants; in place, for a step to be captured."""

    def __init__(self, windows: Sequence[Window], pending: int | None, rows: int, device: torch.device) -> None:
        """`pending`: positions that every window feeds, if they all feed as many; None: as few as serve."""
        self.many = len(windows) > 1
        self.commits = torch.tensor([w.commits for w in windows], dtype=torch.float32, device=device)
        self.fed = torch.tensor([rows * ((pending or w.pending or 1) + w.guesses) for w in windows], device=device)
        self.drafts = torch.tensor([w.drafts for w in windows], dtype=torch.float32, device=device)
        self.cost = torch.ones_like(self.commits)
        self.accepted = torch.zeros(rows, device=device)  # lately: guesses, of those tried, up to the first refused
        self.tried = torch.zeros(rows, device=device)
        self.none = torch.zeros(rows, dtype=torch.long, device=device)

    def set_costs(self, target: ModelRunner, others: Mapping[str, ModelRunner]) -> None:
        """Say what each window costs beside a forward of a single position, with drafts by these lanes."""
        if not self.many:
            return
        share = self.fed / EVEN[target.device.type]
        size = target.model.num_parameters()
        draft = max(
            (runner.model.num_parameters() / size for runner in others.values() if runner is not target), default=0
        )
        forward = share.clamp(min=1) if target.device.type == "cuda" else 1 + share
        self.cost.copy_(forward + draft * self.drafts)

    def begin(self, at: Tensor) -> None:
        """New requests sit in the rows `at`."""
        self.accepted[at], self.tried[at] = EXPECTED, 1.0

    def update(self, count: Tensor, offered: Tensor) -> None:
        """A forward could commit 1 + `offered` tokens of each row, and would have committed `count`."""
        if self.many:
            accepted = (count - 1).clamp(min=0)
            self.accepted.mul_(1 - 1 / RECENT).add_(accepted)
            self.tried.mul_(1 - 1 / RECENT).add_(torch.minimum(accepted + 1, offered))

    def best(self) -> Tensor:
        """The window that suits each row, by its number, (R,)."""
        if not self.many:
            return self.none
        return sampling.best_width(self.accepted / self.tried.clamp(min=1e-6), self.commits, self.cost)

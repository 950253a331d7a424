"""Choose the width of the next step: the one with the most expected tokens per cost.

Expected tokens follow from recent acceptance (Leviathan et al., arXiv 2211.17192, section 3). The cost follows from
the positions fed and the forwards of draft models. At `RIDGE_POSITIONS` positions arithmetic takes as long as reading
the weights. A GPU overlaps the two, so up to as many positions cost nothing extra. A CPU does one after the other.

A step uses the choice of `lag` steps before: on a GPU the host, which launches the width, knows no later one. The
device keeps the choices in between, so that a row's own width never waits for the host or depends on its neighbours.

R = rows.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import Window
from mtbench.models.runner import ModelRunner

RECENT = 8  # time constant of the moving average, in forwards
EXPECTED = 0.7  # acceptance assumed for a new request
# Of an H200 in bfloat16, until the GPU is probed; of a small model on one core.
RIDGE_POSITIONS = {"cuda": 184.0, "cpu": 24.0}


def set_ridge(device: str, positions: float) -> None:
    """Set the ridge of a device, as measured. It is rounded, so that two measurements choose alike."""
    RIDGE_POSITIONS[device] = 8.0 * max(1, round(positions / 8))


class Widths:
    """Recent acceptance of each row and its best window. Tensors keep their address, so that a graph can use them."""

    def __init__(
        self, windows: Sequence[Window], pending: int | None, rows: int, device: torch.device, lag: int = 0
    ) -> None:
        """`pending`: pending positions that every window feeds; None: only those needed."""
        self.many = len(windows) > 1
        self.commits = torch.tensor([w.commits for w in windows], dtype=torch.float32, device=device)
        self.fed = torch.tensor([rows * ((pending or w.pending or 1) + w.guesses) for w in windows], device=device)
        self.drafts = torch.tensor([w.drafts for w in windows], dtype=torch.float32, device=device)
        self.cost = torch.ones_like(self.commits)
        self.accepted = torch.zeros(rows, device=device)  # moving sum of accepted guesses
        self.tried = torch.zeros(rows, device=device)  # moving sum of guesses verified, up to the first rejected
        self.choices = torch.zeros(lag + 1, rows, dtype=torch.long, device=device)  # the latest first

    def set_costs(self, target: ModelRunner, others: Mapping[str, ModelRunner]) -> None:
        """Set each window's cost relative to a forward of one position. `others`: all runners, by role."""
        if not self.many:
            return
        share = self.fed / RIDGE_POSITIONS[target.device.type]
        size = target.model.num_parameters()
        drafting = [runner for runner in others.values() if runner is not target]
        draft = max((runner.model.num_parameters() / size for runner in drafting), default=0)
        drafts = self.drafts.clamp(max=1) if any(runner.parallel for runner in drafting) else self.drafts
        forward = share.clamp(min=1) if target.device.type == "cuda" else 1 + share
        self.cost.copy_(forward + draft * drafts)

    def begin(self, at: Tensor) -> None:
        """Reset the rows `at`, which have new requests."""
        self.accepted[at], self.tried[at] = EXPECTED, 1.0
        if self.many:
            self.choices[:, at] = self.best()[at]

    @property
    def own(self) -> Tensor:
        """The window of each row in the next step, (R,)."""
        return self.choices[-1]

    def update(self, count: Tensor, offered: Tensor) -> None:
        """Count a forward that could commit 1 + `offered` tokens per row and accepted `count`, both (R,)."""
        if self.many:
            accepted = (count - 1).clamp(min=0)
            self.accepted.mul_(1 - 1 / RECENT).add_(accepted)
            self.tried.mul_(1 - 1 / RECENT).add_(torch.minimum(accepted + 1, offered))
            self.choices.copy_(torch.cat((self.best()[None], self.choices[:-1])))

    def best(self) -> Tensor:
        """Return the index of each row's best window by what was accepted so far, (R,)."""
        return sampling.best_width(self.accepted / self.tried.clamp(min=1e-6), self.commits, self.cost)

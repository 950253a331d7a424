"""The heads of Medusa-1 (arXiv 2401.10774, section 2.1.1): what training fits and decoding reads.

n = hidden states, H = hidden size, V = vocabulary.
"""

import torch
from torch import Tensor


class ResidualHead(torch.nn.Module):
    """One head of Medusa-1: x + silu(Wx), then a matrix of its own; it begins as the target's head."""

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(head.shape[1], head.shape[1], dtype=head.dtype, device=head.device)
        torch.nn.init.zeros_(self.hidden.weight)
        torch.nn.init.zeros_(self.hidden.bias)
        self.head = torch.nn.Parameter(head.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """(n, H) to (n, H)."""
        return hidden + torch.nn.functional.silu(self.hidden(hidden))

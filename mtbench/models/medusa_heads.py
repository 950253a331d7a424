"""The prediction heads of Medusa-1 (arXiv 2401.10774, section 2.1.1). Training fits them, decoding runs them.

n = positions, C = hidden size, V = vocabulary.
"""

import torch
from torch import Tensor


class ResidualHead(torch.nn.Module):
    """One head of Medusa-1: a residual block x + silu(Wx + b) and a projection `head` (V, C).

    W and b start at zero and `head` as a copy of the target's LM head, so it starts with the target's logits.
    """

    def __init__(self, head: Tensor) -> None:
        super().__init__()
        self.hidden = torch.nn.Linear(head.shape[1], head.shape[1], dtype=head.dtype, device=head.device)
        torch.nn.init.zeros_(self.hidden.weight)
        torch.nn.init.zeros_(self.hidden.bias)
        self.head = torch.nn.Parameter(head.detach().clone())

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the residual block's output, (n, C) to (n, C); the caller applies `head`."""
        return hidden + torch.nn.functional.silu(self.hidden(hidden))

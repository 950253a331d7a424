"""Where the last tokens of a text occurred earlier in it. Methods that copy drafts from the text use it.

R = rows, S = slots.
"""

import torch
from torch import Tensor

from mtbench.decoding.method import Rows


def suffix_matches(rows: Rows, longest: int) -> Tensor:
    """Return the length of the text's suffix that ends at each position, (R, S), at most `longest`.

    0 at the text's own end and behind it.
    """
    tokens, last = rows.tokens, rows.known[:, None] - 1
    place = torch.arange(tokens.shape[1], device=tokens.device)
    same, matched = place < last, torch.zeros_like(tokens)
    for back in range(longest):
        token = tokens.gather(1, (last - back).clamp(min=0))
        same = same & (tokens.roll(back, 1) == token) & (place >= back)
        matched += same
    return matched

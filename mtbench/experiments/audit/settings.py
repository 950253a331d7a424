"""Settings of decoding that change which token is chosen, as functions of the logits.

n = tokens, V = vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Of logits (n, V), and how often each id was there before each token: in prompt and answer, and in the answer, (n, V).
Setting = Callable[[Tensor, Tensor, Tensor], Tensor]


def _repetition(by: float) -> Setting:
    """Return the repetition penalty of transformers and vLLM (Keskar et al., arXiv 1909.05858)."""
    return lambda logits, before, _: torch.where(before > 0, torch.where(logits > 0, logits / by, logits * by), logits)


def _presence(by: float) -> Setting:
    return lambda logits, _, counts: logits - by * (counts > 0)


def _frequency(by: float) -> Setting:
    return lambda logits, _, counts: logits - by * counts


def rounded(kind: torch.dtype) -> Setting:
    """Return logits in a coarser type, where the first of equal ones is chosen: it is raised above the others."""

    def coarsen(logits: Tensor, *_: Tensor) -> Tensor:
        coarse = logits.to(kind).to(logits.dtype)
        return coarse.scatter_add(-1, coarse.argmax(-1, keepdim=True), torch.ones_like(coarse[:, :1]))

    return coarsen


def without(ids: Sequence[int]) -> Setting:
    """Return logits with which some ids are never chosen."""
    return lambda logits, *_: logits.index_fill(-1, torch.tensor(ids, device=logits.device), float("-inf"))


PENALTIES: dict[str, tuple[Callable[[float], Setting], Sequence[float]]] = {
    "repetition_penalty": (_repetition, (1.02, 1.05, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0)),
    "presence_penalty": (_presence, (0.1, 0.5, 1.0, 1.5, 2.0)),
    "frequency_penalty": (_frequency, (0.1, 0.5, 1.0, 1.5, 2.0)),
}

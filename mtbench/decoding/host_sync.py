"""What passes between host and device while a batch is decoded: requests go in, looks come out, steps have shapes.

On a CPU a look is there at once; on a GPU it is a copy on its way, waited for some steps later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Requests:
    """What is to be decoded: per request a prompt, the most new tokens, and its stop strings."""

    prompts: Sequence[Sequence[int]]
    budgets: Sequence[int]
    stop: Sequence[Sequence[str]]
    fixed_length: bool  # end tokens and stop strings are ignored
    seeds: Sequence[int]  # of each request's dice
    temperature: float  # 0: greedy

    @property
    def slots(self) -> int:
        """Positions that the longest may take."""
        return max(len(p) + b for p, b in zip(self.prompts, self.budgets, strict=True))


class HostSnapshot(NamedTuple):
    """What the host saw between two steps, by row."""

    base: list[int]
    cached: list[int]
    known: list[int]
    done: list[int]
    wanted: list[int]  # which of the variants
    tokens: list[list[int]] | None  # read where stop strings are due


class Shape(NamedTuple):
    """Of a step; what is captured is captured for one."""

    variant: int
    pending: int  # P
    view: int  # slots in view


class Answer(NamedTuple):
    """What a row said before it was collected."""

    token_ids: list[int]
    commits: list[int]
    offered: list[int]
    accepted: list[int]
    began: int  # steps made before it


class AsyncCopy:
    """Cursors and tokens on their way to the host."""

    def __init__(self, cursors: Tensor, tokens: Tensor | None, *, wait: bool) -> None:
        self.cursors, self.tokens, self.arrived = cursors, tokens, None
        if wait:
            return
        self.cursors = self._send(cursors)
        self.tokens = None if tokens is None else self._send(tokens)
        if cursors.is_cuda:
            self.arrived = torch.cuda.Event()
            self.arrived.record()

    def get(self) -> tuple[list[list[int]], list[list[int]] | None]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.cursors.tolist(), None if self.tokens is None else self.tokens.tolist()

    @staticmethod
    def _send(tensor: Tensor) -> Tensor:
        """A copy that later steps leave alone, on the host once the event behind it has passed."""
        if not tensor.is_cuda:
            return tensor.clone()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)

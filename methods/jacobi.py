"""Jacobi decoding: guess many positions at once, from the last forward's predictions for them.

Santilli et al.: "Accelerating Transformer Inference for Translation via Parallel Decoding", ACL 2023, arXiv 2305.10427,
section 3. Greedy decoding is a triangular system of equations. It is iterated in parallel from arbitrary tokens, here
random ones. Every forward makes at least one more position final, and the fixed point is the greedy text. With `ahead`
as large as the budget this is the paper's first algorithm and the baseline of MARS, arXiv 2604.07023, table 9; with
fewer positions it is a sliding window. In sampling each position has one fixed random number, and the fixed point is
the sampled text.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.options import option


@METHODS.register("jacobi")
@dataclass(frozen=True, kw_only=True)
class Jacobi(Method):
    """The last forward's predictions are the next one's guesses."""

    ahead: int = option(8, "N: positions guessed; the paper guesses as many as the budget", low=1)

    title = "Jacobi"
    roles = ("ar",)
    claims = "lossless"
    choices = ("jacobi:ahead=4|8",)

    def window(self) -> Window:
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`iterate` (R, S): the guess at every position; random at first."""
        place = torch.arange(rows.tokens.shape[1], device=rows.tokens.device)
        random = sampling.uniform(rows.seed[:, None], place)
        return {"iterate": (random * runners.target.checkpoint.vocabulary).long()}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        places = rows.known[:, None] + torch.arange(self.ahead, device=rows.known.device)
        return state["iterate"].gather(1, places)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        accepted = sampling.prefix_length(output.agrees(output.guess))
        state["iterate"].scatter_(1, output.position, output.choice)
        return Commit(output.choice, accepted + 1, kept=accepted)

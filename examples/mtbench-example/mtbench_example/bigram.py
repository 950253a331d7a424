"""Bigram drafting: each next token is guessed to be what followed the same token last time, in prompt or answer.

The simplest drafter that copies from its context (as Yang et al., "Inference with Reference: Lossless Acceleration of
Large Language Models", arXiv 2304.04487, with one token to match instead of several). It needs no second model; the
model's own choice decides what is taken, so the tokens are those of `ar`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import METHODS, NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window, option
from mtbench.models import sampling


@METHODS.register("bigram")
@dataclass(frozen=True, kw_only=True)
class Bigram(Method):
    """K drafts, each what followed the token before it when that stood there last."""

    drafts: int = option(4, "K: tokens guessed ahead", low=1, high=64)

    roles = ("ar",)
    claims = "lossless"
    default_arms = ("bigram",)

    def window(self) -> Window:
        return Window(pending=1, guesses=self.drafts, commits=self.drafts + 1)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        words = runners.target.checkpoint.vocabulary
        return {
            "place": torch.zeros(len(rows.known), words, dtype=torch.long, device=rows.known.device),
            "offered": torch.zeros_like(rows.known),
        }

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        """(R, K). `place` (R, V) is where each token stood last, with another behind it, counted from 1; 0: nowhere."""
        slot = torch.arange(1, rows.tokens.shape[1] + 1, device=rows.tokens.device)
        followed = torch.where(slot < rows.known[:, None], slot, 0)
        place = state["place"].zero_().scatter_reduce_(1, rows.tokens, followed, "amax")
        token = rows.tokens.gather(1, rows.known[:, None] - 1)
        drafts, seen = [], []
        for _ in range(self.drafts):
            behind = place.gather(1, token)
            token = rows.tokens.gather(1, behind)
            drafts.append(token)
            seen.append(behind > 0)
        state["offered"].copy_(sampling.prefix_length(torch.cat(seen, 1)))
        return torch.cat(drafts, 1)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        """The drafts that the model would have chosen itself, and its own choice behind them."""
        column = torch.arange(self.drafts, device=rows.known.device)
        agreed = sampling.prefix_length(
            output.agrees(output.guess.masked_fill(column >= state["offered"][:, None], NONE))
        )
        return Commit(output.choice, count=agreed + 1, kept=agreed, offered=state["offered"])

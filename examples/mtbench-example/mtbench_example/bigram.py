"""Bigram drafting: each draft is the token that followed the latest occurrence of the token before it.

The simplest drafter that copies from its context, prompt and answer (as Yang et al., "Inference with Reference:
Lossless Acceleration of Large Language Models", arXiv 2304.04487, but matching one token instead of several). It needs
no second model. Only drafts that equal the model's own choice are accepted, so the tokens are those of `ar`.

R = rows, K = drafts, V = vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import METHODS, NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window, option, sampling


@METHODS.register("bigram")
@dataclass(frozen=True, kw_only=True)
class Bigram(Method):
    """K drafts, each copied from the latest occurrence of the token before it."""

    drafts: int = option(4, "K: drafts per forward", low=1, high=64)

    roles = ("ar",)
    claims = "lossless"
    default_arms = ("bigram",)

    def window(self) -> Window:
        return Window(pending=1, guesses=self.drafts, commits=self.drafts + 1)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        vocabulary = runners.target.checkpoint.vocabulary
        return {
            "place": torch.zeros(len(rows.known), vocabulary, dtype=torch.long, device=rows.known.device),
            "offered": torch.zeros_like(rows.known),
        }

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        """Drafts, (R, K). `place` (R, V): the slot after each token's latest occurrence; 0: it does not occur."""
        slot = torch.arange(1, rows.tokens.shape[1] + 1, device=rows.tokens.device)
        followed = torch.where(slot < rows.known[:, None], slot, 0)
        place = state["place"].zero_().scatter_reduce_(1, rows.tokens, followed, "amax")
        token = rows.tokens.gather(1, rows.known[:, None] - 1)
        drafts, occurs = [], []
        for _ in range(self.drafts):
            behind = place.gather(1, token)
            token = rows.tokens.gather(1, behind)
            drafts.append(token)
            occurs.append(behind > 0)
        state["offered"].copy_(sampling.prefix_length(torch.cat(occurs, 1)))
        return torch.cat(drafts, 1)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        """Accept the drafts that the model would have chosen itself, and its own choice after them."""
        column = torch.arange(self.drafts, device=rows.known.device)
        drafts = output.guess.masked_fill(column >= state["offered"][:, None], NONE)
        accepted = sampling.prefix_length(output.agrees(drafts))
        return Commit(output.choice, count=accepted + 1, kept=accepted, offered=state["offered"])

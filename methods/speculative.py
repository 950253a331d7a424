"""Speculative decoding: a small model drafts a few tokens, the target verifies all of them in one forward.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192;
Chen et al.: "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318.
The leading drafts that equal the target's own choice are accepted, and one token after them. In sampling, draft and
target share one random number per request and position (`Rows.choose`), so the tokens are those of sampled `ar`. The
papers' rejection sampling accepts a draft with probability min(1, p/q): other tokens with the same distribution.

With `per_forward` above 1 a MARS model must draft; it drafts several tokens in a forward (arXiv 2604.07023, 4.6).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtbench.decoding.draft_model import draft, forwards, refuse_draft
from mtbench.decoding.method import Claims, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.models import sampling
from mtbench.models.loading import Inspected
from mtbench.options import option


@METHODS.register("speculative")
@dataclass(frozen=True, kw_only=True)
class Speculative(Method):
    """A second model drafts; the target accepts the drafts that it would have chosen itself."""

    ahead: int = option(4, "K: tokens drafted for each forward", low=1, widths=(1, 2, 4, 8))
    draft: str = option("draft", "role of the checkpoint that drafts", role=True)
    per_forward: int = option(1, "drafts per forward of the draft model; above 1 it must be a MARS model", low=1)
    verify: Literal["match", "rejection"] = option("match", "accept the target's choice, or use rejection sampling")

    roles = ("ar",)

    @property
    def claims(self) -> Claims:
        return "lossless" if self.verify == "match" else "distribution"

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        refuse_draft(checkpoints, self.draft, self.per_forward)

    def window(self) -> Window:
        drafts = forwards(self.ahead, self.per_forward)
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1, drafts=drafts)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`cached` (R,): the draft model's cursor; for rejection, `offered` (R, K, V): the drafts' distributions."""
        state = {"cached": rows.known - 1}
        if self.verify == "rejection":
            shape = (len(rows.known), self.ahead, runners.target.checkpoint.vocabulary)
            state["offered"] = torch.zeros(shape, dtype=torch.double, device=rows.known.device)
        return state

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        tokens, logits = draft(runners, self.draft, rows, state["cached"], self.ahead, self.per_forward)
        if self.verify == "rejection":
            state["offered"][:, : self.ahead, : logits.shape[2]] = rows.distribution(logits)
        return tokens

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        if self.verify == "match":
            tokens, accepted = output.choice, sampling.prefix_length(output.agrees(output.guess))
        else:
            draft_p, target_p = state["offered"][:, : self.ahead], rows.distribution(output.logits)
            tokens, accepted = sampling.rejection_sample(output.guess, draft_p, target_p, rows.seed, output.position)
        torch.minimum(state["cached"], rows.known + accepted, out=state["cached"])
        return Commit(tokens, accepted + 1, kept=accepted)

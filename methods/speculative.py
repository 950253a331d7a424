"""Speculative decoding: a small model drafts a few tokens, the target verifies all of them in one forward.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192;
Chen et al.: "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318.
The leading drafts that equal the target's own choice are accepted, and one token after them
(mtbench/decoding/verification.py); `verify=rejection` is the papers' rejection sampling.

With `per_forward` above 1 a MARS model must draft; it drafts several tokens in a forward (arXiv 2604.07023, 4.6).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding.draft_model import draft, forwards, refuse_draft
from mtbench.decoding.method import Commit, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.verification import VERIFY, VerifiedMethod, Verify
from mtbench.models.loading import Inspected
from mtbench.options import option


@METHODS.register("speculative")
@dataclass(frozen=True, kw_only=True)
class Speculative(VerifiedMethod):
    """A second model drafts; the target accepts the drafts that it would have chosen itself."""

    ahead: int = option(4, "K: tokens drafted for each forward", low=1, widths=(1, 2, 4, 8))
    draft: str = option("draft", "role of the checkpoint that drafts", role=True)
    per_forward: int = option(1, "drafts per forward of the draft model; above 1 it must be a MARS model", low=1)
    verify: Verify = option("match", VERIFY)

    title = "Speculative decoding"
    roles = ("ar",)
    choices = ("speculative:ahead=auto|2|4", "speculative:draft=draft_mars,per_forward=4")

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        refuse_draft(checkpoints, self.draft, self.per_forward)

    def window(self) -> Window:
        drafts = forwards(self.ahead, self.per_forward)
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1, drafts=drafts)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`cached` (R,): the draft model's cursor."""
        return {"cached": rows.known - 1, **super().start(rows, runners)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        tokens, logits = draft(runners, self.draft, rows, state["cached"], self.ahead, self.per_forward)
        self.keep_offer(state, rows, logits)
        return tokens

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        commit = super().accept(state, rows, output)
        torch.minimum(state["cached"], rows.known + commit.kept, out=state["cached"])
        return commit

"""Speculative decoding: a small model drafts a few tokens, the target verifies all of them in one forward.

Leviathan, Kalman, Matias: "Fast Inference from Transformers via Speculative Decoding", ICML 2023, arXiv 2211.17192;
Chen et al.: "Accelerating Large Language Model Decoding with Speculative Sampling", arXiv 2302.01318.
The leading drafts that equal the target's own choice are accepted, and one token after them
(mtbench/decoding/verification.py); `verify=rejection` is the papers' rejection sampling, `verify=block` accepts the
drafts jointly (Sun et al., arXiv 2403.10444).

With `per_forward` above 1 a model that was trained with mask tokens must draft; it drafts several tokens in a forward.
It is a MARS model (arXiv 2604.07023, 4.6), or PARD (An et al.: "PARD: Accelerating LLM Inference with Low-Cost PARallel
Draft Model Adaptation", arXiv 2504.18583). Both read the last token and masks under causal attention, so they have
one format: the config.json of PARD's released checkpoints names the mask token, as `pard_token`. Their training
differs. PARD predicts K tokens after every position, in K copies of the text, of which copy k keeps a share r^k of the
positions, and only those whose predecessor copy k-1 kept (conditional drop; r is 0.7, the share at least 0.2). The
objective `mars` cuts the text into blocks, and predicts each token from one distance; it drops nothing.

With `vocabulary=intersection` the draft may have other tokens (Timor et al., arXiv 2502.05202; how it reads the text:
mtbench/models/vocabularies.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from mtbench.decoding.draft_model import (
    PER_FORWARD,
    VOCABULARY,
    PerForward,
    Vocabulary,
    draft,
    forwards,
    refuse_draft,
)
from mtbench.decoding.method import ModelRunners, Rows, State, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.verification import CONFIDENCE, FILTER_DRAFT, VERIFY, VerifiedMethod, Verify
from mtbench.models.loading import Inspected
from mtbench.options import option


@METHODS.register("speculative")
@dataclass(frozen=True, kw_only=True)
class Speculative(VerifiedMethod):
    """A second model drafts; the target accepts the drafts that it would have chosen itself."""

    ahead: int = option(4, "K: tokens drafted for each forward", low=1, widths=(1, 2, 4, 8))
    draft: str = option("draft", "role of the checkpoint that drafts", role=True)
    per_forward: PerForward = option(1, PER_FORWARD, low=1)
    confidence: float = option(0.0, CONFIDENCE, low=0.0, high=1.0)
    vocabulary: Vocabulary = option("same", VOCABULARY)
    verify: Verify = option("match", VERIFY)
    filter_draft: bool = option(False, FILTER_DRAFT)

    title = "Speculative decoding"
    roles = ("ar",)
    choices = (
        "speculative:ahead=auto|2|4",
        "speculative:ahead=4|8,per_forward=all",
        "speculative:draft=draft_mars,per_forward=all",
        "speculative:vocabulary=intersection",
    )

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        refuse_draft(checkpoints, self.draft, self.per_forward, self.vocabulary)

    @property
    def translates(self) -> bool:
        return self.vocabulary == "intersection"

    def window(self) -> Window:
        drafts = forwards(self.ahead, self.per_forward)
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1, drafts=drafts)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`cached` (R,): the draft model's cursor."""
        cached = runners[self.draft].length(rows.tokens, rows.known - 1)
        return {"cached": cached, **super().start(rows, runners)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        drawing = self.drawing(rows)
        tokens, logits = draft(runners, self.draft, drawing, state["cached"], self.ahead, self.per_forward)
        self.keep_offer(state, rows, logits)
        return tokens

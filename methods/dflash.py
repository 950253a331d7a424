"""DFlash and DSpark: a draft on the target's hidden states predicts a block of tokens in one forward.

Chen, Liang, Liu: "DFlash: Block Diffusion for Flash Speculative Decoding", arXiv 2602.06036; DSpark: arXiv 2607.05147.
The block is the last decided token and masks; the draft reads it with the hidden states of the positions before it
(mtbench/models/drafts/dflash.py). DSpark chooses the tokens of the block one after the other, by a term of the logits
that depends on the token before: name it by `draft=dspark`. It may also tell the chance that a draft is accepted.

`confidence` shortens a row's drafts: the first whose chance is below it and those behind it are not offered. The shape
of a step is fixed, so the forward of the target feeds them all the same. A threshold therefore changes what is accepted
and counted, and saves no time here; an engine that packs rows would save it.

R = rows, K = drafts, V = vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding.block_drafting import draft_block, refuse_other_blocks
from mtbench.decoding.feature_drafting import first_entries
from mtbench.decoding.method import Commit, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.serving_engines import Setting, drafted, llama_cpp, sglang
from mtbench.decoding.verification import VERIFY, VerifiedMethod, Verify
from mtbench.models.loading import Inspected
from mtbench.options import option


@METHODS.register("dflash")
@dataclass(frozen=True, kw_only=True)
class DFlash(VerifiedMethod):
    """A draft on the target's hidden states predicts a block; the target accepts what it would have chosen itself."""

    ahead: int = option(7, "K: tokens drafted for each forward, at most what the draft's block predicts", low=1)
    draft: str = option("dflash", "role of the checkpoint that drafts", role=True)
    confidence: float = option(
        0.0, "least chance of acceptance of a draft that is offered, by the draft's confidence head", low=0.0, high=1.0
    )
    verify: Verify = option("match", VERIFY)

    title = "DFlash"
    roles = ("ar",)
    choices = ("dflash:draft=dflash|dspark,ahead=3|7",)

    def refuse(self, checkpoints: Mapping[str, Inspected]) -> None:
        refuse_other_blocks(checkpoints, self.draft, self.ahead, self.confidence)

    def in_engines(self, drafts: Mapping[str, str]) -> Sequence[Setting]:
        if self.confidence:
            return ()
        kind, draft, ahead = "dspark" if self.draft == "dspark" else "dflash", drafts[self.draft], self.ahead
        block = {"method": kind, "model": draft, "num_speculative_tokens": ahead}
        others = (sglang(kind.upper(), ahead, draft, steps=1), llama_cpp(f"draft-{kind}", ahead, draft))
        return drafted(self.verify, block, *others)

    def window(self) -> Window:
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1, drafts=1)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`cached` (R,): the draft's final entries; `sure` (R,): drafts that are offered."""
        return {"cached": first_entries(rows), "sure": torch.zeros_like(rows.known), **super().start(rows, runners)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        block = draft_block(runners, self.draft, rows, state["cached"], self.ahead, self.confidence)
        self.keep_offer(state, rows, block.logits)
        state["sure"].copy_(block.sure)
        return block.tokens

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        tokens, accepted = self.verified(state, rows, output, state["sure"])
        return Commit(tokens, accepted + 1, kept=accepted, offered=state["sure"].clone())

"""Prompt lookup: drafts are copied from an earlier occurrence of the text's last tokens.

Saxena: "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding; before it Yang et al.: "Inference
with Reference: Lossless Acceleration of Large Language Models", arXiv 2304.04487, section 3. Find the longest suffix of
the text, of `min_ngram` to `ngram` tokens, that occurs earlier in prompt or answer; copy the tokens after it.

`match=earliest` copies from its earliest occurrence, at most up to the end of the text: the drafts are those of vLLM's
`ngram` (vllm/v1/spec_decode/ngram_proposer.py) and, with `min_ngram=1`, of transformers' prompt lookup
(`PromptLookupCandidateGenerator`), which ends a draft before an end token. `match=latest` copies from the latest one. A
copy that reaches the end of the text then continues with the drafts themselves, periodically. llama.cpp's
`ngram-simple` (common/ngram-map.cpp) takes the latest occurrence, too, but of one length of suffix, `ngram`. It copies
up to the token before the last, `ngram` tokens at least, and drafts nothing in a text of up to `ngram` + `ahead` + 2
tokens. With `min_ngram=ngram` its drafts begin ours, except behind a token that repeats: there it copies from earlier.
Drafting needs no model. If the text has no repetitions, the only cost is the wider forward.

R = rows, K = drafts, S = slots.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.errors import UserError
from mtbench.options import option


@METHODS.register("prompt-lookup")
@dataclass(frozen=True, kw_only=True)
class PromptLookup(Method):
    """Drafts are copied from the text so far."""

    ahead: int = option(10, "K: tokens copied for each forward", low=1, widths=(2, 4, 8, 16))
    ngram: int = option(3, "longest suffix to search for; shorter ones follow, down to min_ngram", low=1)
    min_ngram: int = option(1, "shortest suffix to search for", low=1)
    match: Literal["earliest", "latest"] = option("earliest", "which occurrence of the suffix is copied")

    title = "Prompt lookup"
    roles = ("ar",)
    claims = "lossless"
    choices = ("prompt-lookup:ahead=auto|4|10",)

    def __post_init__(self) -> None:
        if self.min_ngram > self.ngram:
            raise UserError(
                f"{self.name}: min_ngram={self.min_ngram} exceeds ngram={self.ngram}; lower it. "
                f"See `mtbench ls methods {self.name}`."
            )

    def window(self) -> Window:
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`copied` (R,): how many drafts there are."""
        return {"copied": torch.zeros_like(rows.known)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        matched = rows.suffix_matches(self.ngram)
        matched = matched * (matched >= self.min_ngram)
        place = torch.arange(matched.shape[1], device=matched.device)
        order = place if self.match == "latest" else place.flip(0)
        best = ((matched > 0) * (matched * len(place) + order)).argmax(1, keepdim=True)
        period = (rows.known[:, None] - 1 - best).clamp(min=1)
        copied = torch.full_like(period, self.ahead) if self.match == "latest" else period.clamp(max=self.ahead)
        state["copied"].copy_((copied * (matched.gather(1, best) > 0))[:, 0])
        return rows.tokens.gather(1, best + 1 + torch.arange(self.ahead, device=place.device) % period)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        copied = state["copied"]
        beyond = torch.arange(self.ahead, device=copied.device) >= copied[:, None]
        accepted = sampling.prefix_length(output.agrees(output.guess.masked_fill(beyond, NONE)))
        return Commit(output.choice, accepted + 1, kept=accepted, offered=copied.clone())

"""Prompt lookup: drafts are copied from an earlier occurrence of the text's last tokens.

Saxena: "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding; before it Yang et al.: "Inference
with Reference: Lossless Acceleration of Large Language Models", arXiv 2304.04487, section 3. Find the longest suffix of
the text, of at most `ngram` tokens, that occurs earlier in prompt or answer, and its latest occurrence; copy the tokens
after it. A copy that reaches the end of the text continues with the drafts themselves, periodically.
Drafting needs no model. If the text has no repetitions, the only cost is the wider forward.

R = rows, K = drafts, S = slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.suffix_matches import suffix_matches
from mtbench.models import sampling
from mtbench.options import option


@METHODS.register("prompt-lookup")
@dataclass(frozen=True, kw_only=True)
class PromptLookup(Method):
    """Drafts are copied from the text so far."""

    ahead: int = option(10, "K: tokens copied for each forward", low=1, widths=(2, 4, 8, 16))
    ngram: int = option(3, "longest suffix to search for; shorter ones follow, down to one token", low=1)

    title = "Prompt lookup"
    roles = ("ar",)
    claims = "lossless"
    choices = ("prompt-lookup:ahead=auto|4|10",)
    serving = (
        (
            "vLLM",
            '--speculative-config \'{"method": "ngram", "num_speculative_tokens": $ahead, '
            '"prompt_lookup_max": $ngram, "prompt_lookup_min": 1}\'',
        ),
    )

    def window(self) -> Window:
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`found` (R,): whether there is an occurrence to copy from."""
        return {"found": torch.zeros_like(rows.done)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        matched = suffix_matches(rows, self.ngram)
        place = torch.arange(matched.shape[1], device=matched.device)
        best = ((matched > 0) * (matched * len(place) + place)).argmax(1, keepdim=True)  # the longest, then the latest
        state["found"].copy_(matched.gather(1, best)[:, 0] > 0)
        period = (rows.known[:, None] - 1 - best).clamp(min=1)
        return rows.tokens.gather(1, best + 1 + torch.arange(self.ahead, device=place.device) % period)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        found = state["found"]
        accepted = sampling.prefix_length(output.agrees(output.guess.masked_fill(~found[:, None], NONE)))
        return Commit(output.choice, accepted + 1, kept=accepted, offered=found * self.ahead)

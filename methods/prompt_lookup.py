"""Prompt lookup: drafts are copied from where the text's last words stood before.

Saxena: "Prompt Lookup Decoding", 2023, github.com/apoorvumang/prompt-lookup-decoding; before it Yang et al.: "Inference
with Reference: Lossless Acceleration of Large Language Models", arXiv 2304.04487, section 3. The longest run of last
tokens, `ngram` at most, that stands earlier in prompt or answer, there at its most recent place: what stood behind it
are the drafts. Where that reaches the end of the text it goes on with the drafts themselves: what repeats, repeats on.
Nothing is computed beside the one forward, and a row that says nothing twice costs only width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.models import sampling
from mtbench.options import option


@METHODS.register("prompt-lookup")
@dataclass(frozen=True, kw_only=True)
class PromptLookup(Method):
    """The text so far is the draft model."""

    ahead: int = option(10, "K: tokens copied for each forward", low=1, widths=(2, 4, 8, 16))
    ngram: int = option(3, "most last tokens that are looked for; then fewer, down to one", low=1)

    roles = ("ar",)
    claims = "lossless"

    def window(self) -> Window:
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """Has the row found something to copy? (R,)."""
        return {"found": torch.zeros_like(rows.done)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        alike = self._alike(rows)
        place = torch.arange(alike.shape[1], device=alike.device)
        best = ((alike > 0) * (alike * len(place) + place)).argmax(1, keepdim=True)  # the longest, of these the last
        state["found"].copy_(alike.gather(1, best)[:, 0] > 0)
        period = (rows.known[:, None] - 1 - best).clamp(min=1)
        return rows.tokens.gather(1, best + 1 + torch.arange(self.ahead, device=place.device) % period)

    def _alike(self, rows: Rows) -> Tensor:
        """How many tokens up to each place, n at most, are the text's last ones, (R, S); 0 at its end."""
        tokens, last = rows.tokens, rows.known[:, None] - 1
        place = torch.arange(tokens.shape[1], device=tokens.device)
        same, alike = place < last, torch.zeros_like(tokens)
        for back in range(self.ngram):
            wanted = tokens.gather(1, (last - back).clamp(min=0))
            same = same & (tokens.roll(back, 1) == wanted) & (place >= back)
            alike += same
        return alike

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        found = state["found"]
        accepted = sampling.prefix_length(output.agrees(output.guess.masked_fill(~found[:, None], NONE)))
        return Commit(output.choice, accepted + 1, kept=accepted, offered=found * self.ahead)

"""Suffix decoding: drafts are the most frequent continuation of the text's last tokens in the text so far.

Oliaro et al.: "SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications", NeurIPS 2025, arXiv
2411.04975, sections 3.1 and 3.2. For each length p, the places are found where the last p tokens occurred earlier. From
them a chain grows: the most frequent next token, then the most frequent one after it among the places that had it. Its
score is the sum over its tokens of the chance that a place has the chain up to there. A chain ends before a chance
below `least` and after `factor` · p tokens. The chain with the largest score is the draft.

The tree is cold: it holds the request's own text, so counts do not depend on the order of requests. A warm tree, with
the earlier answers of a server, would hold the answers themselves from a run's second round on.

The authors' ArcticInference (csrc/suffix_decoding/suffix_tree.cc), which vLLM runs, drafts otherwise in five rules:
- Denominator: a chance there is over all places of the chain. Here a place at the end of the text, which has no next
  token, does not count.
- Limit: a chain there has at most floor(`factor` · p) tokens. Here it has at most ceil(`factor` · p).
- Depth: it bounds suffix and drafts together there. Here it bounds the suffix; drafts are bounded by `ahead`.
- Ties between next tokens: the first in the order of its tree there. Here it is the smallest token id.
- Lengths: every p from 1 to the depth there. Here p is a power of two.
Drafting needs no model.

R = rows, P = lengths, S = slots, K = drafts, V = vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.options import option


@METHODS.register("suffix")
@dataclass(frozen=True, kw_only=True)
class Suffix(Method):
    """Drafts are the most frequent continuation of the last tokens in the text so far."""

    ahead: int = option(8, "K: most tokens drafted for each forward", low=1, widths=(2, 4, 8, 16))
    depth: int = option(16, "longest suffix to search for; also 1, 2, 4 … up to it", low=1)
    factor: float = option(1.0, "most drafts per token of the suffix found", low=0.1, high=100.0)
    least: float = option(0.1, "smallest share of the places that must have the chain up to a draft", low=0.0, high=1.0)

    title = "Suffix decoding"
    roles = ("ar",)
    claims = "lossless"
    choices = ("suffix:ahead=auto|8",)

    def window(self) -> Window:
        return Window(pending=1, guesses=self.ahead, commits=self.ahead + 1)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`offered` (R,): how many drafts the chain has."""
        return {"offered": torch.zeros_like(rows.known)}

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        tokens, vocabulary = rows.tokens, runners.target.checkpoint.vocabulary
        lengths = 2 ** torch.arange(self.depth.bit_length(), device=tokens.device)  # (P,)
        place = torch.arange(tokens.shape[1], device=tokens.device)
        at = rows.suffix_matches(self.depth)[:, None] >= lengths[:, None]  # (R, P, S): where the chains begin
        chance = torch.ones(at.shape[:2], dtype=torch.double, device=tokens.device)
        drafted, score, length = [], torch.zeros_like(chance), torch.zeros_like(chance, dtype=torch.long)
        for k in range(self.ahead):
            at = at & (place + k + 1 < rows.known[:, None])[:, None]
            following = tokens.roll(-(k + 1), 1)[:, None].expand(at.shape)
            counts = torch.zeros(*at.shape[:2], vocabulary, dtype=torch.int32, device=tokens.device)
            token = counts.scatter_add_(2, following, at.int()).argmax(2)
            count = counts.gather(2, token[..., None])[..., 0]
            chance = chance * count / at.sum(2).clamp(min=1)
            chance = chance * ((chance >= self.least) & (k < self.factor * lengths))  # an ended chain stays at 0
            score, length = score + chance, length + (chance > 0)
            at = at & (following == token[..., None])
            drafted.append(token)
        best = (score.flip(1).argmax(1, keepdim=True) - len(lengths) + 1).neg()  # of equal scores the longest suffix
        state["offered"].copy_(length.gather(1, best)[:, 0])
        return torch.stack(drafted, 2).take_along_dim(best[..., None], 1)[:, 0]

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        offered = state["offered"]
        beyond = torch.arange(self.ahead, device=offered.device) >= offered[:, None]
        accepted = sampling.prefix_length(output.agrees(output.guess.masked_fill(beyond, NONE)))
        return Commit(output.choice, accepted + 1, kept=accepted, offered=offered.clone())

"""Verify drafts: accept the leading drafts by the target's own choice, or by rejection sampling.

Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318. By match, drafts that equal the target's
choice are accepted; draft and target share one random number per request and position (`Rows.choose`), so the tokens
are those of the reference. Rejection sampling accepts a draft with probability min(1, p/q): other tokens with the same
distribution.

R = rows, K = drafts, V = vocabulary.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding import trees
from mtbench.decoding.method import NONE, Claims, Commit, Method, ModelRunners, Rows, State, TargetOutput

Verify = Literal["match", "rejection"]
VERIFY = "accept the target's choice, or use rejection sampling"  # help of the option


def verify_tree(
    output: TargetOutput, drafts: Tensor, behind: Tensor, branches: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify a tree of drafts (R, G), as `trees.products` numbers them, by match.

    Returns the target's choices along the longest path of accepted drafts (R, D+1), how many are accepted (R,), and the
    path (R, D). `behind` (R, G): parents of the drafts.
    """
    accepted, path = trees.longest(output.agrees(drafts, behind), branches)
    columns = torch.cat((torch.zeros_like(path[:, :1]), path + 1), 1)
    return output.choice.gather(1, columns), accepted, path


class VerifiedMethod(Method):
    """A method whose guesses are a chain of K drafts that the target verifies."""

    ahead: int  # K
    verify: Verify

    @property
    def claims(self) -> Claims:
        return "lossless" if self.verify == "match" else "distribution"

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`offered` (R, K, V), for rejection sampling: the distributions that the drafts were chosen from."""
        if self.verify == "match":
            return {}
        shape = (len(rows.known), self.ahead, runners.target.checkpoint.vocabulary)
        return {"offered": torch.zeros(shape, dtype=torch.double, device=rows.known.device)}

    def keep_offer(self, state: State, rows: Rows, logits: Tensor) -> None:
        """Keep the distributions of the drafts, given the logits (R, K, V) that they were chosen from."""
        if self.verify == "rejection":
            state["offered"][:, : self.ahead, : logits.shape[2]] = rows.distribution(logits)

    def verified(
        self, state: State, rows: Rows, output: TargetOutput, drafts: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens (R, K+1) to commit and the number of accepted drafts (R,).

        `drafts` (R,): so many leading guesses are drafts, and those behind them are missing. None: all are.
        """
        if self.verify == "match":
            guess = output.guess
            if drafts is not None:
                guess = guess.masked_fill(torch.arange(self.ahead, device=guess.device) >= drafts[:, None], NONE)
            return output.choice, sampling.prefix_length(output.agrees(guess))
        offered, target = state["offered"][:, : self.ahead], rows.distribution(output.logits)
        return sampling.rejection_sample(output.guess, offered, target, rows.seed, output.position, drafts)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        tokens, accepted = self.verified(state, rows, output)
        return Commit(tokens, accepted + 1, kept=accepted)

"""Verify drafts: accept the leading drafts by the target's own choice, or by rejection sampling; in a tree, a path.

Leviathan, Kalman, Matias, arXiv 2211.17192; Chen et al., arXiv 2302.01318. By match, drafts that equal the target's
choice are accepted; draft and target share one random number per request and position (`Rows.choose`), so the tokens
are those of the reference. Rejection sampling accepts a draft with probability min(1, p/q): other tokens with the same
distribution. Block verification (Sun et al., arXiv 2403.10444) accepts the drafts jointly: the same distribution, and
at least as many drafts on average (`sampling.block_rule`).

Top-k, top-p and min-p filter the target's distribution p. They filter q with `filter_draft` only, as vLLM draws
drafts at the temperature alone (github.com/vllm-project/vllm/pull/56724). Both are lossless: q is the distribution that
the drafts were drawn from, and a token that p's filter removes has p = 0, so it is never accepted.

`confidence` shortens a row's drafts: the first whose distribution has no token of at least this probability, at
temperature 1, and those behind it are not offered. This is the rule of llama.cpp's `--spec-draft-p-min`. In greedy
decoding it is the draft's own probability. transformers' `assistant_confidence_threshold` looks at the token that was
drawn, and keeps it as the last one. Dropping a draw for its own low probability would bias sampled tokens: the residual
assumes that likely and unlikely draws are verified alike. A distribution is known before its token is drawn. The shape
of a step is fixed, so the forwards of draft and target stay: a threshold changes what is accepted and counted, and
saves time with `ahead=auto` only, which counts such an end as a rejected draft.

R = rows, K = drafts, G = guesses, V = vocabulary.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtbench import sampling
from mtbench.decoding.draft_trees import DraftTree, parse_tree
from mtbench.decoding.method import NONE, Claims, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.errors import UserError
from mtbench.options import AUTO

Verify = Literal["match", "rejection", "block"]
# Help of the options.
VERIFY = "accept the target's choice, or use rejection sampling: token by token, or of the whole block"
TREE = "choices at each depth, such as 3x2; 1 if not listed; `1` is a chain; best:N: the N likeliest prefixes"
FILTER_DRAFT = "draw drafts from the draft's distribution after top-k, top-p and min-p; else at the temperature alone"
CONFIDENCE = "least probability of the draft's likeliest token; drafts are offered up to the first below it; 0: all"


def verify_tree(output: TargetOutput, drafts: Tensor, depth: int, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Verify a tree of drafts by match; the arguments are those of `TargetOutput.longest`.

    Returns the target's choices along the longest path of accepted drafts (R, depth + 1), how many are accepted (R,),
    and the path (R, depth).
    """
    accepted, path = output.longest(drafts, depth, first)
    return output.choice.gather(1, pad(path + 1, (1, 0))), accepted, path


class VerifiedMethod(Method):
    """A method whose guesses are a chain of K drafts that the target verifies."""

    ahead: int  # K
    verify: Verify
    confidence: float
    filter_draft: bool = False

    @property
    def claims(self) -> Claims:
        return "lossless" if self.verify == "match" else "distribution"

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """`offered` (R, K, V), unless by match: the distributions that the drafts were chosen from.

        `sure` (R,), with a threshold: how many drafts are offered.
        """
        state: State = {}
        if self.verify != "match":
            shape = (len(rows.known), self.ahead, runners.target.checkpoint.vocabulary)
            state["offered"] = torch.zeros(shape, dtype=torch.double, device=rows.known.device)
        if self.confidence:
            state["sure"] = torch.zeros_like(rows.known)
        return state

    def drawing(self, rows: Rows) -> Rows:
        """Return the rows with the filters and random seeds by which a step draws its drafts; seeds verify them, too.

        Block verification needs other seeds in each step. How many drafts it accepts depends on the random numbers of
        later positions, too. If the next step used these numbers again, its drafts would not be distributed as q.
        """
        rows = self.drafting(rows)
        return replace(rows, seed=sampling.hashed(rows.seed, rows.known)) if self.verify == "block" else rows

    def drafting(self, rows: Rows) -> Rows:
        """Return the rows with the filters by which drafts are drawn."""
        return rows if self.filter_draft else rows.unfiltered

    def keep_offer(self, state: State, rows: Rows, logits: Tensor, sure: Tensor | None = None) -> None:
        """Keep the distributions of the drafts, given the logits (R, K, V) that they were chosen from.

        `sure` (R,): how many drafts are offered; None: by the largest probabilities.
        """
        if self.verify != "match":
            state["offered"][:, : self.ahead, : logits.shape[2]] = self.drafting(rows).distribution(logits)
        if self.confidence:
            if sure is None:
                sure = sampling.prefix_length(sampling.sure(logits, "probability", self.confidence))
            state["sure"].copy_(sure)

    def verified(self, state: State, rows: Rows, output: TargetOutput) -> tuple[Tensor, Tensor]:
        """Return the tokens (R, K+1) to commit and the number of accepted drafts (R,)."""
        drafts = state["sure"] if self.confidence else None
        if self.verify == "match":
            guess = output.guess
            if drafts is not None:
                guess = guess.masked_fill(torch.arange(self.ahead, device=guess.device) >= drafts[:, None], NONE)
            return output.choice, sampling.prefix_length(output.agrees(guess))
        offered, target = state["offered"][:, : self.ahead], rows.distribution(output.logits)
        seed, block = self.drawing(rows).seed, self.verify == "block"
        return sampling.rejection_sample(output.guess, offered, target, seed, output.position, drafts, block=block)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        tokens, accepted = self.verified(state, rows, output)
        if not self.confidence:
            return Commit(tokens, accepted + 1, kept=accepted)
        offered = state["sure"].clone()
        stopped = (offered < self.ahead).long()
        return Commit(tokens, accepted + 1, kept=accepted, offered=offered, stopped=stopped)


class TreeMethod(VerifiedMethod):
    """A method whose guesses are a chain of K drafts, or a tree of at most that depth, verified by match."""

    tree: str  # `1`: a chain; else see draft_trees.py

    def __post_init__(self) -> None:
        if self.ahead != AUTO:
            parse_tree(self.tree, self.ahead, f"{self.name}: tree={self.tree!r}")
        for given, only_chains in (
            (f"ahead={self.ahead}", self.ahead == AUTO),
            (f"verify={self.verify}", self.verify != "match"),
            (f"confidence={self.confidence:g}", self.confidence > 0),
        ):
            if self.tree != "1" and only_chains:
                raise UserError(
                    f"{self.name}: {given} needs a chain, and tree={self.tree} is none; leave one of them out. "
                    f"See `mtbench ls methods {self.name}`."
                )

    def new_tree(self) -> DraftTree:
        """Return the tree of a step, without guesses yet."""
        return parse_tree(self.tree, self.ahead)

    def tree_window(self, *, at_once: bool = False) -> Window:
        """Return the shape of a forward that feeds the guesses. The draft makes one forward, or one a level."""
        tree = self.new_tree()
        drafts, room = (1, 0) if at_once else (tree.depth, tree.room)
        if self.tree == "1":
            return Window(1, self.ahead, self.ahead + 1, drafts=drafts)
        return replace(tree.window, drafts=drafts, room=room)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        if self.tree == "1":
            return super().accept(state, rows, output)
        tokens, accepted, path = verify_tree(output, output.guess, self.new_tree().depth)
        return Commit(tokens, accepted + 1, kept=accepted, path=path, offered=output.depth)

"""Lookahead decoding: a window of Jacobi iterations yields n-grams; matching ones are verified in the same forward.

Fu, Bailis, Stoica, Zhang: "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML 2024, arXiv
2402.02057, sections 3.1-3.3. The window holds N - 1 levels of W tokens, predicted by the last N - 1 forwards. With
N = 4 and W = 5, numbered by their position relative to the last decided token, 0:

    level 0    0  1  2  3  4     a token attends to the tokens left of it in level 0,
    level 1    1  2  3  4  5     and to all above it in its column: token 5 of level 1
    level 2    2  3  4  5  6     to 0 … 4 of level 0, token 6 of level 2 also to that one
    predicted  3  4  5  6  7     each column, read down, is an n-gram of consecutive positions

The window is a tree (`mtbench.decoding.trees`): level 0 is a chain; each of its tokens has a column. After a forward
level 0 is dropped and the predictions become the last level, one position further, however many tokens were accepted
(as in the released code). A pool stores the n-grams. Its latest G that begin with the last decided token are verified.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench import sampling
from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.trees import products, tree
from mtbench.decoding.verification import verify_tree
from mtbench.options import option

POOL = 512  # n-grams per text, without duplicates, the latest first


@METHODS.register("lookahead")
@dataclass(frozen=True, kw_only=True)
class Lookahead(Method):
    """N-grams from the model's own parallel iterations, verified G at a time."""

    width: int = option(7, "W: columns of the window", low=1, high=1024)
    ngram: int = option(5, "N: tokens of an n-gram; the window has N-1 levels", low=2, high=64)
    candidates: int = option(7, "G: n-grams verified in each forward", low=1, high=POOL)

    title = "Lookahead"
    roles = ("ar",)
    claims = "lossless"
    choices = ("lookahead", "lookahead:width=4,ngram=4,candidates=4")

    @property
    def ahead(self) -> int:
        """Number of tokens after an n-gram's first; equals the number of levels."""
        return self.ngram - 1

    @property
    def first(self) -> int:
        """Index of the n-grams' first guess. The window's guesses come before it; its first token is no guess."""
        return self.ahead * self.width - 1

    @property
    def branches(self) -> list[int]:
        return [self.candidates] + [1] * (self.ahead - 1)

    def window(self) -> Window:
        up, left = self.width + 1, 2  # from a token's number in the window to its parent guess
        window = [number - (left if number < self.width else up) for number in range(1, self.first + 1)]
        offset, sees = tree(window + products(self.branches, self.first))
        return Window(pending=1, guesses=len(offset), commits=self.ngram, sees=sees, offset=offset)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """A random window, an empty pool, no drafts."""
        count, device = len(rows.known), rows.known.device
        random = sampling.uniform(rows.seed[:, None], torch.arange(self.ahead * self.width, device=device))
        return {
            "window": (random * runners.target.checkpoint.vocabulary).long().view(count, self.ahead, self.width),
            "pool": torch.full((count, POOL, self.ngram), NONE, device=device),
            "drafts": torch.zeros(count, self.candidates * self.ahead, dtype=torch.long, device=device),
        }

    def propose(self, state: State, rows: Rows, runners: ModelRunners) -> Tensor:
        window, pool = state["window"], state["pool"]
        last = rows.tokens.gather(1, rows.known[:, None] - 1)
        window[:, 0, :1] = last
        fresh = torch.arange(POOL, 0, -1, device=pool.device)
        found = ((pool[..., 0] == last) * fresh).topk(self.candidates, 1)
        ngrams = pool.gather(1, found.indices[..., None].expand(-1, -1, self.ngram))[..., 1:]
        ngrams = ngrams.masked_fill(found.values[..., None] == 0, NONE)
        state["drafts"].copy_(ngrams.transpose(1, 2).flatten(1))  # depth by depth
        return torch.cat((window.flatten(1)[:, 1:], state["drafts"].clamp(min=0)), 1)

    def accept(self, state: State, rows: Rows, output: TargetOutput) -> Commit:
        window, drafts = state["window"], state["drafts"]
        predicted = output.choice[:, self.first + 1 - self.width : self.first + 1]
        levels = torch.cat((window, predicted[:, None]), 1)
        window.copy_(levels[:, 1:])
        self._remember(state["pool"], levels.transpose(1, 2))
        tokens, accepted, path = verify_tree(output, drafts, self.ahead, self.first)
        offered = (drafts[:, 0] != NONE) * self.ahead
        return Commit(tokens, accepted + 1, kept=accepted, path=path, offered=offered)

    def _remember(self, pool: Tensor, ngrams: Tensor) -> None:
        """Put n-grams (R, W, N) first; of two equal n-grams drop the older."""
        both = torch.cat((ngrams, pool), 1)
        equal = (both[:, :, None] == ngrams[:, None]).all(3)  # (R, W + POOL, W)
        duplicate = equal.tril(-1).any(2, keepdim=True)
        pool.copy_(both.masked_fill(duplicate, NONE)[:, : len(pool[0])])

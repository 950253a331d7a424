"""Lookahead decoding: a window of Jacobi iterations yields n-grams, and those that fit are verified, in one forward.

Fu, Bailis, Stoica, Zhang: "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", ICML 2024, arXiv
2402.02057, sections 3.1-3.3. The window holds N - 1 levels of W tokens: what the last N - 1 forwards predicted. Here
N = 4 and W = 5, each token with its position behind the last decided one, which is token 0:

    level 0    0  1  2  3  4     a token sees what stands left of it in level 0,
    level 1    1  2  3  4  5     and in its column all that is above it: token 5 of level 1
    level 2    2  3  4  5  6     sees 0 to 4 of level 0, token 6 of level 2 also that one
    predicted  3  4  5  6  7     each column, read down, is an n-gram of consecutive positions

So it is a tree (`mtbench.decoding.trees`): level 0 a chain, under each of its tokens a column. Then level 0 is dropped
and what was predicted becomes the last level, one position on whatever was accepted, as in the released code. The
n-grams go into a pool, and of those that begin with the last decided token the latest, up to G, are verified behind
the window.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mtbench.decoding.method import NONE, Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.registry import METHODS
from mtbench.decoding.trees import longest, products, tree
from mtbench.models import sampling
from mtbench.options import option

POOL = 512  # n-grams remembered of each text, no two alike, the latest first


@METHODS.register("lookahead")
@dataclass(frozen=True, kw_only=True)
class Lookahead(Method):
    """N-grams from the model's own parallel iterations, verified G at a time."""

    width: int = option(7, "W: columns of the window", low=1)
    ngram: int = option(5, "N: tokens of an n-gram; the window has N-1 levels", low=2)
    candidates: int = option(7, "G: n-grams verified in each forward", low=1, high=POOL)

    roles = ("ar",)
    claims = "lossless"

    @property
    def ahead(self) -> int:
        """Tokens behind an n-gram's first, and the window's levels."""
        return self.ngram - 1

    @property
    def first(self) -> int:
        """The guess that the first n-gram begins with; before it the window, whose first token is no guess."""
        return self.ahead * self.width - 1

    @property
    def branches(self) -> list[int]:
        return [self.candidates] + [1] * (self.ahead - 1)

    def window(self) -> Window:
        up, left = self.width + 1, 2  # from a token's number in the window to the guess it stands behind
        window = [number - (left if number < self.width else up) for number in range(1, self.first + 1)]
        offset, sees = tree(window + products(self.branches, self.first))
        return Window(pending=1, guesses=len(offset), commits=self.ngram, sees=sees, offset=offset)

    def start(self, rows: Rows, runners: ModelRunners) -> State:
        """A window of anything, an empty pool, and of each draft the guess that it stands behind."""
        count, device = len(rows.known), rows.known.device
        dice = sampling.uniform(rows.seed[:, None], torch.arange(self.ahead * self.width, device=device))
        behind = torch.tensor(products(self.branches, self.first), device=device).expand(count, -1)
        return {
            "window": (dice * runners.target.checkpoint.vocabulary).long().view(count, self.ahead, self.width),
            "pool": torch.full((count, POOL, self.ngram), NONE, device=device),
            "behind": behind,
            "drafts": torch.zeros_like(behind),
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
        accepted, path = longest(output.agrees(drafts, state["behind"]), self.branches)
        path = path + self.first
        tokens = output.choice.gather(1, torch.cat((torch.zeros_like(path[:, :1]), path + 1), 1))
        offered = (drafts[:, 0] != NONE) * self.ahead
        return Commit(tokens, accepted + 1, kept=accepted, path=path, offered=offered)

    def _remember(self, pool: Tensor, ngrams: Tensor) -> None:
        """Put n-grams (R, W, N) first, and forget the older of two that are alike."""
        both = torch.cat((ngrams, pool), 1)
        alike = (both[:, :, None] == ngrams[:, None]).all(3)  # (R, W + POOL, W)
        again = alike.tril(-1).any(2, keepdim=True)
        pool.copy_(both.masked_fill(again, NONE)[:, : len(pool[0])])

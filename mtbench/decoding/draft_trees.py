"""The tree of guesses that a draft makes, by its distributions: at once, or level by level.

`3x2`: every guess of a depth has equally many children (`trees.products`). `best:N`: the N likeliest prefixes by the
draft's own probabilities (`trees.Likeliest`). With a temperature these are softmax(logits/T plus the noise that draft
and target share), so a tree holds what the target will probably draw.

R = rows, D = depth, M = guesses of the depth before, G = guesses, N = guesses of `best:N`, V = vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from mtbench.decoding import trees
from mtbench.decoding.method import Rows, Window
from mtbench.decoding.trees import Guesses
from mtbench.models.attention import ALIGNED


class Products:
    """`branches[d]` guesses follow each guess of the depth before. Each step makes a new tree."""

    room = 0  # slots that the entries of all levels need more than the guesses

    def __init__(self, branches: Sequence[int]) -> None:
        self.branches, self.depth = branches, len(branches)
        self.chain = max(branches) == 1
        self.tokens: list[Tensor] = []  # guesses of each level so far, (R, M)

    @property
    def window(self) -> Window:
        """The shape of a forward that feeds the guesses."""
        offset, sees = trees.tree(trees.products(self.branches))
        return Window(1, len(offset), self.depth + 1, sees=sees, offset=offset)

    def at_once(self, rows: Rows, logits: Tensor, places: Tensor) -> Tensor:
        """Return all guesses by logits (R, D, V) that do not depend on guesses before, at positions (R, D)."""
        return trees.same_children(rows.best(logits, places, max(self.branches)), self.branches)

    def add(self, rows: Rows, logits: Tensor, places: Tensor) -> Tensor:
        """Choose the next level by logits (R, M, V) after each guess of the level before, at positions (R, M).

        Returns the parent of each guess, (R, guesses of the level), by its number in the level before.
        """
        children = self.branches[len(self.tokens)]
        self.tokens.append(rows.best(logits, places, children).flatten(1))
        before = torch.arange(logits.shape[1], device=logits.device)
        return before.repeat_interleave(children).expand_as(self.tokens[-1])

    def guesses(self) -> Tensor:
        """Return the guesses of all levels that were added."""
        return torch.cat(self.tokens, 1)


class Best:
    """The N likeliest prefixes, by the functions of `Products`. A level has N guesses, of which not all are kept."""

    chain = False

    def __init__(self, nodes: int, depth: int) -> None:
        self.likeliest, self.depth = trees.Likeliest(nodes), min(depth, nodes)
        self.tokens = self.likeliest.tokens
        self.room = -(-max(0, self.depth - 2) * nodes // ALIGNED) * ALIGNED

    @property
    def window(self) -> Window:
        return Window(1, self.likeliest.nodes, self.depth + 1)

    def at_once(self, rows: Rows, logits: Tensor, places: Tensor) -> Guesses:
        nodes = self.likeliest.nodes
        return trees.best(*rows.likeliest(logits, places, nodes), nodes)

    def add(self, rows: Rows, logits: Tensor, places: Tensor) -> Tensor:
        self.likeliest.add(*rows.likeliest(logits, places, self.likeliest.nodes))
        return self.likeliest.parents[-1]

    def guesses(self) -> Guesses:
        return self.likeliest.tree()


DraftTree = Products | Best


def taken(values: Tensor, parents: Tensor) -> Tensor:
    """Return the values (R, M, …) of the parents (R, K) of a level, (R, K, …)."""
    if values.shape[1] == 1:  # all have one parent
        return values.expand(-1, parents.shape[1], *values.shape[2:])
    return values[torch.arange(len(values), device=values.device)[:, None], parents]


def parse_tree(text: str, depth: int, given: str = "") -> DraftTree:
    """Return the tree of an option's text, such as `3x2` or `best:16`. Raises UserError, which begins with `given`."""
    if nodes := trees.parse_budget(text):
        return Best(nodes, depth)
    return Products(trees.parse_branches(text, depth, given))

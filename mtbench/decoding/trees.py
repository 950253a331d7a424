"""Patterns of guesses: what stands behind what. Every pattern is a tree whose root is the last decided token.

A chain of drafts, a tree of candidates (SpecInfer: Miao et al., arXiv 2305.09781; Medusa: arXiv 2401.10774), groups of
masks of which each continues another outcome (TiDAR: arXiv 2511.08923; MARS: arXiv 2604.07023, section 4.6): a guess
stands one position behind its parent, and sees its ancestors and itself.

G = guesses.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ROOT = -1  # the last decided token


def tree(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Guess g stands behind guess `parents[g]`, which comes before it, or behind ROOT: `offset` (G,) and `sees` (G, G).

    As `mtbench.decoding.method.Window` wants them.
    """
    offset = torch.zeros(len(parents), dtype=torch.long)
    sees = torch.eye(len(parents), dtype=torch.bool)
    for guess, parent in enumerate(parents):
        if parent != ROOT:
            offset[guess] = offset[parent] + 1
            sees[guess] |= sees[parent]
    return offset, sees


def chain(length: int) -> list[int]:
    """Parents of guesses each of which stands behind the one before."""
    return list(range(ROOT, length - 1))


def mask_groups(drafts: int, masks: int) -> list[int]:
    """Parents of K drafts in a chain and then K + 1 groups of M masks, group j behind draft j and group 0 behind ROOT.

    Whatever leading j of the drafts are accepted, group j continues that text: its mask m is guess K + j·M + m.
    """
    parents = chain(drafts)
    for draft in range(ROOT, drafts):
        parents += [draft, *range(len(parents), len(parents) + masks - 1)][:masks]
    return parents


def products(branches: Sequence[int], first: int = 0) -> list[int]:
    """Parents of a tree in which `branches[d]` guesses stand behind each guess of the depth before, depth by depth.

    (The Cartesian product of candidates for each depth: Medusa, section 2.1.2.) Its first guess has the number `first`.
    """
    parents: list[int] = []
    depth = [ROOT]
    for many in branches:
        begin = first + len(parents)
        parents += [parent for parent in depth for _ in range(many)]
        depth = list(range(begin, first + len(parents)))
    return parents


def longest(agrees: Tensor, branches: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Down the tree of `products`, of which `agrees` (R, G) says which guesses are right: the longest way from ROOT.

    How many guesses it takes, (R,), and the path that begins with them, (R, D) by their number in the tree.
    """
    leaves = math.prod(branches)
    leaf = torch.arange(leaves, device=agrees.device)
    right = agrees.new_ones(len(agrees), leaves)
    taken, path, begin, nodes = torch.zeros_like(right, dtype=torch.long), [], 0, 1
    for many in branches:
        nodes *= many
        path.append(begin + leaf // (leaves // nodes))
        right = right & agrees[:, path[-1]]
        taken = taken + right
        begin += nodes
    most, best = taken.max(1)
    return most, torch.stack(path)[:, best].T

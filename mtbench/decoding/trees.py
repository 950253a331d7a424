"""Trees of guesses. The root is the last decided token; a guess follows its parent and attends to its ancestors.

It may be a chain of drafts, a tree of candidates (SpecInfer: Miao et al., arXiv 2305.09781; Medusa: arXiv 2401.10774),
or drafts with groups of mask tokens, one group per number of drafts that may be accepted (TiDAR: arXiv 2511.08923;
MARS: arXiv 2604.07023, section 4.6).

R = rows, G = guesses, D = depth.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mtbench.errors import UserError

ROOT = -1  # the last decided token
MOST_GUESSES = 2048  # of a forward: no method gains by more, and more would exhaust the memory


def refuse_too_many(guesses: int) -> None:
    """Raise UserError if a forward would feed more than MOST_GUESSES guesses."""
    if guesses > MOST_GUESSES:
        raise UserError(
            f"feeds {guesses:,} guesses in a forward, and at most {MOST_GUESSES:,} are allowed; lower the option that "
            "widens it. See `mtbench ls methods`."
        )


def tree(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return `offset` (G,) and `sees` (G, G) of a `Window` in which guess g follows guess `parents[g]` or ROOT.

    A parent has a lower number than its children.
    """
    refuse_too_many(len(parents))
    offset = torch.zeros(len(parents), dtype=torch.long)
    sees = torch.eye(len(parents), dtype=torch.bool)
    for guess, parent in enumerate(parents):
        if parent != ROOT:
            offset[guess] = offset[parent] + 1
            sees[guess] |= sees[parent]
    return offset, sees


def chain(length: int) -> list[int]:
    """Return the parents of a chain of guesses."""
    return list(range(ROOT, length - 1))


def mask_groups(drafts: int, masks: int) -> list[int]:
    """Return the parents of K chained drafts and of K + 1 groups of M masks; group j follows draft j, group 0 ROOT.

    If the first j drafts are accepted, group j continues that text: its mask m is guess K + j·M + m.
    """
    refuse_too_many(drafts + (drafts + 1) * masks)
    parents = chain(drafts)
    for draft in range(ROOT, drafts):
        group = [draft, *range(len(parents), len(parents) + masks - 1)]
        parents += group[:masks]
    return parents


def products(branches: Sequence[int], first: int = 0) -> list[int]:
    """Return the parents of a tree in which `branches[d]` guesses follow each guess of the previous depth.

    Guesses are numbered depth by depth, from `first` on. (The Cartesian product of each depth's candidates: Medusa,
    section 2.1.2.)
    """
    parents: list[int] = []
    depth = [ROOT]
    for children in branches:
        begin = first + len(parents)
        refuse_too_many(begin + len(depth) * children)
        parents += [parent for parent in depth for _ in range(children)]
        depth = list(range(begin, first + len(parents)))
    return parents


def same_children(top: Tensor, branches: Sequence[int]) -> Tensor:
    """Return the guesses (R, G) of the tree of `products` in which all guesses of a depth have the same children.

    `top` (R, D, n): the choices for each depth, the best first; `branches[d]` of them are taken.
    """
    guesses, parents = [], 1
    for depth, children in enumerate(branches):
        guesses.append(top[:, depth, :children].repeat(1, parents))
        parents *= children
    return torch.cat(guesses, 1)


def parse_branches(text: str, depth: int, given: str = "") -> list[int]:
    """Return the choices at each of `depth` depths from text such as 3x2; 1 where none is listed.

    Raises UserError, which begins with `given`, for other text.
    """
    refuse_too_many(depth)
    named = text.split("x")
    if not all(part.isdecimal() and len(part) < 5 and int(part) for part in named) or len(named) > depth:
        raise UserError(
            f"{given} is not allowed; give the numbers of choices of up to {depth} depths, separated by x, such as "
            "3x2. See `mtbench ls methods`."
        )
    return [int(part) for part in named] + [1] * (depth - len(named))


def longest(agrees: Tensor, branches: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the longest path of correct guesses from ROOT in the tree of `products`.

    `agrees` (R, G): which guesses are correct. Returns the number of correct guesses (R,) and the path from ROOT to a
    leaf that starts with them, (R, D), by their number in the tree.
    """
    leaves = math.prod(branches)
    leaf = torch.arange(leaves, device=agrees.device)
    right = agrees.new_ones(len(agrees), leaves)
    taken, path, begin, nodes = torch.zeros_like(right, dtype=torch.long), [], 0, 1
    for children in branches:
        nodes *= children
        path.append(begin + leaf // (leaves // nodes))
        right = right & agrees[:, path[-1]]
        taken = taken + right
        begin += nodes
    most, best = taken.max(1)
    return most, torch.stack(path)[:, best].T

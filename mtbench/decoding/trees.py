"""Trees of guesses. The root is the last decided token; a guess follows its parent and attends to its ancestors.

It may be a chain of drafts, a tree of candidates (SpecInfer: Miao et al., arXiv 2305.09781; Medusa: arXiv 2401.10774),
or drafts with groups of mask tokens, one group per number of drafts that may be accepted (TiDAR: arXiv 2511.08923;
MARS: arXiv 2604.07023, section 4.6). A tree of N guesses may differ from row to row: the N likeliest prefixes by the
draft's own probabilities (DDTree: arXiv 2604.12989; level by level, EAGLE-2: arXiv 2406.16858).

R = rows, G = guesses, D = depth, N = guesses of a tree of the likeliest prefixes, n = candidates.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtbench.errors import UserError

ROOT = -1  # the last decided token
MOST_GUESSES = 2048  # of a forward: no method gains by more, and more would exhaust the memory
BUDGET = "best:"  # the option's text is this and N


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


def with_masks(offset: Tensor, sees: Tensor, masks: int) -> tuple[Tensor, Tensor]:
    """Return `offset` (…, G) and `sees` (…, G, G) of a tree with G + 1 groups of M masks, a chain each.

    Group 0 follows ROOT, group g + 1 follows guess g; its mask m is guess G + (g + 1)·M + m.
    """
    guesses, groups = offset.shape[-1], offset.shape[-1] + 1
    refuse_too_many(guesses + groups * masks)
    mask = torch.arange(groups * masks, device=offset.device)
    behind = pad(offset + 1, (1, 0)).repeat_interleave(masks, -1) + mask % masks
    ancestors = pad(sees, (0, 0, 1, 0)).repeat_interleave(masks, -2)
    own = (mask[:, None] // masks == mask // masks) & (mask[:, None] >= mask)
    below = torch.cat((ancestors, own.expand(*sees.shape[:-2], -1, -1)), -1)
    return torch.cat((offset, behind), -1), torch.cat((pad(sees, (0, len(mask))), below), -2)


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


def parse_budget(text: str) -> int:
    """Return N of `best:N`, a tree of the N likeliest prefixes; 0 for other text."""
    number = text.removeprefix(BUDGET)
    return int(number) if number != text and number.isdecimal() and len(number) < 5 else 0


def parse_branches(text: str, depth: int, given: str = "") -> list[int]:
    """Return the choices at each of `depth` depths from text such as 3x2; 1 where none is listed.

    Raises UserError, which begins with `given`, for other text.
    """
    refuse_too_many(depth)
    named = text.split("x")
    if not all(part.isdecimal() and len(part) < 5 and int(part) for part in named) or len(named) > depth:
        raise UserError(
            f"{given} is not allowed; give the numbers of choices of up to {depth} depths, separated by x, such as "
            f"3x2, or {BUDGET}N, such as {BUDGET}16, for the N likeliest prefixes. See `mtbench ls methods`."
        )
    return [int(part) for part in named] + [1] * (depth - len(named))


class Guesses(NamedTuple):
    """Guesses in a tree that differs from row to row. `sees` and `offset` replace those of the `Window`."""

    ids: Tensor  # (R, G)
    sees: Tensor  # (R, G, G) bool
    offset: Tensor  # (R, G)


class Likeliest:
    """The N likeliest prefixes, which a draft predicts level by level.

    A prefix is never likelier than the prefix it continues. So the N likeliest of all are a tree, and the N likeliest
    of a level continue the N likeliest of the level before. Every shape is fixed, and no value is read on the host.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes  # N
        self.tokens: list[Tensor] = []  # of each level, (R, N): the last token of its prefixes, the likeliest first
        self.parents: list[Tensor] = []  # (R, N), by number in the level before; of the first level zeros
        self.log_p: list[Tensor] = []  # (R, N) of the whole prefix, float64; −∞ where there are fewer

    def add(self, tokens: Tensor, log_p: Tensor) -> None:
        """Add a level: the candidates (R, M, n) after each prefix of the level before, and their log-probabilities.

        M is N, or 1: the candidates of all are the same; of the first level they follow ROOT.
        """
        log_p = log_p.double().where(log_p <= 0, -torch.inf)  # what is not a number is no candidate
        if self.log_p:
            log_p = self.log_p[-1][..., None] + log_p
        every = log_p.flatten(1)
        room = (0, max(0, self.nodes - every.shape[1]))
        top = pad(every, room, value=-torch.inf).topk(self.nodes, 1)
        self.tokens.append(pad(tokens.expand_as(log_p).flatten(1), room).gather(1, top.indices))
        self.parents.append(top.indices // log_p.shape[2] if self.log_p else torch.zeros_like(top.indices))
        self.log_p.append(top.values)

    def tree(self) -> Guesses:
        """Return the N likeliest prefixes of all levels as guesses, the likeliest first, at last impossible ones.

        Of equals a shallower one is first, so a parent has a lower number than its children.
        """
        nodes, tokens, device = self.nodes, torch.cat(self.tokens, 1), self.tokens[0].device
        order = torch.cat(self.log_p, 1).sort(dim=1, descending=True, stable=True).indices[:, :nodes]
        # ROOT has number 0, prefix g of level l has l·N + g + 1.
        before = [parents + max(0, (level - 1) * nodes + 1) for level, parents in enumerate(self.parents)]
        number = torch.arange(1, nodes + 1, device=device).expand_as(order)
        place = torch.zeros_like(tokens).scatter(1, order, number)
        parent = pad(place, (1, 0)).gather(1, torch.cat(before, 1).gather(1, order))
        own = torch.eye(nodes, dtype=torch.bool, device=device)
        sees = own.expand(len(tokens), -1, -1)
        for _ in self.tokens[1:]:
            sees = own | pad(sees, (0, 0, 1, 0)).gather(1, parent[..., None].expand_as(sees))
        return Guesses(tokens.gather(1, order), sees, sees.sum(2) - 1)


def best(tokens: Tensor, log_p: Tensor, nodes: int) -> Guesses:
    """Return the `nodes` likeliest prefixes where the distribution of a depth does not depend on the prefix.

    `tokens`, `log_p` (R, D, n): candidates of each depth and their log-probabilities; `nodes` candidates are enough.
    """
    likeliest = Likeliest(nodes)
    for depth in range(tokens.shape[1]):
        likeliest.add(tokens[:, depth, None], log_p[:, depth, None])
    return likeliest.tree()


def columns(sees: Tensor) -> Tensor:
    """Return the column of a `TargetOutput` that judges each guess, that of its parent; (G,), or (R, G) by row."""
    number = torch.arange(1, sees.shape[-1] + 1, dtype=torch.int16, device=sees.device)
    return (sees.tril(-1) * number).amax(-1).long()


def longest(agrees: Tensor, sees: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Return the longest path of correct guesses from ROOT.

    `agrees` (R, G): which guesses are the target's choice after their parents. `sees` (G, G) or (R, G, G). Returns the
    number of correct guesses (R,) and the path by number (R, depth), which repeats the last guess behind its end.
    """
    right = ~(sees & ~agrees[:, None]).any(-1)
    correct, last = (right * sees.sum(-1)).max(1)
    count = agrees.shape[1]
    on_path = sees.expand(len(agrees), -1, -1).gather(1, last[:, None, None].expand(-1, 1, count))[:, 0]
    number = torch.arange(count, device=agrees.device)
    return correct, number.where(on_path, count - 1).topk(depth, 1, largest=False).values

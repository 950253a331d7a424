"""Which trial explains the tokens of a side that are off, and how sure that is.

Trials are compared by their misfit, which is about minus the log of a probability. A change may be there in all
answers or in some: an answer has the smaller of two misfits, that with the change and that without it, by a share of
the answers that is chosen. A trial explains a side if nearly all tokens that are off become choices, if its misfit is
smaller by more than the best of so many trials reaches by chance, and if no trial of another class is as good.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mtbench.experiments.audit.format import TrialLine, Tried

CLEARLY = 3.0  # difference of misfits from which one is better: 20 times as likely
REMAIN = {True: 0.1, False: 0.5}  # share of an answer's tokens that a trial may leave: exact, and only similar
COVERED = 0.75  # share of the answers that are off which a trial must explain
SLACK = 0.2  # share of the remaining misfit by which trials do not differ: a similar change is similar to others, too
LEAST_SHARE, MOST_SHARE = 0.05, 0.75  # of the tokens that are off which any change is taken to explain by chance
SHARES = (1.0, 0.9, 0.75, 0.5, 0.25, 0.1)  # of the answers that a change is in
STRONG = 0.25  # share of the tokens that a change may leave which explains drawn tokens: they fit many temperatures
NEAREST, NEAR = 3, 0.75  # trials that a reader is told of if none explains a side; share of the tokens they may leave


class Explanation(NamedTuple):
    """The trials that explain a side best. `name`: None if trials of several classes do, or if it may be chance."""

    name: str | None
    classes: tuple[str, ...]  # of these trials
    trials: tuple[str, ...]  # the best first
    items: frozenset[str]  # answers that the best explains
    before: int  # their tokens that are off
    after: int  # those that remain
    more: int = 0  # further tokens that are off which would tell whether it is chance; 0: it is not
    chance: float | None = None  # of drawn tokens: the probability of such tokens


def explain(lines: Sequence[TrialLine]) -> Explanation | None:
    """Return the explanation of a side by its trials; None if none explains it."""
    made = compared(lines)
    drawn = [line for line in lines if line.chance is not None and _explained(line)]
    fitting = [line for line in made if _explained(line)]
    if drawn and not any(line.after <= STRONG * line.before for line in made):
        return _of(drawn[0], drawn, drawn[0].chance)
    if not fitting:
        return None
    best = fitting[0]
    others = [line for line in lines if line.name != best.name and line.chance is None and line.before]
    shares = [max(0.0, 1 - line.after / line.before) for line in others]
    share = min(max(LEAST_SHARE, sum(shares) / max(1, len(shares))), MOST_SHARE)
    reach = misfit(best.tried) * (1 + SLACK) + CLEARLY / -math.log(share)
    found = _of(best, [best, *(line for line in made if line is not best and misfit(line.tried) <= reach)])
    needed = math.ceil((math.log(len(lines)) + CLEARLY) / -math.log(share))
    more = max(0, needed - (found.before - found.after))
    return found._replace(name=None if more else found.name, more=more)


def _of(best: TrialLine, equal: Sequence[TrialLine], chance: float | None = None) -> Explanation:
    classes, items = tuple(dict.fromkeys(line.name for line in equal)), _explained(best)
    return Explanation(
        name=classes[0] if len(classes) == 1 else None,
        classes=classes,
        trials=tuple(line.trial for line in equal),
        items=items,
        before=sum(of.before for of in best.tried if of.item in items),
        after=sum(of.after for of in best.tried if of.item in items),
        chance=chance,
    )


def compared(lines: Sequence[TrialLine]) -> list[TrialLine]:
    """Return the trials that were made on the most answers, the best first."""
    own = [line for line in lines if line.chance is None and line.tried]
    most = max((line.answers for line in own), default=0)
    return sorted((line for line in own if line.answers == most), key=lambda line: misfit(line.tried))


def nearest(lines: Sequence[TrialLine]) -> list[TrialLine]:
    """Return the trials that come nearest to an explanation, the best first."""
    return [line for line in compared(lines) if line.after < NEAR * line.before][:NEAREST]


def misfit(tried: Sequence[Tried]) -> float:
    """Return the misfit of all answers, if a share of them has the change."""
    logs = torch.tensor([(-of.misfit, -of.misfit_before) for of in tried], dtype=torch.float64)
    shares = torch.tensor([[(share, 1 - share)] for share in SHARES], dtype=torch.float64)
    return -float((shares.log() + logs).logsumexp(2).sum(1).max())


def _explained(line: TrialLine) -> frozenset[str]:
    """Return the answers that a trial explains; empty if these are too few of those that are off."""
    off = [of for of in line.tried if of.before]
    few = [of for of in off if of.after <= REMAIN[line.exact] * of.before]
    found = frozenset(of.item for of in few if of.misfit < of.misfit_before)
    return found if len(found) >= COVERED * len(off) else frozenset()

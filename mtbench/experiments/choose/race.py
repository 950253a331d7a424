"""The rule of a race: which arms leave after a look, and why. A pure function of the decoded blocks.

A **look** is made when plain decoding has ended the first N blocks, and uses these blocks only. So a race that was
killed decides the same from its stored lines. An arm may lack some of them: within a time budget it waits, and comes in
later. Two arms are compared on the blocks that both have. There are two contests:

    same tokens   the arms with the tokens of plain decoding, and plain decoding itself
    all allowed   these, and the arms that are shown to lose no more accuracy than accepted (`not worse`)

An arm leaves as soon as it has lost its contest: it loses too much accuracy, or an arm of the same contest that is
known to be allowed is surely faster. So a fast lossy arm never hides what is fastest with the same tokens. A contest
ends when no arm can be more than 2 % faster than its leader, and the leader's gain has a verdict. Arms whose accuracy
is open go on beside plain decoding. A leader with other tokens goes on until it is known whether rounding explains
them. When nothing is open, all arms leave. An arm over a limit of its latency beats no other arm, and leaves after 24
blocks.

Errors. The time of an arm over that of another has a one-sided bound at level 2.5 % / (looks · other arms), from
`statistics.shared_ratio` on the blocks of both. Let b be the best allowed arm. There are two errors: b leaves, or an
arm more than 2 % slower than b counts as close to it. Each needs a wrong bound between b and another arm. By the
union bound over looks and arms this has probability 2.5 % at most. A bound between an arm and plain decoding is shared
by the looks only: b is one arm, and of these bounds only its own can be wrong to its harm. That is 2.5 % more.
Simulated bounds keep these levels for uneven blocks, too (docs/error-rates.md). But no bound knows of a kind of block
that has not run yet. The verdicts on accuracy are those of `statistics.accuracy_verdicts`: adjusted for all arms (Holm)
and shared by the looks. `worse than margin` is wrong with probability 2.5 % at most, `not worse` 5 %. The end of a run
is one more look, since it can come at any block.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from mtbench import statistics
from mtbench.plan.formats import Elimination
from mtbench.results import verdicts
from mtbench.results.decision import NOT_WORSE, SURELY_WORSE
from mtbench.statistics import Difference, Ratio, Word

CLOSE = 0.02  # arms within this share of the leader's time are as good
NO_FASTER, DONE = f"not more than {CLOSE:.0%} faster than", "its speed needs no further blocks"  # reasons
FIRST_LOOKS, GROWTH = (6, 8, 11, 16, 24), 1.5


def looks(blocks: int) -> list[int]:
    """Return the numbers of blocks after which arms may leave: 6, 8, 11, 16, 24, then half as many again, and the last.

    >>> looks(100)
    [6, 8, 11, 16, 24, 36, 54, 81, 100]
    """
    numbers = [look for look in FIRST_LOOKS if look < blocks]
    while len(numbers) >= len(FIRST_LOOKS) and numbers[-1] * GROWTH < blocks:
        numbers.append(int(numbers[-1] * GROWTH))
    return [*numbers, blocks]


@dataclass(frozen=True)
class Block:
    """An arm's result on a block."""

    wall_s: float | None  # None: the sample is not clean
    scores: Mapping[str, float]  # by item
    same: bool  # the tokens of plain decoding, on all items


@dataclass(frozen=True)
class RacedArm:
    """An arm of the race with its leading blocks.

    claims_lossless: it claims the tokens of plain decoding. allows_rounding: that holds though tokens differ: the
    arithmetic may choose, or it claims the distribution. graded_after: blocks after which it is known whether
    rounding explains other tokens. misses_slo: after each number of blocks, from 1 on, whether a latency is over its
    limit. accuracy: the verdict on it from a larger batch size; None: it is tested here.
    """

    name: str
    blocks: Sequence[Block]
    reference: bool = False
    claims_lossless: bool = False
    allows_rounding: bool = False
    graded_after: int = 0
    misses_slo: Sequence[bool] = ()
    accuracy: Word | None = None
    unit_s: float = 0.0  # least time of a unit of times (`statistics.units_of`); 0: a block
    failed: bool = False  # it has no further blocks
    begun: bool = False  # it has a block in this group
    left_out_after: float = math.inf  # blocks: it had not begun, and there was no time for it any more


class View:
    """The state of all arms at a look."""

    def __init__(
        self, entrants: Sequence[RacedArm], upto: Mapping[str, int], at: Sequence[int], max_loss: float
    ) -> None:
        self.upto = upto  # leading blocks of each arm that count
        self.looks = len(at) + 1
        self.plain = next(e for e in entrants if e.reference)
        self.arms = [e for e in entrants if not e.reference]
        self.words = self._words(max_loss)
        self.unit_of = self._units()
        self._ratios: dict[tuple[str, str, int], Ratio] = {}

    def same(self, arm: RacedArm) -> bool:
        """Return whether the arm counts as one with the tokens of plain decoding."""
        return arm.reference or (arm.claims_lossless and (arm.allows_rounding or self._kept(arm)))

    def graded(self, arm: RacedArm) -> bool:
        """Return whether the tokens are those of plain decoding, or enough to tell other tokens from rounding."""
        return self._kept(arm) or self.upto[arm.name] >= arm.graded_after

    def _kept(self, arm: RacedArm) -> bool:
        return all(block.same for block in arm.blocks[: self.upto[arm.name]])

    def misses_slo(self, arm: RacedArm) -> bool:
        """Return whether a latency of the arm is over its limit. Plain decoding has no limit: it is the default."""
        upto = self.upto[arm.name]
        return not arm.reference and any(arm.misses_slo[upto - 1 : upto])

    def accurate(self, arm: RacedArm) -> bool:
        return self.same(arm) or self.words.get(arm.name) in NOT_WORSE

    def allowed(self, arm: RacedArm) -> bool:
        return self.accurate(arm) and not self.misses_slo(arm)

    def worse(self, arm: RacedArm) -> bool:
        return not self.same(arm) and self.words.get(arm.name) == SURELY_WORSE

    def faster(self, arm: RacedArm, other: RacedArm) -> bool:
        """Return whether the arm is surely faster than the other."""
        low = self._time_ratio(other, arm, among=self._among(arm)).ci_low
        return low is not None and low > 1

    def close(self, leader: RacedArm, other: RacedArm) -> bool:
        """Return whether the other is surely not more than 2 % faster than the leader."""
        high = self._time_ratio(leader, other, among=self._among(leader)).ci_high
        return leader is other or (high is not None and high < 1 + CLOSE)

    def quickest(self, arms: Sequence[RacedArm]) -> RacedArm | None:
        """Return the arm with the least time relative to plain decoding; one without a clean block comes last."""

        def relative_time(arm: RacedArm) -> float:
            ratio = self._time_ratio(arm, self.plain).value
            return math.inf if ratio is None else ratio

        return min(arms, key=relative_time, default=None)

    def decided(self, arm: RacedArm) -> bool:
        """Return whether the arm is `faster` than plain decoding, as in results.json, or close to it."""
        if arm is self.plain:
            return True
        if any(verdicts.too_short(self._walls(e), 0.0) for e in (arm, self.plain)):
            return False
        ratios = [self._time_ratio(self.plain, e, among=len(self.arms)) for e in self.arms]
        judged = verdicts.speed_verdicts(ratios, [None] * len(ratios), looks=self.looks)
        return judged[self.arms.index(arm)].word == "faster" or self.close(self.plain, arm)

    def timed(self, arm: RacedArm) -> int:
        return len(self._walls(arm))

    def _walls(self, arm: RacedArm) -> list[float]:
        return [block.wall_s for block in arm.blocks[: self.upto[arm.name]] if block.wall_s is not None]

    def _among(self, rival: RacedArm) -> int:
        """Return how many claims share the level when an arm is out for the time of a rival.

        The best arm has one comparison with plain decoding, and as many with other rivals as there are arms.
        """
        return 1 if rival is self.plain else len(self.arms)

    def _time_ratio(self, above: RacedArm, below: RacedArm, *, among: int = 1) -> Ratio:
        pair = (above.name, below.name, among)
        if pair not in self._ratios:
            units: dict[int, tuple[float, float]] = {}
            blocks = above.blocks[: self.upto[above.name]], below.blocks[: self.upto[below.name]]
            for unit, a, b in zip(self.unit_of, *blocks, strict=False):
                if a.wall_s is not None and b.wall_s is not None:
                    above_s, below_s = units.get(unit, (0.0, 0.0))
                    units[unit] = above_s + a.wall_s, below_s + b.wall_s
            columns = list(zip(*units.values(), strict=True)) or [(), ()]
            self._ratios[pair] = statistics.shared_ratio(*columns, looks=self.looks, among=among)
        return self._ratios[pair]

    def _units(self) -> list[int]:
        there = [arm.blocks[: self.upto[arm.name]] for arm in (self.plain, *self.arms)]
        walls = ([block.wall_s for block in of if block and block.wall_s is not None] for of in zip_longest(*there))
        return statistics.units_of((min(of_block, default=0.0) for of_block in walls), self.plain.unit_s)

    def _words(self, max_loss: float) -> dict[str, Word]:
        """Return the accuracy verdict of every arm with other tokens, if it is known or has scores."""
        words = {e.name: e.accuracy for e in self.arms if e.accuracy is not None}
        unknown = [e for e in self.arms if e.accuracy is None and not self.same(e)]
        tested = {e.name: difference for e in unknown if (difference := self._difference(e)).n}
        judged = verdicts.accuracy_words(list(tested.values()), statistics.as_share(max_loss), looks=self.looks)
        return words | dict(zip(tested, judged, strict=True))

    def _difference(self, arm: RacedArm) -> Difference:
        upto = min(self.upto[arm.name], self.upto[self.plain.name])
        blocks = zip(arm.blocks[:upto], self.plain.blocks[:upto], strict=True)
        changes = [statistics.gains_and_losses(ours.scores, theirs.scores) for ours, theirs in blocks]
        gained, lost, n = (sum(change[place] for change in changes) for place in range(3))
        return Difference((gained - lost) / n if n else None, None, None, gained, lost, n)


class Outcome(NamedTuple):
    """The decisions of the looks so far."""

    left: list[Elimination]
    made: list[int]  # looks


def replay(entrants: Sequence[RacedArm], at: Sequence[int], max_loss: float) -> Outcome:
    """Make every look of `at` for which there are enough blocks."""
    left: list[Elimination] = []
    made: list[int] = []
    if any(e.reference and e.failed for e in entrants):
        return Outcome([], [])
    for block in (0, *at):
        out = {gone.cell for gone in left}
        gone = {e.name for e in entrants if (e.failed and len(e.blocks) < block) or e.left_out_after <= block}
        there = [e for e in entrants if e.name not in out | gone]
        if not there or any(len(e.blocks) < block for e in there):
            break
        view = View(entrants, _counted(entrants, left, block), at, max_loss)
        left += _leaving(view, there, block) if block else _before(view, there)
        made += [block] if block else []
    return Outcome(left, made)


def words(entrants: Sequence[RacedArm], at: Sequence[int], max_loss: float, outcome: Outcome) -> dict[str, Word]:
    """Return the accuracy verdict of every arm with other tokens at the last look."""
    last = max(outcome.made, default=0)
    return View(entrants, _counted(entrants, outcome.left, last), at, max_loss).words


def _counted(entrants: Sequence[RacedArm], left: Sequence[Elimination], block: int) -> dict[str, int]:
    until = {gone.cell: gone.block for gone in left}
    return {e.name: min(block, until.get(e.name, block), len(e.blocks)) for e in entrants}


def _before(view: View, there: Sequence[RacedArm]) -> list[Elimination]:
    """Return the arms that need not start, since their accuracy is known from a larger batch size."""
    tested = [e for e in there if e.accuracy is not None and not e.claims_lossless and not e.begun]
    return [
        Elimination(
            cell=e.name,
            block=0,
            lost=view.worse(e),
            reason=f"at a larger batch size its accuracy is: {e.accuracy}",
            rival=None,
        )
        for e in tested
        if not view.accurate(e)
    ]


def _leaving(view: View, there: Sequence[RacedArm], block: int) -> list[Elimination]:
    look = _Look(view, there, block)
    look.let_lose(view.worse, "loses more accuracy than accepted")
    if block >= FIRST_LOOKS[-1]:
        enough = FIRST_LOOKS[-2]  # blocks: an arm may have begun late
        look.let_lose(lambda arm: view.misses_slo(arm) and view.timed(arm) >= enough, "over a limit of its latency")
    look.let_slower_leave()
    look.end_contests()
    if all(arm.reference for arm in look.still()):
        for arm in look.still():
            look.leave(arm, "no arm is left beside it", lost=False)
    return list(look.out.values())


class _Look:
    """The arms that leave at a look, one reason after the other."""

    def __init__(self, view: View, there: Sequence[RacedArm], block: int) -> None:
        self.view, self.there, self.block = view, there, block
        self.out: dict[str, Elimination] = {}

    def leave(self, arm: RacedArm, reason: str, *, lost: bool, rival: RacedArm | None = None) -> None:
        name = rival.name if rival else None
        self.out[arm.name] = Elimination(cell=arm.name, block=self.block, lost=lost, reason=reason, rival=name)

    def still(self, *, same: bool | None = None) -> list[RacedArm]:
        """Return the arms that are still there; with `same` only those with, or without, plain decoding's tokens."""
        there = [arm for arm in self.there if arm.name not in self.out]
        return there if same is None else [arm for arm in there if self.view.same(arm) == same]

    def let_lose(self, fails: Callable[[RacedArm], bool], reason: str) -> None:
        for arm in self.still():
            if fails(arm):
                self.leave(arm, reason, lost=True)

    def let_slower_leave(self) -> None:
        """Compare every arm with the allowed arms of its contest, also with those that leave at this look."""
        allowed = [arm for arm in self.still() if self.view.allowed(arm)]
        for arm in [arm for arm in self.still() if not arm.reference]:
            rivals = [e for e in allowed if e is not arm and (self.view.same(e) or not self.view.same(arm))]
            quicker = next((e for e in rivals if self.view.faster(e, arm)), None)
            if quicker is not None:
                self.leave(arm, "takes longer than", lost=True, rival=quicker)

    def end_contests(self) -> None:
        """Let the arms leave that cannot be more than 2 % faster than the leader, and leaders without a rival."""
        view, kept = self.view, self.still(same=True)
        leader = view.quickest([arm for arm in kept if view.allowed(arm)])
        assert leader is not None, "plain decoding stays to the end"
        for arm in self.still(same=False):
            if view.close(leader, arm):
                self.leave(arm, NO_FASTER, lost=True, rival=leader)
        if self._ended(leader, kept):
            self._let_others_leave(leader, kept)
            rivals = self.still(same=False)
            if not leader.reference and view.graded(leader) and all(view.faster(arm, leader) for arm in rivals):
                self.leave(leader, DONE, lost=False)
        allowed = [arm for arm in self.still(same=False) if view.allowed(arm)]
        first = view.quickest(allowed)
        if first is not None and self._ended(first, allowed):
            self._let_others_leave(first, self.still(same=False))
            alone = not any(arm is not first and not arm.reference for arm in self.still())
            if alone:
                self.leave(first, DONE, lost=False)

    def _ended(self, leader: RacedArm, arms: Sequence[RacedArm]) -> bool:
        """Return whether no arm can be more than 2 % faster than the leader, whose gain has a verdict."""
        return all(self.view.close(leader, arm) for arm in arms) and self.view.decided(leader)

    def _let_others_leave(self, leader: RacedArm, arms: Sequence[RacedArm]) -> None:
        for arm in arms:
            if arm is not leader and not arm.reference and self.view.close(leader, arm):
                self.leave(arm, NO_FASTER, lost=True, rival=leader)

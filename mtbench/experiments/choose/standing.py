"""What is known at a look of a race: who has plain decoding's tokens, who is allowed, who is faster than whom.

mtbench/experiments/choose/race.py has the rule that uses it, and how errors are shared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtbench import statistics
from mtbench.results import verdict_words
from mtbench.results.decision import NOT_WORSE, SURELY_WORSE
from mtbench.statistics import Difference, Ratio

CLOSE = 0.02  # arms within this share of the leader's time are as good


@dataclass(frozen=True)
class Block:
    """What an arm did on a block."""

    wall_s: float | None  # None: the sample is not clean
    scores: Mapping[str, float]  # by item
    same: bool  # the tokens of plain decoding, on all items


@dataclass(frozen=True)
class RacedArm:
    """An arm of the race with its leading blocks.

    claims_lossless: it claims the tokens of plain decoding. allows_rounding: that holds though tokens differ: the
    arithmetic may choose, or it claims the distribution. graded_after: blocks after which it can be told whether
    rounding explains other tokens. misses_slo: after each number of blocks, from 1 on, whether a latency is over its
    limit. accuracy: the word on it from a larger batch size; None: it is tested here.
    """

    name: str
    blocks: Sequence[Block]
    reference: bool = False
    claims_lossless: bool = False
    allows_rounding: bool = False
    graded_after: int = 0
    misses_slo: Sequence[bool] = ()
    accuracy: str | None = None
    failed: bool = False  # it has no further blocks


class View:
    """What is known of all arms at a look."""

    def __init__(
        self, entrants: Sequence[RacedArm], upto: Mapping[str, int], at: Sequence[int], max_loss: float
    ) -> None:
        self.upto = upto  # leading blocks of each arm that count
        self.looks = len(at) + 1
        self.plain = next(e for e in entrants if e.reference)
        self.arms = [e for e in entrants if not e.reference]
        self.words = self._words(max_loss)
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
        """Return whether a latency of the arm is over its limit. Plain decoding has no limit: it is what one has."""
        upto = self.upto[arm.name]
        return not arm.reference and any(arm.misses_slo[upto - 1 : upto])

    def accurate(self, arm: RacedArm) -> bool:
        return self.same(arm) or self.words.get(arm.name, "").startswith(NOT_WORSE)

    def allowed(self, arm: RacedArm) -> bool:
        return self.accurate(arm) and not self.misses_slo(arm)

    def worse(self, arm: RacedArm) -> bool:
        return not self.same(arm) and self.words.get(arm.name, "").startswith(SURELY_WORSE)

    def open(self, arm: RacedArm) -> bool:
        """Return whether more items can show the arm to be accurate, or not."""
        return arm.name in self.words and arm.accuracy is None and not self.accurate(arm) and not self.worse(arm)

    def faster(self, arm: RacedArm, other: RacedArm) -> bool:
        """Return whether the arm is surely faster than the other."""
        low = self._time_ratio(other, arm, among=self._among(arm)).ci_low
        return low is not None and low > 1

    def close(self, leader: RacedArm, other: RacedArm) -> bool:
        """Return whether the other is surely not more than 2 % faster than the leader."""
        high = self._time_ratio(leader, other, among=self._among(leader)).ci_high
        return leader is other or (high is not None and high < 1 + CLOSE)

    def quickest(self, arms: Sequence[RacedArm]) -> RacedArm | None:
        """Return the arm with the least time relative to plain decoding."""
        return min(arms, key=lambda arm: self._time_ratio(arm, self.plain).value or 0.0, default=None)

    def decided(self, arm: RacedArm) -> bool:
        """Return whether the arm is `faster` than plain decoding, as results.json will say it, or close to it."""
        if arm is self.plain:
            return True
        if any(verdict_words.too_short(self._walls(e), 0.0) for e in (arm, self.plain)):
            return False
        ratios = [self._time_ratio(self.plain, e, among=len(self.arms)) for e in self.arms]
        verdicts = verdict_words.speed_verdicts(ratios, [None] * len(ratios), looks=self.looks)
        return verdicts[self.arms.index(arm)].word == "faster" or self.close(self.plain, arm)

    def _walls(self, arm: RacedArm) -> list[float]:
        return [block.wall_s for block in arm.blocks[: self.upto[arm.name]] if block.wall_s is not None]

    def _among(self, rival: RacedArm) -> int:
        """Return how many claims share the level when an arm is out for the time of a rival.

        The best arm has one comparison with plain decoding, and as many with other rivals as there are arms.
        """
        return 1 if rival is self.plain else len(self.arms)

    def _time_ratio(self, above: RacedArm, below: RacedArm, *, among: int = 1) -> Ratio:
        """Return the time of one arm over that of another on the blocks that both have."""
        pair = (above.name, below.name, among)
        if pair not in self._ratios:
            both = zip(above.blocks[: self.upto[above.name]], below.blocks[: self.upto[below.name]], strict=False)
            timed = [(a.wall_s, b.wall_s) for a, b in both if a.wall_s is not None and b.wall_s is not None]
            columns = list(zip(*timed, strict=True)) or [(), ()]
            self._ratios[pair] = statistics.shared_ratio(*columns, looks=self.looks, among=among)
        return self._ratios[pair]

    def _words(self, max_loss: float) -> dict[str, str]:
        """Return the word on the accuracy of every arm with other tokens, if it is known or has scores."""
        words = {e.name: e.accuracy for e in self.arms if e.accuracy is not None}
        unknown = [e for e in self.arms if e.accuracy is None and not self.same(e)]
        tested = {e.name: difference for e in unknown if (difference := self._difference(e)).n}
        found = verdict_words.accuracy_words(list(tested.values()), max_loss, looks=self.looks)
        return words | dict(zip(tested, found, strict=True))

    def _difference(self, arm: RacedArm) -> Difference:
        upto = min(self.upto[arm.name], self.upto[self.plain.name])
        blocks = zip(arm.blocks[:upto], self.plain.blocks[:upto], strict=True)
        changes = [statistics.gains_and_losses(ours.scores, theirs.scores) for ours, theirs in blocks]
        gained, lost, n = (sum(change[place] for change in changes) for place in range(3))
        return Difference((gained - lost) / n if n else None, None, None, gained, lost, n)

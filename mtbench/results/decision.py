"""Recommendations: one for each suite, batch size and serving engine, from the cells of results.json.

An arm can be used if it is `faster` than plain decoding, and either has its tokens (graded exact or near-tie; or the
same distribution) or an accuracy that is shown to be `not worse` within the accepted loss. Plain decoding is the
reference on the checkpoint that one would deploy without the method. An arm on another checkpoint has other tokens than
plain decoding there, whatever it promises on its own. So it needs the test of accuracy, unless all answers agree.
Smaller batch sizes answer fewer items, so an arm's accuracy is that of the batch size with the most items.

The verdicts are those of mtbench/statistics.py. They are adjusted for all arms of a group, so taking the fastest of
the arms that pass needs no further adjustment of whether it is faster; its interval is pointwise.

Plain decoding is the answer if every arm is out: shown to be at most 2 % faster, or to lose too much. Such a claim on
all arms needs no adjustment for their number: it is wrong only if an arm is faster, and then that arm's own bound must
be wrong, too (intersection-union test, Berger 1982). An arm that left a race for a rival is out as long as the rival
is one of the arms here: not void, not failed, and not over a limit of its latency.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from mtbench import statistics
from mtbench.decoding.arms import is_served
from mtbench.plan.plan import APART
from mtbench.results.comparisons import GroupKey, by_reading, groups_of, own_speedups
from mtbench.results.decision_format import AccuracyCost, Choice, Recommendation, Word
from mtbench.results.decision_text import EPSILON_NEEDS, TOO_CLOSE, answer, sentence
from mtbench.results.decision_text import headline as headline
from mtbench.results.figure_formats import AccuracyComparison, Estimate, Speedup
from mtbench.results.format import ResultCell

KEPT = ("exact", "near-tie")  # grades of an arm with the promised tokens
NOT_WORSE = ("not worse", "worse by less than the margin")
SURELY_WORSE = "worse than margin"
MOST_BLOCKS = 10_000  # an arm that needs more is too close to tell


class Bounds(NamedTuple):
    """An interval of a ratio, and its level."""

    low: float | None  # None: too few units
    high: float | None
    level: float = 0.95


class Pairs(Protocol):
    """The comparison of two cells' times."""

    def faster(self, cell: ResultCell, other: ResultCell) -> bool:
        """Whether a cell is faster than the other."""

    def bounds(self, cell: ResultCell, other: ResultCell, *, tested: bool = False) -> Bounds:
        """The speed of a cell over the other. A cell is no faster if its upper bound is below 2 %.

        tested: at the level of an arm's verdict among all others.
        """


class Intervals:
    """The comparison by intervals over plain decoding. They are pointwise."""

    def faster(self, cell: ResultCell, other: ResultCell) -> bool:
        """Whether the whole interval of a cell lies above the other's, over a baseline that both have."""
        for speedup in cell.speedup:
            for compared in other.speedup:
                if speedup.baseline == compared.baseline and None not in (speedup.ci_low, compared.ci_high):
                    return speedup.ci_low > compared.ci_high  # type: ignore[operator]  # neither is None
        return False

    def bounds(self, cell: ResultCell, other: ResultCell, *, tested: bool = False) -> Bounds:
        """Return the 95 % interval over the other. If another level is tested, the verdict has it."""
        over = (Bounds(s.ci_low, s.ci_high) for s in cell.speedup if s.baseline == other.arm and not s.includes_engine)
        return next(over, Bounds(None, None))


INTERVALS = Intervals()


def recommend(
    cells: Sequence[ResultCell], *, max_loss: float, pairs: Pairs = INTERVALS, misses_slo: Collection[str] = ()
) -> list[Recommendation]:
    """Return a recommendation for each suite, batch size, way of batching and engine. Simulated cells have none.

    max_loss: the loss of accuracy that the run accepts, in points. pairs: compares the times of two cells.
    misses_slo: cells that cannot be chosen, since a latency is over its limit.
    """
    groups = {
        (key, engine): of_engine
        for key, group in groups_of(cell for cell in cells if cell.simulated is None).items()
        for engine, of_engine in _by_engine(group).items()
    }
    baselines = {place: _baseline(group) for place, group in groups.items()}
    accuracies = {(k, e): _accuracies(group, baselines[k, e], k.batch_size) for (k, e), group in groups.items()}
    recommendations = []
    for place, group in groups.items():
        key, engine = place
        alike = [o for o in groups if (o[0].suite, baselines[o]) == (key.suite, baselines[place])]
        most = _with_most_items([accuracies[place], *(accuracies[other] for other in alike)])
        arms = _arms(group, baselines[place], most, pairs, misses_slo)
        recommendations.append(_of_group(key, engine, group, arms, baselines[place], max_loss, pairs))
    if any(cell.by_value_vs for cell in cells):
        others = recommend(_by_value(cells), max_loss=max_loss, pairs=pairs, misses_slo=misses_slo)
        recommendations = [_with_reading(*both) for both in zip(recommendations, others, strict=True)]
    return recommendations


def _by_value(cells: Sequence[ResultCell]) -> list[ResultCell]:
    """Return the cells with their accuracy by value, where it is known, in place of the score.

    An arm that left because of an accuracy that has another verdict by value, its own or its rival's, has not lost.
    """
    other = {cell.cell for cell in cells if by_reading(cell)}
    changed = []
    for cell in cells:
        left = cell.left
        if left is not None and (left.rival or cell.cell) in other:
            left = left.changed(lost=False)
        changed.append(cell.changed(left=left, accuracy_vs=cell.by_value_vs or cell.accuracy_vs, by_value_vs=[]))
    return changed


def _with_reading(by_score: Recommendation, by_value: Recommendation) -> Recommendation:
    """Return a recommendation that says what it would be by value, if that is another arm or word."""
    word, other = ([r.word, *(c and c.arm for c in (r.same_tokens, r.within_loss))] for r in (by_score, by_value))
    by_score = by_score if word == other else by_score.changed(by_value=answer(by_value))
    return by_score.changed(text=sentence(by_score))


def _by_engine(cells: Sequence[ResultCell]) -> dict[str | None, list[ResultCell]]:
    """Return the cells by serving engine, of engines with a method beside plain decoding; None: of no server."""
    of_engines: dict[str | None, list[ResultCell]] = {}
    for cell in cells:
        of_engines.setdefault(cell.engine if is_served(cell.engine) else None, []).append(cell)
    methods = {engine: of for engine, of in of_engines.items() if any(not cell.reference for cell in of)}
    return methods or {None: [*cells]}


class _Accuracy(NamedTuple):
    """An arm's accuracy against plain decoding. Its verdict holds for the loss that the run accepts."""

    found: AccuracyComparison
    batch_size: int  # at which it was measured


class _Arm(NamedTuple):
    """An arm beside plain decoding."""

    cell: ResultCell
    speedup: Speedup
    bounds: Bounds  # of the speedup: 95 %, or without a verdict at the level of the verdicts
    kept: str | None  # of the tokens of plain decoding; None: it has other tokens
    accuracy: _Accuracy | None  # None: not scored
    no_faster: bool  # than plain decoding
    lost: bool  # it left because another arm, or plain decoding, is surely better
    misses_slo: bool  # a latency is over its limit
    invalid: bool  # it is shown to have too few valid answers

    @property
    def value(self) -> float:
        return self.speedup.value or 0.0

    @property
    def same_tokens(self) -> bool:
        return self.kept is not None

    @property
    def faster(self) -> bool:
        return self.speedup.verdict.word == "faster"

    @property
    def allowed(self) -> bool:
        """Whether it may be used if it is faster."""
        accurate = self.same_tokens or (self.accuracy is not None and self.accuracy.found.verdict.word in NOT_WORSE)
        return accurate and not self.invalid and not self.misses_slo

    @property
    def out(self) -> bool:
        """Whether it is shown that the arm is no faster, loses too much or is over a limit."""
        if self.lost or self.no_faster or self.misses_slo or self.invalid:
            return True
        worse = self.accuracy is not None and self.accuracy.found.verdict.word == SURELY_WORSE
        return worse and not self.same_tokens


def _of_group(
    key: GroupKey,
    engine: str | None,
    cells: Sequence[ResultCell],
    arms: Sequence[_Arm],
    baseline: str | None,
    max_loss: float,
    pairs: Pairs,
) -> Recommendation:
    usable = sorted((arm for arm in arms if arm.faster and arm.allowed), key=lambda arm: (arm.lost, -arm.value))
    same = next((arm for arm in usable if arm.same_tokens), None)
    others = (arm for arm in usable if not arm.same_tokens)
    within = next((arm for arm in others if same is None or pairs.faster(arm.cell, same.cell)), None)
    word: Word = "use" if usable else "plain" if arms and all(arm.out for arm in arms) else "cannot tell"
    least = max((arm.value for arm in (same, within) if arm is not None), default=0.0)
    open_ = [
        arm
        for arm in arms
        if not arm.out
        and not (arm.faster and arm.allowed)
        and (arm.value > least or (same is None and arm.same_tokens))
    ]
    open_.sort(key=lambda arm: -arm.value)
    undecided = open_[0] if open_ and word != "plain" else None
    rec = Recommendation(
        **key._asdict(),
        engine=engine,
        demonstration=any(cell.demonstration for cell in cells),
        baseline=baseline,
        max_loss=max_loss,
        compared=len(arms),
        allowed=[arm.cell.arm for arm in arms if arm.allowed],
        misses_slo=[arm.cell.arm for arm in arms if arm.misses_slo],
        word=word,
        same_tokens=_choice(same),
        within_loss=_choice(within),
        undecided=_choice(undecided),
        also_open=[arm.cell.arm for arm in open_ if undecided is not None and arm is not undecided],
        as_good=[arm.cell.arm for arm in usable for chosen in (same, within) if _as_good(arm, chosen)],
        collapsed=[f"{cell.arm}: {cell.collapse}" for cell in cells if cell.collapse],
        doubt=_not_started(cells) if undecided is None else _doubt(undecided),
        text="",
    )
    return rec.changed(text=sentence(rec))


def _baseline(cells: Sequence[ResultCell]) -> str | None:
    """Return plain decoding on the checkpoint that one would deploy: the baseline that most arms share."""
    speedups = own_speedups(cells)
    chosen = [(speedups.deployed.get(cell.arm) or speedups.same.get(cell.arm)) for cell in cells if not cell.reference]
    names = [speedup.baseline for speedup in chosen if speedup is not None]
    return max(dict.fromkeys(names), key=names.count, default=None)


def _arms(
    cells: Sequence[ResultCell],
    baseline: str | None,
    accuracies: Mapping[str, _Accuracy],
    pairs: Pairs,
    misses_slo: Collection[str],
) -> list[_Arm]:
    plain = next((cell for cell in cells if cell.arm == baseline), None)
    if plain is None:
        return []
    sound = [c.cell for c in cells if not c.void and c.status != "failed" and c.cell not in misses_slo]
    arms = []
    for cell in cells:
        speedup = next((s for s in cell.speedup if s.baseline == plain.arm and not s.includes_engine), None)
        if cell.reference or cell.void or cell.status == "failed" or speedup is None:
            continue
        high = None if speedup.verdict.reason else pairs.bounds(cell, plain).high
        no_faster = high is not None and high < 1 + statistics.SPEED_MARGIN
        lost = cell.left is not None and cell.left.lost and cell.left.rival in (None, *sound)
        slow = cell.cell in misses_slo
        bounds = _bounds(cell, speedup, plain, pairs)
        invalid = any(v.baseline == plain.arm and v.verdict.word == SURELY_WORSE for v in cell.valid_vs)
        kept, accuracy = _kept(cell, plain), accuracies.get(cell.arm)
        arms.append(_Arm(cell, speedup, bounds, kept, accuracy, no_faster, lost, slow, invalid))
    return arms


def _bounds(cell: ResultCell, speedup: Speedup, plain: ResultCell, pairs: Pairs) -> Bounds:
    """Return the interval to show: it agrees with the verdict, also if an adjusted level withholds one."""
    verdict = speedup.verdict
    if verdict.reason:
        return Bounds(None, None)
    if verdict.word == "faster":
        return Bounds(speedup.ci_low, speedup.ci_high)
    if verdict.alone:
        return Bounds(verdict.alone.low, verdict.alone.high, verdict.alone.level)
    return pairs.bounds(cell, plain, tested=True)


def _kept(cell: ResultCell, plain: ResultCell) -> str | None:
    """Return the arm's promise on the tokens of plain decoding on the deployed checkpoint; None: it has others.

    A lossless arm on a checkpoint of its own has them if all answers agree: heads beside frozen weights, for example.
    """
    if cell.claims == "lossless" and any(
        a.baseline == plain.arm and a.items and a.identical == a.items for a in cell.agreement
    ):
        return "same tokens"
    if cell.checkpoints.get(cell.on) != plain.checkpoints.get(plain.on):
        return None
    if cell.claims == "distribution":
        return "same distribution (promised)"
    graded = cell.lossless
    if cell.claims != "lossless" or graded is None or graded.against != plain.arm or graded.grade not in KEPT:
        return None
    if graded.grade == "exact":
        return "same tokens"
    return f"same tokens up to rounding ({graded.identical:,} of {graded.items:,} answers identical)"


def _accuracies(cells: Sequence[ResultCell], baseline: str | None, batch_size: int) -> Mapping[str, _Accuracy]:
    return {cell.arm: _Accuracy(a, batch_size) for cell in cells for a in cell.accuracy_vs if a.baseline == baseline}


def _with_most_items(parts: Sequence[Mapping[str, _Accuracy]]) -> dict[str, _Accuracy]:
    """Return by arm the accuracy over the most items; the first of equal ones."""
    arms = dict.fromkeys(arm for part in parts for arm in part)
    return {arm: max((part[arm] for part in parts if arm in part), key=lambda a: a.found.n) for arm in arms}


def _as_good(arm: _Arm, chosen: _Arm | None) -> bool:
    """Return whether an arm of the same kind cannot be distinguished from a chosen one: their intervals overlap."""
    if chosen is None or arm is chosen or arm.lost or arm.same_tokens != chosen.same_tokens:
        return False
    return not INTERVALS.faster(chosen.cell, arm.cell)


def _choice(arm: _Arm | None) -> Choice | None:
    if arm is None:
        return None
    speedup, cost = arm.speedup, None
    versus = None if arm.accuracy is None else arm.accuracy.found
    if arm.accuracy is not None and versus is not None and versus.difference is not None:
        cost = AccuracyCost(
            difference=versus.difference,
            ci_low=versus.ci_low,
            ci_high=versus.ci_high,
            n=versus.n,
            batch_size=arm.accuracy.batch_size,
        )
    return Choice(
        arm=arm.cell.arm,
        speedup=Estimate(value=speedup.value, ci_low=arm.bounds.low, ci_high=arm.bounds.high),
        level=arm.bounds.level,
        kept=arm.kept,
        accuracy=cost,
    )


def _not_started(cells: Sequence[ResultCell]) -> str | None:
    """Return why no arm ran beside plain decoding, if none started there."""
    if not any(cell.left is not None and cell.left.block == 0 for cell in cells):
        return None
    return "no arm started, since at a larger batch size none was shown to lose no more accuracy than accepted"


def _doubt(arm: _Arm) -> str:
    parts = [] if arm.faster else [_doubt_of_speed(arm)]
    return "; ".join(parts + ([] if arm.allowed else [_doubt_of_tokens(arm)]))


def _doubt_of_speed(arm: _Arm) -> str:
    if (reason := arm.speedup.verdict.reason) is not None:
        again = "; measure again in a new run" if reason.kind == "disturbed" else ""
        return f"its speed has no verdict ({reason.text}{again})"
    needed, unit = _units_needed(arm), "rounds" if APART in arm.cell.flags else "blocks"
    if needed is None:
        return f"whether it is faster is {TOO_CLOSE} ({_timed(arm.cell):,} {unit} were timed)"
    return f"at least {needed:,} {unit} would show whether it is faster ({_timed(arm.cell):,} were timed)"


def _doubt_of_tokens(arm: _Arm) -> str:
    if arm.accuracy is None:
        return f"its tokens are not shown to be those of plain decoding{_ungraded(arm.cell)}, and no answer was scored"
    verdict, loses = arm.accuracy.found.verdict, "whether it loses more accuracy than accepted"
    if verdict.needed is None:
        return f"{loses} is not known: {verdict.reason.text if verdict.reason else TOO_CLOSE}"
    return f"at least {verdict.needed.n:,} items would show {loses} ({arm.accuracy.found.n:,} were scored)"


def _ungraded(cell: ResultCell) -> str:
    """Return the tokens that a grade needs if too few were generated."""
    if cell.lossless is None or cell.lossless.grade != "inconclusive" or cell.lossless.epsilon is not None:
        return ""
    if cell.lossless.why:
        differ = f"{cell.lossless.items - cell.lossless.identical:,} of {cell.lossless.items:,} answers"
        return f" (other tokens in {differ}, not judged: {cell.lossless.why})"
    return f" ({EPSILON_NEEDS})"


def _timed(cell: ResultCell) -> int:
    return cell.rounds if APART in cell.flags else cell.blocks


def _units_needed(arm: _Arm) -> int | None:
    """Return the units at which the shown interval is expected to lie on one side of 2 % faster.

    None: not known, or over `MOST_BLOCKS`. The width of an interval falls with the square root of the number of units.
    """
    value, (low, high, _), timed = arm.speedup.value, arm.bounds, _timed(arm.cell)
    if arm.faster or not value or not low or not high:
        return None
    distance = abs(math.log(value) - math.log(1 + statistics.SPEED_MARGIN))
    if not distance:
        return None
    needed = max(timed + 1, math.ceil(timed * (math.log(high / low) / 2 / distance) ** 2))
    return needed if needed <= MOST_BLOCKS else None

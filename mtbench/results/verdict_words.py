"""Verdicts: a word on a speedup or an accuracy, from the tests of mtbench/statistics.py, and why there is none."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mtbench.statistics import (
    ACCURACY_MARGIN,
    BUDGET_CUT_SHARE,
    DISTURBED,
    INCONCLUSIVE,
    LENGTH_RATIO_RANGE,
    NORMAL,
    SAMPLES_NEEDED_SHARE,
    SPEED_MARGIN,
    UNITS_NEEDED,
    WINDOW_NEEDED_S,
    WINDOW_NEEDED_SYNCHRONISATIONS,
    WORD_LEVELS,
    Difference,
    Needed,
    Ratio,
    Unit,
    holm,
    n_needed,
    paired_difference,
    score_test,
    t_quantile,
    t_tail,
)

OVERRULED = "if it were the only arm"  # the word holds only without Holm's adjustment


class Verdict(NamedTuple):
    """A word from a fixed list and a detail, with its punctuation. `str` joins the two."""

    word: str
    detail: str = ""

    def __str__(self) -> str:
        return self.word + self.detail


def too_few(units: int, unit: Unit = "block") -> str | None:
    """Return why there is no interval, for example `4 blocks, 6 needed`; None if there is one."""
    needed = UNITS_NEEDED[unit]
    return None if units >= needed else f"{units} {unit}{'' if units == 1 else 's'}, {needed} needed"


def too_short(windows_s: Sequence[float], synchronisation_s: float) -> str | None:
    """Return why an arm's timed windows are too short to compare, or None.

    The windows need one second in total. Each window needs ten times the cost of a synchronisation.
    """
    total, shortest = sum(windows_s), min(windows_s, default=0.0)
    if total < WINDOW_NEEDED_S:
        return f"{total:.3g} s timed, {WINDOW_NEEDED_S:g} s needed"
    needed = WINDOW_NEEDED_SYNCHRONISATIONS * synchronisation_s
    return f"window of {shortest:.3g} s, {needed:.3g} s needed" if shortest < needed else None


def too_many_dropped(*, used: int, dropped: int) -> str | None:
    """Return why a cell is void: under 80 % of its samples are left. None if enough are left."""
    if used and used / (used + dropped) >= SAMPLES_NEEDED_SHARE:
        return None
    return f"{used} of {used + dropped} samples left, {SAMPLES_NEEDED_SHARE:.0%} needed"


def length_flags(*, length_ratio: float | None, cut_by_budget: int, items: int) -> list[str]:
    """Return the flags about the length of an arm's answers."""
    low, high = LENGTH_RATIO_RANGE
    flags = []
    if length_ratio is not None and not low <= length_ratio <= high:
        flags.append(f"length_ratio {length_ratio:.3f}, outside {low:g}–{high:g}")
    if items and cut_by_budget / items > BUDGET_CUT_SHARE:
        flags.append(f"{cut_by_budget / items:.0%} cut by the token budget")
    return flags


def speed_verdicts(
    speedups: Sequence[Ratio], doubts: Sequence[str | None], margin: float = SPEED_MARGIN, *, looks: int = 1
) -> list[Verdict]:
    """Return the verdict on each arm of one (suite, batch size, baseline).

    `faster`: 95 % interval above 1 + margin; `slower`: below 1 − margin; `same`: 90 % interval between the two; else
    `inconclusive`. `doubts`: why an arm's times cannot be compared (`too_short`), or None. `looks`: how often the
    verdicts may be looked at while blocks are added; the levels are shared by the looks (union bound), and `speedups`
    are those of `shared_ratio`.
    """
    reasons = [
        doubt or too_few(speedup.units, speedup.unit) or (None if speedup.value else "nothing measured")
        for speedup, doubt in zip(speedups, doubts, strict=True)
    ]
    tested = [i for i, reason in enumerate(reasons) if not reason]
    verdicts = [Verdict(INCONCLUSIVE, f": {reason}") for reason in reasons]

    def interval(place: int, level: float) -> str:
        speedup = speedups[tested[place]]
        assert speedup.value is not None
        assert speedup.log_se is not None
        reach = math.exp(t_quantile(level, speedup.units - 1) * speedup.log_se)
        return f"[{speedup.value / reach:.2f}, {speedup.value * reach:.2f}]"

    adjusted = _adjusted_verdicts([_speed_p(speedups[i], margin) for i in tested], interval, looks)
    for i, verdict in zip(tested, adjusted, strict=True):
        verdicts[i] = verdict
    return verdicts


def disturbed(verdict: str) -> bool:
    """Return whether a verdict on speed is inconclusive because the machine was disturbed."""
    return verdict.startswith(f"{INCONCLUSIVE}: {DISTURBED}")


def withheld(verdict: str) -> bool:
    """Return whether a verdict on speed is inconclusive because measurements are missing or too short."""
    return verdict.startswith(f"{INCONCLUSIVE}: ") and OVERRULED not in verdict


def told(figure: str, interval: str | None, verdict: str = "") -> str | None:
    """Return a figure with its interval, for a sentence; None where measurements are missing: no sentence has it."""
    return None if interval is None or withheld(verdict) else f"{figure} {interval}".strip()


class Bounds(NamedTuple):
    """An interval of a ratio, and its level."""

    low: float | None  # None: too few units
    high: float | None
    level: float = 0.95


def adjusted_bounds(verdict: str) -> Bounds | None:
    """Return the adjusted interval in the detail of a verdict on speed; None if it has none."""
    found = re.search(r"the ([\d.]+)% interval is \[([\d.]+), ([\d.]+)\]", verdict)
    return None if found is None else Bounds(float(found[2]), float(found[3]), round(float(found[1]) / 100, 6))


class AccuracyVerdict(NamedTuple):
    """A verdict on accuracy, and the items that `not worse` takes if the verdict is `inconclusive`."""

    verdict: Verdict
    needed: Needed | None = None


def accuracy_verdicts(
    differences: Sequence[Difference],
    margin: float = ACCURACY_MARGIN,
    doubts: Sequence[str | None] = (),
    *,
    looks: int = 1,
) -> list[AccuracyVerdict]:
    """Return the verdict on each arm of one (suite, batch size, baseline).

    `not worse`: 90 % interval above −margin; `worse`: 95 % interval below 0; `worse by less than the margin`: both;
    `worse than margin`: 95 % interval below −margin; else `inconclusive`, with the number of items needed unless the
    arm already has that many. `doubts`: why an arm cannot be compared, or None. `looks`: see `speed_verdicts`.
    """
    reasons = [
        doubt or ("no items" if not arm.n else None)
        for arm, doubt in zip(differences, doubts or [None] * len(differences), strict=True)
    ]
    verdicts = [AccuracyVerdict(Verdict(INCONCLUSIVE, f": {reason}")) for reason in reasons]
    tested = [i for i, reason in enumerate(reasons) if not reason]

    def interval(place: int, level: float) -> str:
        arm = differences[tested[place]]
        _, low, high, *_ = paired_difference(arm.gained, arm.lost, arm.n, level=level)
        assert low is not None
        assert high is not None
        return f"[{100 * low:+.1f}, {100 * high:+.1f}] points"

    adjusted = _adjusted_verdicts([_accuracy_p(differences[i], margin) for i in tested], interval, looks)
    for i, verdict in zip(tested, adjusted, strict=True):
        verdicts[i] = _with_items_needed(verdict, differences[i], margin, looks * len(tested))
    return verdicts


def accuracy_words(differences: Sequence[Difference], margin: float = ACCURACY_MARGIN, *, looks: int = 1) -> list[str]:
    """Return the words of `accuracy_verdicts` without the details, which take time. Every arm has items."""
    p_values = [_accuracy_p(arm, margin) for arm in differences]
    return [verdict.word for verdict in _adjusted_verdicts(p_values, lambda _place, _level: "", looks)]


def _with_items_needed(verdict: Verdict, arm: Difference, margin: float, arms: int) -> AccuracyVerdict:
    """Return the verdict, and if it is `inconclusive` the items that would decide it, if these are more."""
    needed = n_needed(arm.gained, arm.lost, arm.n, margin, arms=arms) if verdict.word == INCONCLUSIVE else None
    if needed is None or needed.n <= arm.n:
        return AccuracyVerdict(verdict)
    if verdict.detail:  # it has the adjusted interval
        return AccuracyVerdict(verdict, needed)
    observed = needed.difference == arm.difference
    assumed = "at the observed difference" if observed else "if the true difference is 0"
    return AccuracyVerdict(Verdict(INCONCLUSIVE, f", needs n ≈ {needed.n} {assumed}"), needed)


def _speed_p(speedup: Ratio, margin: float) -> dict[str, float]:
    """Return the p-value of each word on speed."""
    assert speedup.value is not None
    assert speedup.log_se is not None
    log, se, df = math.log(speedup.value), speedup.log_se, speedup.units - 1
    low, high = math.log(1 - margin), math.log(1 + margin)
    return {
        "faster": t_tail(log - high, se, df),
        "slower": t_tail(low - log, se, df),
        "same": max(t_tail(log - low, se, df), t_tail(high - log, se, df)),
    }


def _accuracy_p(arm: Difference, margin: float) -> dict[str, float]:
    """Return the p-value of each word on accuracy."""
    at_margin, at_zero = (float(score_test(arm.gained, arm.lost, arm.n, delta)) for delta in (-margin, 0.0))
    return {
        "worse than margin": NORMAL.cdf(at_margin),
        "worse": NORMAL.cdf(at_zero),
        "not worse": NORMAL.cdf(-at_margin),
    }


def _adjusted_verdicts(
    arms: Sequence[Mapping[str, float]], interval: Callable[[int, float], str], looks: int
) -> list[Verdict]:
    """Return each arm's verdict, given its p-value of every word; p-values are adjusted by Holm word by word.

    `interval`: an arm's place and a level -> its interval in words. `looks`: every p-value is multiplied by them.
    """
    if not arms:
        return []
    if looks > 1:
        arms = [{word: min(1.0, looks * p) for word, p in of_arm.items()} for of_arm in arms]
    adjusted = {word: holm([p[word] for p in arms]) for word in arms[0]}
    verdicts = []
    for i, p in enumerate(arms):
        word, alone = _word({word: adjusted[word][i] for word in p}), _word(p)
        if word != INCONCLUSIVE or alone == INCONCLUSIVE:
            verdicts.append(Verdict(word))
            continue
        decisive = alone if alone in WORD_LEVELS else "worse"  # that is, by less than the margin
        times_stricter = adjusted[decisive][i] / p[decisive] if p[decisive] else len(arms)
        level = 1 - 2 * WORD_LEVELS[decisive] / (times_stricter * looks)
        number = f"{len(arms)} arms" if looks == 1 else f"{len(arms)} arms and {looks} looks"
        adjustment = f"adjusted for {number}, the {100 * level:.4g}% interval is {interval(i, level)}"
        detail = f": {alone} {OVERRULED}; {adjustment}"
        verdicts.append(Verdict(word, detail))
    return verdicts


def _word(p: Mapping[str, float]) -> str:
    """Return the strongest word whose p-value is below its level."""
    holds = [word for word, level in WORD_LEVELS.items() if p.get(word, 1.0) < level]
    if {"worse", "not worse"} <= set(holds):
        return "worse by less than the margin"
    return holds[0] if holds else INCONCLUSIVE

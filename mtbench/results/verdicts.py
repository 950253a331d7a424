"""Verdicts on speed and accuracy, from the tests of mtbench/statistics.py; where no test decides, the reason."""

import math
from collections.abc import Callable, Mapping, Sequence

from mtbench.results.figure_formats import Alone, NeededItems, Reason, Verdict
from mtbench.statistics import (
    ACCURACY_MARGIN,
    BUDGET_CUT_SHARE,
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
    Ratio,
    Unit,
    Word,
    holm,
    n_needed,
    paired_difference,
    score_test,
    t_quantile,
    t_tail,
)


def too_few(units: int, unit: Unit = "block") -> Reason | None:
    """Return what there is of an interval's units, for example `4 of 6 blocks`; None if there are enough."""
    needed = UNITS_NEEDED[unit]
    if units >= needed:
        return None
    what = {"second": "part", "conversation": "block"}.get(unit, unit)
    of = {"second": " of at least a second", "conversation": " of conversations"}.get(unit, "")
    return Reason(kind="too few", text=f"{units} of {needed} {what}s{of}")


def too_short(windows_s: Sequence[float], synchronisation_s: float) -> Reason | None:
    """Return why an arm's timed windows are too short to compare, or None.

    The windows need one second in total. Each window needs ten times the cost of a synchronisation.
    """
    total, shortest = sum(windows_s), min(windows_s, default=0.0)
    if total < WINDOW_NEEDED_S:
        return Reason(kind="too short", text=f"{total:.3g} s timed, {WINDOW_NEEDED_S:g} s needed")
    needed = WINDOW_NEEDED_SYNCHRONISATIONS * synchronisation_s
    if shortest >= needed:
        return None
    return Reason(kind="too short", text=f"window of {shortest:.3g} s, {needed:.3g} s needed")


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
    speedups: Sequence[Ratio], doubts: Sequence[Reason | None], margin: float = SPEED_MARGIN, *, looks: int = 1
) -> list[Verdict]:
    """Return the verdict on each arm of one (suite, batch size, baseline).

    `faster`: 95 % interval above 1 + margin; `slower`: below 1 − margin; `same`: 90 % interval between the two; else
    `inconclusive`. `doubts`: why an arm's times cannot be compared (`too_short`), or None. `looks`: how often the
    verdicts may be looked at while blocks are added; the levels are shared by the looks (union bound), and `speedups`
    are those of `shared_ratio`.
    """
    nothing = Reason(kind="nothing measured", text="nothing measured")
    reasons = []
    for speedup, doubt in zip(speedups, doubts, strict=True):
        few = too_few(speedup.units, speedup.unit)
        doubt = few if few and doubt and doubt.kind == "too short" else doubt
        reasons.append(doubt or few or (None if speedup.value else nothing))

    def interval(arm: int, level: float) -> tuple[float, float]:
        speedup = speedups[arm]
        assert speedup.value is not None
        assert speedup.log_se is not None
        reach = math.exp(t_quantile(level, speedup.units - 1) * speedup.log_se)
        return speedup.value / reach, speedup.value * reach

    return _verdicts(reasons, lambda arm: _speed_p(speedups[arm], margin), interval, looks)


def accuracy_verdicts(
    differences: Sequence[Difference],
    margin: float = ACCURACY_MARGIN,
    doubts: Sequence[Reason | None] = (),
    *,
    looks: int = 1,
) -> list[Verdict]:
    """Return the verdict on each arm of one (suite, batch size, baseline).

    `not worse`: 90 % interval above −margin; `worse`: 95 % interval below 0; `worse by less than the margin`: both;
    `worse than margin`: 95 % interval below −margin; else `inconclusive`, with the number of items needed unless the
    arm already has that many. `doubts`: why an arm cannot be compared, or None. `looks`: see `speed_verdicts`.
    """
    nothing = Reason(kind="nothing measured", text="no items")
    reasons = [
        doubt or (None if arm.n else nothing)
        for arm, doubt in zip(differences, doubts or [None] * len(differences), strict=True)
    ]

    def interval(arm: int, level: float) -> tuple[float, float]:
        difference = paired_difference(differences[arm].gained, differences[arm].lost, differences[arm].n, level=level)
        assert difference.ci_low is not None
        assert difference.ci_high is not None
        return difference.ci_low, difference.ci_high

    verdicts = _verdicts(reasons, lambda arm: _accuracy_p(differences[arm], margin), interval, looks)
    arms = looks * reasons.count(None)
    return [
        verdict if verdict.reason else _with_items_needed(verdict, arm, margin, arms)
        for verdict, arm in zip(verdicts, differences, strict=True)
    ]


def accuracy_words(differences: Sequence[Difference], margin: float = ACCURACY_MARGIN, *, looks: int = 1) -> list[Word]:
    """Return the verdicts of `accuracy_verdicts` without the details, which take time. Every arm has items."""
    return [word for word, _ in _adjusted([_accuracy_p(arm, margin) for arm in differences], looks)]


def _with_items_needed(verdict: Verdict, arm: Difference, margin: float, arms: int) -> Verdict:
    """Return the verdict, and if it is `inconclusive` the items that would decide it, if these are more."""
    needed = n_needed(arm.gained, arm.lost, arm.n, margin, arms=arms) if verdict.word == INCONCLUSIVE else None
    if needed is None or needed.n <= arm.n:
        return verdict
    return verdict.changed(needed=NeededItems(n=needed.n, observed=needed.difference == arm.difference))


def _speed_p(speedup: Ratio, margin: float) -> dict[Word, float]:
    assert speedup.value is not None
    assert speedup.log_se is not None
    log, se, df = math.log(speedup.value), speedup.log_se, speedup.units - 1
    low, high = math.log(1 - margin), math.log(1 + margin)
    return {
        "faster": t_tail(log - high, se, df),
        "slower": t_tail(low - log, se, df),
        "same": max(t_tail(log - low, se, df), t_tail(high - log, se, df)),
    }


def _accuracy_p(arm: Difference, margin: float) -> dict[Word, float]:
    at_margin, at_zero = (float(score_test(arm.gained, arm.lost, arm.n, delta)) for delta in (-margin, 0.0))
    return {
        "worse than margin": NORMAL.cdf(at_margin),
        "worse": NORMAL.cdf(at_zero),
        "not worse": NORMAL.cdf(-at_margin),
    }


def _verdicts(
    reasons: Sequence[Reason | None],
    p_values: Callable[[int], Mapping[Word, float]],
    interval: Callable[[int, float], tuple[float, float]],
    looks: int,
) -> list[Verdict]:
    """Return the verdict on each arm. Those with a reason are not tested, and the adjustment does not count them.

    `p_values`: an arm's place -> the p-value of each verdict. `interval`: an arm's place and a level -> its interval.
    """
    tested = [place for place, reason in enumerate(reasons) if reason is None]
    verdicts = [Verdict(word=INCONCLUSIVE, reason=reason) for reason in reasons]
    for place, (word, withheld) in zip(tested, _adjusted([*map(p_values, tested)], looks), strict=True):
        verdicts[place] = Verdict(word=word)
        if withheld is not None:
            alone, level = withheld
            low, high = interval(place, level)
            own = Alone(word=alone, level=level, low=low, high=high, arms=len(tested), looks=looks)
            verdicts[place] = Verdict(word=word, alone=own)
    return verdicts


def _adjusted(arms: Sequence[Mapping[Word, float]], looks: int) -> list[tuple[Word, tuple[Word, float] | None]]:
    """Return each arm's verdict by its p-value of every verdict; p-values are adjusted by Holm for each verdict.

    If only the adjustment withholds a verdict: that verdict, and the level of the interval that decides it. Every
    p-value is multiplied by `looks`.
    """
    if not arms:
        return []
    if looks > 1:
        arms = [{word: min(1.0, looks * p) for word, p in of_arm.items()} for of_arm in arms]
    adjusted = {word: holm([p[word] for p in arms]) for word in arms[0]}
    words: list[tuple[Word, tuple[Word, float] | None]] = []
    for i, p in enumerate(arms):
        word, alone = _word({word: adjusted[word][i] for word in p}), _word(p)
        if word != INCONCLUSIVE or alone == INCONCLUSIVE:
            words.append((word, None))
            continue
        decisive = alone if alone in WORD_LEVELS else "worse"  # that is, by less than the margin
        times_stricter = adjusted[decisive][i] / p[decisive] if p[decisive] else len(arms)
        words.append((word, (alone, 1 - 2 * WORD_LEVELS[decisive] / (times_stricter * looks))))
    return words


def _word(p: Mapping[Word, float]) -> Word:
    holds = [word for word, level in WORD_LEVELS.items() if p.get(word, 1.0) < level]
    if {"worse", "not worse"} <= set(holds):
        return "worse by less than the margin"
    return holds[0] if holds else INCONCLUSIVE

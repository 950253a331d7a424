"""Decide whether our figure agrees with a published one. A compared figure gets one of four verdicts.

A difference has a 95 % interval and a margin: 2 points of accuracy, 2 % of a rate (mtbench/statistics.py).

agrees           the whole interval lies within the margin
differs          part of the interval lies outside the margin, and the interval does not contain zero (1 for a rate)
cannot tell      neither holds; the reason states our number of items and the number needed
not comparable   the figures measure different things; the reason states which (engine, protocol, GPU, benchmark …)

**Accuracy.** Both figures are shares of n items. For the published one, n is the size of the benchmark. It is rounded,
which widens the interval of the difference by half a unit of its last digit on either side. That interval combines
both Wilson intervals (Newcombe 1998, Statistics in Medicine 17:873, method 10) and assumes independent samples. In
fact both figures use the same items, but the paper does not publish which items its arm answered correctly. So the
interval is too wide, never too narrow: `agrees` and `differs` are too rare, never too frequent. If the interval of
the published figure alone exceeds the margin, no n of ours suffices. A mean over benchmarks combines the intervals in
the same way (Zou & Donner 2008, Statistics in Medicine 27:1693); with two terms this is Newcombe's interval.

**A change of accuracy** between two arms is paired. Ours has Tango's interval. The published change has a
normal interval for the benchmark's n and our share of changed items, because the paper does not publish its own share.
It is the difference of two rounded figures, so a whole unit of its last digit is uncertain.

**Rates** (tokens per forward, speedup). Ours has an interval. The published rate has none; apart from its rounding it
counts as exact. The verdict is on the ratio ours / theirs.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mtbench.statistics import ACCURACY_MARGIN, NORMAL, SPEED_MARGIN, UNITS_NEEDED, wilson

Word = Literal["agrees", "differs", "cannot tell", "not comparable", "not run"]
WORDS: tuple[Word, ...] = ("agrees", "differs", "cannot tell", "not comparable", "not run")
Z = NORMAL.inv_cdf(0.975)


class Estimate(NamedTuple):
    """A value with its 95 % interval; the bounds are None if there is no interval."""

    value: float
    ci_low: float | None
    ci_high: float | None

    @property
    def span(self) -> tuple[float, float]:
        """The interval; its bounds must not be None."""
        assert self.ci_low is not None
        assert self.ci_high is not None
        return self.ci_low, self.ci_high


class Finding(NamedTuple):
    """A verdict. `difference`: ours − theirs for shares, ours / theirs for rates; None if they were not compared."""

    word: Word
    why: str = ""
    difference: Estimate | None = None

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


def half_unit(published: str) -> float:
    """Return half a unit of the last digit: the largest rounding error of a printed figure.

    >>> half_unit("24,857"), half_unit("+1.0"), half_unit("1.50")
    (0.5, 0.05, 0.005)
    """
    digits = len(published.partition(".")[2])
    return round(0.5 * 10.0**-digits, digits + 1)


def number(published: str) -> float:
    """Return the value of a printed figure.

    >>> number("24,857"), number("-5.8")
    (24857.0, -5.8)
    """
    return float(published.replace(",", ""))


def combined(terms: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return the sum of weight · estimate. It has an interval only if every estimate has one."""
    value = sum(weight * e.value for weight, e in terms)
    if any(e.ci_low is None for _, e in terms):
        return Estimate(value, None, None)
    below = above = 0.0
    for weight, e in terms:
        low, high = e.span if weight > 0 else e.span[::-1]
        below += (weight * (e.value - low)) ** 2
        above += (weight * (high - e.value)) ** 2
    return Estimate(value, value - math.sqrt(below), value + math.sqrt(above))


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Return the unweighted mean."""
    return combined([(1 / len(estimates), e) for e in estimates])


def share(value: float, n: int) -> Estimate:
    """Return a published share of n items with its Wilson interval."""
    found = wilson(round(value * n), n)
    assert found.ci_low is not None
    assert found.ci_high is not None
    return Estimate(value, min(found.ci_low, value), max(found.ci_high, value))


def change(value: float, discordant: float, n: int) -> Estimate:
    """Return a published change of accuracy on n items. `discordant`: share of items that only one arm has right."""
    reach = Z * math.sqrt((max(discordant, abs(value)) - value**2) / n)  # at least |value| have changed
    return Estimate(value, value - reach, value + reach)


def judge_points(
    ours: Estimate, theirs: Estimate, rounding: float, *, n: int, margin: float = ACCURACY_MARGIN
) -> Finding:
    """Compare two shares, or two changes of shares. n: our items. rounding: the largest rounding error of theirs."""
    apart = combined([(1, ours), (-1, theirs)])
    if apart.ci_low is None or apart.ci_high is None:
        return Finding("cannot tell", f"n = {n:,}: too few for an interval", apart)
    widened = Estimate(apart.value, apart.ci_low - rounding, apart.ci_high + rounding)
    word = _word(widened, (-margin, margin), 0)
    return Finding(word, "" if word != "cannot tell" else _lacking(ours, theirs, margin - rounding, n), widened)


def judge_rate(
    ours: Estimate, theirs: float, rounding: float, *, n: int, unit: str = "item", margin: float = SPEED_MARGIN
) -> Finding:
    """Judge the ratio ours / theirs. n: the units of our interval, which needs at least six."""
    ratio = ours.value / theirs
    if ours.ci_low is None or ours.ci_high is None:
        units = unit if n == 1 else f"{unit}s"
        return Finding("cannot tell", f"n = {n:,} {units}, {UNITS_NEEDED['block']} needed", Estimate(ratio, None, None))
    widened = Estimate(ratio, ours.ci_low / (theirs + rounding), ours.ci_high / (theirs - rounding))
    word = _word(widened, (1 - margin, 1 + margin), 1)
    if word != "cannot tell":
        return Finding(word, "", widened)
    reach, room = math.log(ours.ci_high / ours.ci_low) / 2, math.log1p(margin) - math.log1p(rounding / theirs)
    if room <= 0:
        return Finding(word, f"n = {n:,} {unit}s: the published figure's rounding exceeds the margin", widened)
    return Finding(word, _asked(n, math.ceil(n * (reach / room) ** 2), f" {unit}s"), widened)


def _word(apart: Estimate, margin: tuple[float, float], none: float) -> Word:
    low, high = apart.span
    if margin[0] <= low and high <= margin[1]:
        return "agrees"
    return "cannot tell" if low <= none <= high else "differs"


def _lacking(ours: Estimate, theirs: Estimate, room: float, n: int) -> str:
    """Return n, and the n at which equal shares would agree. Wilson's half-width shrinks about as 1/√(n + z²)."""
    own, other = ((e.span[1] - e.span[0]) / 2 for e in (ours, theirs))
    if other >= room:
        return f"n = {n:,}: theirs alone has ±{100 * other:.1f} points, so no n of ours suffices"
    return _asked(n, math.ceil((n + Z**2) * own**2 / (room**2 - other**2)), "")


def _asked(n: int, needed: int, unit: str) -> str:
    """Return n, and the needed n if it is larger. For a figure at the edge of the margin no n suffices."""
    return f"n = {n:,}{unit}, about {needed:,} needed" if needed > n else f"n = {n:,}{unit}: at the edge of the margin"

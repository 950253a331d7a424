"""Decide whether our figure agrees with a published one. A compared figure gets one of four verdicts.

A difference has a 95 % interval and a margin: 2 points of accuracy, 2 % of a rate (mtbench/statistics.py).

agrees           the whole interval lies within the margin
differs          part of the interval lies outside the margin, and the interval does not contain zero (1 for a rate)
cannot tell      neither holds; the reason states our number of items and the number needed
not comparable   the figures measure different things; the reason states which (engine, protocol, GPU, benchmark …)

A published figure is rounded, which widens the interval of the difference by half a unit of its last digit on either
side.

**Accuracy.** Both figures are shares of n items; for the published one, n is the size of the benchmark. The interval of
the difference combines both Wilson intervals (Newcombe 1998, Statistics in Medicine 17:873, method 10) and assumes
independent samples. In fact both figures use the same items, but the paper does not publish which items its arm
answered correctly. So the interval is too wide, never too narrow: `agrees` and `differs` are too rare, never too
frequent. A mean over benchmarks combines the intervals in the same way (Zou & Donner 2008, Statistics in Medicine
27:1693); with two terms this is Newcombe's interval.

**A change of accuracy** between two arms is paired. Ours has Tango's interval. The published change has the same, for
the benchmark's n: the paper does not publish how many items changed. It is the difference of two rounded figures, so a
whole unit of its last digit is uncertain.

**Rates** (tokens per forward, speedup). Ours has an interval over blocks. The published rate has none; apart from its
rounding it counts as exact.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mtbench.document.formatting import counted
from mtbench.statistics import UNITS_NEEDED, wilson

Word = Literal["agrees", "differs", "cannot tell", "not comparable", "not run"]
WORDS: tuple[Word, ...] = ("agrees", "differs", "cannot tell", "not comparable", "not run")


class Measured(NamedTuple):
    """A figure over n items, or blocks of a rate. Its 95 % interval is [value − below, value + above]."""

    value: float
    below: float  # infinite: there is no interval
    above: float
    n: int

    def on(self, n: int) -> "Measured":
        """Return the figure with its interval over n items."""
        shrunk = math.sqrt(self.n / n)
        return Measured(self.value, self.below * shrunk, self.above * shrunk, n)


class Finding(NamedTuple):
    """A verdict. `difference`: ours − theirs; None if they were not compared."""

    word: Word
    why: str = ""
    difference: Measured | None = None


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


def share(percent: float, n: int) -> Measured:
    """Return a share of n items with its Wilson interval."""
    found = wilson(round(percent * n / 100), n)
    assert found.ci_low is not None
    assert found.ci_high is not None
    return Measured(percent, max(0.0, percent - 100 * found.ci_low), max(0.0, 100 * found.ci_high - percent), n)


def mean(parts: Sequence[Measured]) -> Measured:
    """Return the unweighted mean, over all items."""
    values, below, above, n = zip(*parts, strict=True)
    k = len(parts)
    return Measured(sum(values) / k, math.hypot(*below) / k, math.hypot(*above) / k, sum(n))


def judge(ours: Measured, theirs: Measured, rounding: float, margin: float, unit: str = "item") -> Finding:
    """Return the verdict. rounding: the largest rounding error of theirs; unit: what our n counts.

    Our interval shrinks as 1/√n, from which follows the n at which equal figures would agree.
    """
    value, room, n = ours.value - theirs.value, margin - rounding, f"n = {counted(ours.n, unit)}"
    below, above = math.hypot(ours.below, theirs.above) + rounding, math.hypot(ours.above, theirs.below) + rounding
    apart, own, other = Measured(value, below, above, ours.n), ours.below + ours.above, theirs.below + theirs.above
    if -margin <= value - below and value + above <= margin:
        return Finding("agrees", "", apart)
    if not -above <= value <= below:
        return Finding("differs", "", apart)
    if math.isinf(own):
        return Finding("cannot tell", f"{n}, {UNITS_NEEDED['block']} needed", apart)
    if other >= 2 * room:
        return Finding("cannot tell", f"{n}; theirs alone is less certain than the margin, so no n suffices", apart)
    needed = round(ours.n * own**2 / (4 * room**2 - other**2))
    more = f", about {needed:,} needed" if needed > ours.n else ": at the edge of the margin"
    return Finding("cannot tell", f"{n}{more}", apart)

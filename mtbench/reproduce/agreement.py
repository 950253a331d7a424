"""Whether a figure of ours agrees with a published one. Four words, and what each takes.

A difference has a 95 % interval and a margin: 2 points of accuracy, 2 % of a rate (mtbench/statistics.py).

agrees           the whole interval lies within the margin
differs          the interval is not wholly inside the margin and does not contain zero
cannot tell      neither; it says how many items it has, and how many it would take
not comparable   the figures are not of the same thing; it says why (another engine, protocol, GPU, benchmark …)

**Accuracy.** Both figures are shares of n items. Theirs has its benchmark's n and is rounded, which widens the
interval by half a unit of its last digit on either side. The interval of the difference is made from both Wilson
intervals (Newcombe 1998, Statistics in Medicine 17:873, method 10). It takes the two for independent. They are of the
same items, but which of them the paper's arm had right is not published; so the interval is too wide and never too
narrow, neither word comes too easily, and where the paper's n alone leaves more than the margin, no n of ours suffices.
The difference itself stands beside the verdict. A mean over benchmarks combines the intervals in the same way
(Zou & Donner 2008, Statistics in Medicine 27:1693); with two terms this is Newcombe's interval.

**A change of accuracy** between two arms is paired: ours has its Bonett-Price interval; theirs has that of as many
items with our share of items that changed, for theirs is not published. It is the difference of two rounded figures,
so a whole unit of its last digit is uncertain.

**Rates** (tokens per forward, speedup). Ours has its interval; theirs has none and is taken as exact but for rounding.
What is judged is ours over theirs.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from mtbench.statistics import ACCURACY_MARGIN, NORMAL, SPEED_MARGIN, UNITS_NEEDED, wilson

Word = Literal["agrees", "differs", "cannot tell", "not comparable", "not run"]
WORDS: tuple[Word, ...] = ("agrees", "differs", "cannot tell", "not comparable", "not run")
Z = NORMAL.inv_cdf(0.975)


class Estimate(NamedTuple):
    """A value with its 95 % interval; None where there is none."""

    value: float
    low: float | None
    high: float | None

    @property
    def span(self) -> tuple[float, float]:
        """The interval, which must be there."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high


class Finding(NamedTuple):
    """A verdict. `difference` is in points for shares, ours over theirs for rates; None where none is due."""

    word: Word
    why: str = ""
    difference: Estimate | None = None

    def __str__(self) -> str:
        return f"{self.word} ({self.why})" if self.why else self.word


def half_unit(published: str) -> float:
    """How far a printed figure may be from what it was rounded from.

    >>> half_unit("24,857"), half_unit("+1.0"), half_unit("1.50")
    (0.5, 0.05, 0.005)
    """
    digits = len(published.partition(".")[2])
    return round(0.5 * 10.0**-digits, digits + 1)


def number(published: str) -> float:
    """The value of a printed figure.

    >>> number("24,857"), number("-5.8")
    (24857.0, -5.8)
    """
    return float(published.replace(",", ""))


def combined(terms: Sequence[tuple[float, Estimate]]) -> Estimate:
    """The sum of weight · estimate; no interval if one of them has none."""
    value = sum(weight * e.value for weight, e in terms)
    if any(e.low is None or e.high is None for _, e in terms):
        return Estimate(value, None, None)
    below = above = 0.0
    for weight, e in terms:
        low, high = e.span if weight > 0 else e.span[::-1]
        below += (weight * (e.value - low)) ** 2
        above += (weight * (high - e.value)) ** 2
    return Estimate(value, value - math.sqrt(below), value + math.sqrt(above))


def mean(estimates: Sequence[Estimate]) -> Estimate:
    """Unweighted."""
    return combined([(1 / len(estimates), e) for e in estimates])


def share(value: float, n: int) -> Estimate:
    """A published share of n items, with the Wilson interval of as many right."""
    found = wilson(round(value * n), n)
    assert found.ci_low is not None
    assert found.ci_high is not None
    return Estimate(value, min(found.ci_low, value), max(found.ci_high, value))


def change(value: float, discordant: float, n: int) -> Estimate:
    """A published change of accuracy on n items, of which this share are right with one arm only."""
    reach = Z * math.sqrt((max(discordant, abs(value)) - value**2) / n)  # no fewer can have changed than the change
    return Estimate(value, value - reach, value + reach)


def judge_points(
    ours: Estimate, theirs: Estimate, rounding: float, *, n: int, margin: float = ACCURACY_MARGIN
) -> Finding:
    """Two shares, or two changes of shares. n: items of ours. rounding: how far theirs may be off."""
    apart = combined([(1, ours), (-1, theirs)])
    if apart.low is None or apart.high is None:
        return Finding("cannot tell", f"n = {n:,}: too few for an interval", apart)
    widened = Estimate(apart.value, apart.low - rounding, apart.high + rounding)
    word = _word(widened, (-margin, margin), 0)
    return Finding(word, "" if word != "cannot tell" else _lacking(ours, theirs, margin - rounding, n), widened)


def judge_rate(
    ours: Estimate, theirs: float, rounding: float, *, n: int, unit: str = "item", margin: float = SPEED_MARGIN
) -> Finding:
    """Ours over theirs. n: the units of our interval, of which it takes six at least."""
    ratio = ours.value / theirs
    if ours.low is None or ours.high is None:
        return Finding("cannot tell", f"n = {n:,} {unit}s, {UNITS_NEEDED['item']} needed", Estimate(ratio, None, None))
    widened = Estimate(ratio, ours.low / (theirs + rounding), ours.high / (theirs - rounding))
    word = _word(widened, (1 - margin, 1 + margin), 1)
    if word != "cannot tell":
        return Finding(word, "", widened)
    reach, room = math.log(ours.high / ours.low) / 2, math.log1p(margin) - math.log1p(rounding / theirs)
    if room <= 0:
        return Finding(word, f"n = {n:,} {unit}s: theirs is rounded to more than the margin", widened)
    return Finding(word, _asked(n, math.ceil(n * (reach / room) ** 2), f" {unit}s"), widened)


def _word(apart: Estimate, margin: tuple[float, float], none: float) -> Word:
    low, high = apart.span
    if margin[0] <= low and high <= margin[1]:
        return "agrees"
    return "cannot tell" if low <= none <= high else "differs"


def _lacking(ours: Estimate, theirs: Estimate, room: float, n: int) -> str:
    """The items it would take to find equal shares within the margin. Wilson's reach shrinks as 1/√(n + z²), about."""
    own, other = ((e.span[1] - e.span[0]) / 2 for e in (ours, theirs))
    if other >= room:
        return f"n = {n:,}: theirs alone leaves ±{100 * other:.1f} points, so no n of ours suffices"
    return _asked(n, math.ceil((n + Z**2) * own**2 / (room**2 - other**2)), "")


def _asked(n: int, needed: int, unit: str) -> str:
    """The n there is, and the one needed if it is more: a figure at the margin's edge is told by no n."""
    return f"n = {n:,}{unit}, about {needed:,} needed" if needed > n else f"n = {n:,}{unit}: at the edge of the margin"

"""Required figures ("bars") and whether a measurement meets them."""

from dataclasses import dataclass

from mtbench.statistics import INCONCLUSIVE


@dataclass(frozen=True)
class Bar:
    """A required figure and its measurement."""

    what: str
    asked: str  # `≥ 1.5` or `≤ 0.03`
    found: float | None
    ci: tuple[float | None, float | None]
    beside: str  # the same measured by another clock
    verdict: str | None  # met, missed, inconclusive and why; None if the run judges nothing

    def row(self) -> tuple[str, ...]:
        """Return the row of the closing table."""
        low, high = self.ci
        interval = "" if low is None else f"[{number(low)}, {number(high)}]"
        return self.what, self.asked, number(self.found), interval, self.beside, self.verdict or ""

    def short(self) -> str:
        """Return it without interval, for a line of several."""
        return f"{self.what}: {number(self.found)} ({', '.join(filter(None, (self.asked, self.verdict)))})"


def verdict_of(low: float, high: float, asked: float, *, most: bool) -> str:
    """Return whether the interval meets the required figure, a minimum or, with `most`, a maximum."""
    if most:
        met, missed = high <= asked, low > asked
    else:
        met, missed = low >= asked, high < asked
    if met:
        return "met"
    return "missed" if missed else INCONCLUSIVE


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"

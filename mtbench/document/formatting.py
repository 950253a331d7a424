"""Numbers as tables, sentences, figures and the terminal write them."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from mtbench.statistics import decimals

NONE = "–"  # in place of a value that was not measured
MOST_NAMED = 5  # things of a list


class Spread(Protocol):
    """A record with an interval."""

    @property
    def ci_low(self) -> float | None: ...

    @property
    def ci_high(self) -> float | None: ...


class Estimated(Spread, Protocol):
    """A record with a value and its interval."""

    @property
    def value(self) -> float | None: ...


def bounds(spread: Spread) -> list[float] | None:
    """Return the interval of a record; None if it has none."""
    if spread.ci_low is None or spread.ci_high is None:
        return None
    return [spread.ci_low, spread.ci_high]


def number(value: float | None, digits: int | None = None) -> str:
    """Return a number with so many decimals; by default two for small numbers, and fewer for larger ones."""
    if value is None:
        return NONE
    return _signed(f"{value:,.{decimals(value) if digits is None else digits}f}")


def interval(limits: Sequence[float] | None, scale: float = 1.0, digits: int | None = None) -> str | None:
    """Return `[low, high]`, both multiplied by `scale`; None if there is no interval."""
    if limits is None:
        return None
    low, high = (limit * scale for limit in limits)
    places = decimals(high) if digits is None else digits
    return f"[{number(low, places)}, {number(high, places)}]"


def count(value: int | None) -> str:
    """Return a whole number."""
    return NONE if value is None else f"{value:,}"


def counted(n: int, noun: str) -> str:
    """Return a number of things, in the singular or the plural.

    >>> counted(1, "item"), counted(2000, "item")
    ('1 item', '2,000 items')
    """
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def listed(values: Iterable[object]) -> str:
    """Return values in a row, with commas between them."""
    return ", ".join(map(str, values))


def few(names: Sequence[str], most: int = MOST_NAMED) -> str:
    """Return the first names, and how many more there are."""
    others = len(names) - most
    return listed(names[:most]) + (f" and {others:,} more" if others > 0 else "")


def percent(share: float | None, digits: int = 1) -> str:
    """Return a share in percent, without the sign."""
    return NONE if share is None else number(100 * share, digits)


def points(difference: float | None) -> str:
    """Return a difference of shares in percentage points, with its sign."""
    return NONE if difference is None else _signed(f"{100 * difference:+.1f}")


def times(value: float | None) -> str:
    """Return a factor."""
    return NONE if value is None else f"×{number(value)}"


def seconds(value: float | None) -> str:
    """Return a duration in the unit that suits it."""
    if value is None:
        return NONE
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{number(value * 1e3)} ms" if value < 1 else f"{number(value)} s"


def duration(seconds: float) -> str:
    """Return a duration in words.

    >>> duration(75), duration(600), duration(0.4), duration(9000)
    ('75 s', '10 min', '0.4 s', '2.5 h')
    """
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds > 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 1 or not seconds else f"{seconds:.1f} s"


def joules(value: float | None) -> str:
    """Return an energy in the unit that suits it."""
    if value is None:
        return NONE
    return f"{number(value * 1e3)} mJ" if value < 1 else f"{number(value)} J"


def memory(value: float | None) -> str:
    """Return a number of bytes in the binary unit that suits it."""
    if value is None:
        return NONE
    if value < 1024:
        return f"{value:.0f} B"
    for unit in ("KiB", "MiB"):
        value /= 1024
        if value < 1024:
            return f"{number(value)} {unit}"
    return f"{number(value / 1024)} GiB"


def _signed(text: str) -> str:
    return text.replace("-", "−")

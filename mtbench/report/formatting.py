"""Numbers as tables and sentences write them."""

from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"


def ci(spread: Mapping[str, Any]) -> Sequence[float] | None:
    low, high = spread["ci_low"], spread["ci_high"]
    return None if low is None or high is None else (low, high)


def number(value: float | None) -> str:
    """Two decimals for small numbers, fewer for larger ones."""
    if value is None:
        return NONE
    return f"{value:,.{_digits(value)}f}"


def _digits(value: float) -> int:
    return 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0


def interval(bounds: Sequence[float] | None, scale: float = 1.0, digits: int | None = None) -> str | None:
    if bounds is None:
        return None
    low, high = (bound * scale for bound in bounds)
    places = _digits(high) if digits is None else digits
    return f"[{low:,.{places}f}, {high:,.{places}f}]".replace("-", "−")


def times(value: float | None) -> str:
    return NONE if value is None else f"×{number(value)}"


def points(difference: float | None) -> str:
    return NONE if difference is None else f"{100 * difference:+.1f}".replace("-", "−")


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{number(value * 1e3)} ms" if value < 1 else f"{number(value)} s"


def joules(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{number(value * 1e3)} mJ" if value < 1 else f"{number(value)} J"


def memory(value: float | None) -> str:
    if value is None:
        return NONE
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{number(value) if unit != 'B' else f'{value:.0f}'} {unit}"
        value /= 1024
    return f"{number(value)} GiB"

"""Choose an option's value by load: `tau=0.95..0.7` is 0.95 while no request waits, and 0.7 where a full batch waits.

The load is the number of waiting requests per row, at most 1. Its moving average over steps is divided into levels; a
level holds until the average has left it clearly, so that a value does not flutter. `follow` is a pure function.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mtbench.errors import UserError

LEVELS = 10  # steps between the two values
RECENT = 8  # time constant of the moving average, in forwards
CLEARLY = 0.75  # how far the average is from a level that it leaves, in levels


class Load(NamedTuple):
    """The load so far."""

    average: float = 0.0  # 0 … 1
    level: int = 0  # 0 … LEVELS


def follow(load: Load, queue: int, running: int, rows: int) -> Load:
    """Return the load after another step with so many waiting and running requests."""
    now = min(1.0, max(0, queue + running - rows) / rows)
    average = load.average + (now - load.average) / RECENT
    level = load.level
    if abs(average * LEVELS - level) > CLEARLY:
        level = min(LEVELS, max(0, round(average * LEVELS)))
    return Load(average, level)


@dataclass(frozen=True, slots=True)
class OptionRange:
    """An option and its values without load and under full load."""

    name: str
    idle: float
    full: float

    def value(self, level: int) -> float:
        """Return the option's value at a level of the load.

        >>> [OptionRange("tau", 0.95, 0.7).value(level) for level in (0, 5, 10)]
        [0.95, 0.825, 0.7]
        """
        return round(self.idle + (self.full - self.idle) * level / LEVELS, 6)


def parse_span(text: str) -> OptionRange:
    """Return the span of text such as `tau=0.95..0.7`. Raises UserError for other text."""
    name, _, values = text.partition("=")
    try:
        idle, full = map(float, values.split(".."))
    except ValueError:
        raise UserError(
            f"--adaptive {text!r} is not NAME=IDLE..FULL, the values without load and under full load, such as "
            "`--adaptive tau=0.95..0.7`."
        ) from None
    return OptionRange(name, idle, full)


@dataclass(slots=True)
class LoadPolicy:
    """The policy of a live batch: the value that the load so far gives."""

    span: OptionRange
    rows: int
    load: Load = field(default_factory=Load)

    def __call__(self, queue: int, running: int) -> Mapping[str, float]:
        self.load = follow(self.load, queue, running, self.rows)
        return {self.span.name: self.span.value(self.load.level)}

"""The value that the load chooses: within its span, still where the load is still, never kinder under more load."""

from itertools import pairwise

import pytest
from hypothesis import given, strategies

from mtbench.errors import UserError
from mtbench.serving.adaptive import LEVELS, RECENT, Load, OptionRange, follow, parse_span

SPAN = OptionRange("tau", 0.95, 0.7)
ROWS = strategies.integers(1, 64)
NONE = Load()
LOADS = strategies.lists(strategies.integers(0, 200), max_size=60)


def after(queue: list[int], rows: int, load: Load = NONE) -> Load:
    for waiting in queue:
        load = follow(load, waiting, rows, rows)
    return load


@given(queue=LOADS, rows=ROWS)
def test_the_value_stays_within_its_span(queue: list[int], rows: int) -> None:
    load = after(queue, rows)
    assert 0 <= load.average <= 1
    assert 0.7 <= SPAN.value(load.level) <= 0.95


@given(queue=LOADS, rows=ROWS, waiting=strategies.integers(0, 200))
def test_a_steady_load_gives_a_steady_value(queue: list[int], rows: int, waiting: int) -> None:
    """Wherever it came from, it settles at a level beside the load and stays there."""
    settled = after([waiting] * 12 * RECENT, rows, after(queue, rows))
    assert abs(settled.level - LEVELS * min(1, waiting / rows)) <= 1
    later = [after([waiting] * steps, rows, settled).level for steps in (1, 5, 50)]
    assert later == [settled.level] * 3


@given(queue=LOADS, rows=ROWS, more=strategies.integers(0, 50))
def test_more_waiting_requests_never_raise_the_average(queue: list[int], rows: int, more: int) -> None:
    """The average follows the load; the level is at most one and a half beside it."""
    few, many = after(queue, rows), after([waiting + more for waiting in queue], rows)
    assert many.average >= few.average
    assert many.level >= few.level - 1
    assert abs(many.level - many.average * LEVELS) <= 1.5


def test_a_load_between_two_levels_does_not_make_the_value_flutter() -> None:
    """An average that swings around the middle of two levels changes the value at most once."""
    levels, load = [], after([5] * 200, 10)
    for step in range(200):
        load = follow(load, 5 + step % 2, 10, 10)
        levels.append(load.level)
    assert sum(a != b for a, b in pairwise(levels)) <= 1


@pytest.mark.parametrize("text", ["tau", "tau=0.9..", "tau=0.9..0.8..0.7"])
def test_text_that_is_no_span_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"NAME=IDLE\.\.FULL"):
        parse_span(text)

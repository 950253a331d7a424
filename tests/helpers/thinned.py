"""Parameters of which CI tries a part: neighbours in the grid test the same behaviour. `make slow` tries all."""

from collections.abc import Container, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def one_in(every: int, values: Iterable[Any], always: Container[Any] = ()) -> list[ParameterSet]:
    """Return all values as parameters, a tuple as several; slow are those neither first of `every` nor in `always`."""
    kept = [(value, i % every == 0 or value in always) for i, value in enumerate(values)]
    rows = [(value if isinstance(value, tuple) else (value,), fast) for value, fast in kept]
    return [pytest.param(*row, marks=() if fast else pytest.mark.slow) for row, fast in rows]

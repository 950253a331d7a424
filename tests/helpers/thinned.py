"""Parameters of which CI tries a part: neighbours in the grid test the same behaviour. `make slow` tries all."""

from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def one_in(every: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Return all values as parameters, a tuple as several; those that are not the first of `every` are slow."""
    rows = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*row, marks=() if i % every == 0 else pytest.mark.slow) for i, row in enumerate(rows)]

"""Pairs of processes: what they say of each cell, and of the mean of all cells."""

import math

import pytest

from mtbench.experiments.gate.format import Attribution
from mtbench.experiments.gate.pairs import PairTimes, differences, mean_differences
from mtbench.experiments.gate.timing import Pair


def pair(**ratios: float) -> PairTimes:
    """A pair with head's time over base's by cell; the other cells have no valid times."""
    none = Attribution(prefill=0.0, forward=None, host=None, total=0.0)
    return PairTimes({cell: Pair(1.0, ratio, none) for cell, ratio in ratios.items()}, {}, {})


def test_the_mean_is_over_the_cells_of_one_pair() -> None:
    """A pair in which a cell has no valid time has no mean, and shifts no other."""
    pairs = [pair(a=1.1, b=1.1), pair(a=2.0), pair(a=1.2, b=1.0)]
    assert differences(pairs, ["a", "b"])["a"] == pytest.approx([math.log(1.1), math.log(2.0), math.log(1.2)])
    assert differences(pairs, ["a", "b"])["b"] == pytest.approx([math.log(1.1), 0.0])
    assert mean_differences(pairs, ["a", "b"]) == pytest.approx([math.log(1.1), math.log(1.2) / 2])
    assert mean_differences(pairs, []) == []

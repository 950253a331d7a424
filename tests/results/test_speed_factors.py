"""The parts of tokens per second, and the factors of a speedup: their products are exact."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtbench.results.speed_factors import Parts, Totals, factors, parts

counts = st.integers(1, 10**7)
seconds = st.floats(1e-3, 1e5)
totals = st.builds(
    Totals,
    tokens=counts,
    row_forwards=counts,
    batch_forwards=counts,
    row_slots=counts,
    device_s=seconds,
    decode_s=seconds,
    wall_s=seconds,
)


@given(totals)
def test_tokens_per_second_is_the_product_of_its_parts(arm: Totals) -> None:
    """tpf · R · u · g · d / t = tokens / wall time, to 1e-9, for all counters."""
    found = parts(arm)
    assert found is not None
    product = found.tokens_per_forward * found.rows * found.utilisation * found.host * found.decode_share
    assert product / found.forward_s == pytest.approx(arm.tokens / arm.wall_s, rel=1e-9)


@given(totals, totals)
def test_rate_ratio_is_the_product_of_five_factors(arm: Totals, baseline: Totals) -> None:
    """The factors multiply to rate_ratio, to 1e-9, even if the arms' mean rows per forward differ."""
    found = factors(arm, baseline)
    assert found is not None
    rate_ratio = (arm.tokens / arm.wall_s) / (baseline.tokens / baseline.wall_s)
    assert math.prod(found) == pytest.approx(rate_ratio, rel=1e-9)


def test_parts_by_hand() -> None:
    """Blocks of 8, 8 and 4 rows, 100 forward passes each, 10 % of the rows idle."""
    arm = Totals(tokens=3600, row_forwards=1800, batch_forwards=300, row_slots=2000, device_s=6, decode_s=8, wall_s=10)
    assert parts(arm) == Parts(2, 20 / 3, 0.9, 0.02, 0.75, 0.8)


def test_factors_by_hand() -> None:
    """A factor above 1 means that the arm is better; forward time is the baseline's over the arm's."""
    baseline = Totals(
        tokens=1000, row_forwards=1000, batch_forwards=100, row_slots=1000, device_s=8, decode_s=16, wall_s=20
    )
    arm = Totals(tokens=1000, row_forwards=500, batch_forwards=100, row_slots=1000, device_s=10, decode_s=10, wall_s=20)
    found = factors(arm, baseline)
    assert found is not None
    assert found._asdict() == pytest.approx(
        {
            "tokens_per_forward": 2,
            "forward_time": 0.8,
            "utilisation": 0.5,
            "host": 2,
            "decode_share": 0.625,
        }
    )


@pytest.mark.parametrize("name", Totals._fields)
def test_a_counter_of_zero_leaves_no_factors(name: str) -> None:
    """An arm with a counter of 0 has no parts, and no comparison with it has factors."""
    whole = Totals(*[1.0] * 7)
    empty = whole._replace(**{name: 0.0})
    assert parts(empty) is None
    assert factors(empty, whole) is None
    assert factors(whole, empty) is None

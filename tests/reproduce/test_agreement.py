"""Verdicts: each word where it is due, by figures worked out by hand, and what holds for all figures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtbench.experiments.reproduce.agreement import (
    WORDS,
    Estimate,
    change,
    combined,
    half_unit,
    judge_points,
    judge_rate,
    mean,
    number,
    share,
)
from mtbench.statistics import paired_difference, wilson


def ours(correct: int, n: int) -> Estimate:
    found = wilson(correct, n)
    assert found.value is not None
    return Estimate(found.value, found.ci_low, found.ci_high)


def test_the_difference_of_two_shares_is_newcombes() -> None:
    """His table II, row (a): 56/70 and 48/80, by method 10: 0.2000 [0.0524, 0.3339]."""
    apart = combined([(1, ours(56, 70)), (-1, ours(48, 80))])
    assert [round(x, 4) for x in (apart.value, *apart.span)] == [0.2, 0.0524, 0.3339]


@pytest.mark.parametrize(
    ("correct", "n", "published", "items", "said"),
    [
        (3210, 12032, "26.6", 12032, "agrees"),  # 26.7 %: 0.1 ± 1.1 points
        (3250, 12032, "26.0", 12032, "cannot tell (n = 12,032: at the edge of the margin)"),  # 1.0 ± 1.1
        (3500, 12032, "26.6", 12032, "differs"),  # 29.1 %: 2.5 ± 1.1
        (3345, 12032, "26.6", 12032, "differs"),  # 27.8 %: 1.2 ± 1.2, and beyond the margin
        (422, 1319, "32.0", 1319, "cannot tell (n = 1,319: theirs alone has ±2.5 points, so no n of ours suffices)"),
        (32, 100, "32.0", 12032, "cannot tell (n = 100, about 2,705 needed)"),
        (10, 1319, "32.0", 1319, "differs"),
    ],
)
def test_words_of_accuracies(correct: int, n: int, published: str, items: int, said: str) -> None:
    """Agreement lies within 2 points, a difference excludes none, else it cannot be told."""
    theirs = share(number(published) / 100, items)
    found = judge_points(ours(correct, n), theirs, half_unit(published) / 100, n=n)
    assert str(found) == said


def test_as_many_items_as_are_asked_for_suffice() -> None:
    """With equal shares, about the n that `cannot tell` names gives `agrees`, and fewer do not."""
    theirs = share(0.32, 12032)
    assert judge_points(ours(896, 2800), theirs, 0.0005, n=2800).word == "agrees"
    assert judge_points(ours(832, 2600), theirs, 0.0005, n=2600).word == "cannot tell"


@pytest.mark.parametrize(
    ("low", "value", "high", "published", "said"),
    [
        (1.495, 1.50, 1.505, "1.50", "agrees"),
        (1.0, 1.0, 1.0, "1.00", "agrees"),
        (1.55, 1.56, 1.57, "1.50", "differs"),
        (1.51, 1.53, 1.55, "1.50", "differs"),  # 0.3 to 3.7 % above
        (1.45, 1.50, 1.55, "1.50", "cannot tell (n = 100 items, about 410 needed)"),
        (1.45, 1.50, 1.55, "1.5", "cannot tell (n = 100 items: the published figure's rounding exceeds the margin)"),
        (1.49, 1.515, 1.54, "1.50", "cannot tell (n = 100 items, about 101 needed)"),
    ],
)
def test_words_of_rates(low: float, value: float, high: float, published: str, said: str) -> None:
    """What is judged is ours over theirs, within 2 %, and theirs may be off by half its last digit."""
    found = judge_rate(Estimate(value, low, high), number(published), half_unit(published), n=100)
    assert str(found) == said


def test_without_an_interval_nothing_is_said() -> None:
    """Too few items or blocks."""
    assert str(judge_rate(Estimate(1.5, None, None), 1.5, 0.005, n=4, unit="block")) == (
        "cannot tell (n = 4 blocks, 6 needed)"
    )
    assert judge_points(Estimate(0.1, None, None), share(0.1, 10**6), 0.0005, n=0).word == "cannot tell"


def test_a_change_is_paired() -> None:
    """Of 10,000 items 300 changed here, half of them each way: both changes are told to ±0.34 points."""
    found = paired_difference(150, 150, 10_000)
    assert found.difference is not None
    mine = Estimate(found.difference, found.ci_low, found.ci_high)
    theirs = change(0.001, 0.03, 10_000)
    assert [round(100 * bound, 2) for bound in theirs.span] == [-0.24, 0.44]
    assert judge_points(mine, theirs, 0.001, n=10_000).word == "agrees"
    assert judge_points(mine, change(-0.058, 0.03, 541), 0.001, n=541).word == "differs"


def test_a_change_larger_than_our_discordance_is_no_error() -> None:
    """At least as many items changed as the change says."""
    low, high = change(-0.5, 0.01, 100).span
    assert low < -0.5 < high


shares = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(shares, st.floats(0, 1), st.integers(1, 20_000))
def test_one_word_and_what_it_means(mine: tuple[int, int], value: float, items: int) -> None:
    """Whatever the figures: the interval holds the difference, and the word is what the interval says."""
    theirs = share(round(value, 3), items)
    found = judge_points(ours(*mine), theirs, 0.0005, n=mine[1])
    assert found.word in WORDS
    assert found.difference is not None
    low, high = found.difference.span
    assert low <= found.difference.value <= high
    inside = low >= -0.02 and high <= 0.02
    assert (found.word == "agrees") == inside
    assert (found.word == "differs") == (not inside and (low > 0 or high < 0))
    assert bool(found.why) == (found.word == "cannot tell")


@given(st.lists(shares, min_size=2, max_size=6))
def test_a_mean_is_surer_than_its_parts(parts: list[tuple[int, int]]) -> None:
    """Its interval is as wide as that of independent parts: narrower than the widest of them."""
    estimates = [ours(*part) for part in parts]
    whole = mean(estimates)
    assert math.isclose(whole.value, sum(e.value for e in estimates) / len(parts), abs_tol=1e-12)
    width = whole.span[1] - whole.span[0]
    assert width <= max(e.span[1] - e.span[0] for e in estimates) + 1e-12

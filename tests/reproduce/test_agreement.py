"""Verdicts: each word where it is due, by figures worked out by hand, and what holds for all figures."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtbench.experiments.reproduce.agreement import WORDS, Measured, half_unit, judge, mean, number, share
from mtbench.statistics import paired_difference


def measured(correct: int, n: int) -> Measured:
    return share(100 * correct / n, n)


def test_the_difference_of_two_shares_is_newcombes() -> None:
    """His table II, row (a): 56/70 and 48/80, by method 10: 0.2000 [0.0524, 0.3339]."""
    apart = judge(measured(56, 70), measured(48, 80), 0, 2).difference
    assert apart is not None
    assert [round(x, 2) for x in (apart.value, apart.value - apart.below, apart.value + apart.above)] == [
        20,
        5.24,
        33.39,
    ]


SURE = "; theirs alone is less certain than the margin, so no n suffices"


@pytest.mark.parametrize(
    ("correct", "n", "published", "items", "word", "why"),
    [
        (3210, 12032, "26.6", 12032, "agrees", ""),  # 26.7 %: 0.1 ± 1.1 points
        (3250, 12032, "26.0", 12032, "cannot tell", "n = 12,032 items: at the edge of the margin"),  # 1.0 ± 1.1
        (3500, 12032, "26.6", 12032, "differs", ""),  # 29.1 %: 2.5 ± 1.1
        (3345, 12032, "26.6", 12032, "differs", ""),  # 27.8 %: 1.2 ± 1.2, and beyond the margin
        (422, 1319, "32.0", 1319, "cannot tell", f"n = 1,319 items{SURE}"),
        (32, 100, "32.0", 12032, "cannot tell", "n = 100 items, about 2,604 needed"),
        (10, 1319, "32.0", 1319, "differs", ""),
    ],
)
def test_words_of_accuracies(correct: int, n: int, published: str, items: int, word: str, why: str) -> None:
    """Agreement lies within 2 points, a difference excludes none, else it cannot be told."""
    found = judge(measured(correct, n), share(number(published), items), half_unit(published), 2)
    assert found[:2] == (word, why)


@pytest.mark.parametrize(("n", "word"), [(2800, "agrees"), (2500, "cannot tell")])
def test_about_as_many_items_as_are_asked_for_suffice(n: int, word: str) -> None:
    """With equal shares; `cannot tell` named 2,604."""
    assert judge(measured(n * 32 // 100, n), share(32, 12032), 0.05, 2).word == word


@pytest.mark.parametrize(
    ("value", "reach", "published", "word", "why"),
    [
        (1.50, 0.005, "1.50", "agrees", ""),
        (1.0, 0.0, "1.00", "agrees", ""),
        (1.56, 0.01, "1.50", "differs", ""),
        (1.53, 0.02, "1.50", "differs", ""),  # 0.3 to 3.7 % above
        (1.50, 0.05, "1.50", "cannot tell", "n = 100 blocks, about 400 needed"),
        (1.50, 0.05, "1.5", "cannot tell", f"n = 100 blocks{SURE}"),
        (1.515, 0.024, "1.50", "cannot tell", "n = 100 blocks: at the edge of the margin"),
        (1.50, math.inf, "1.50", "cannot tell", "n = 100 blocks, 6 needed"),
    ],
)
def test_words_of_rates(value: float, reach: float, published: str, word: str, why: str) -> None:
    """Within 2 % of theirs, which is exact but for half its last digit. Without an interval nothing is told."""
    theirs = Measured(number(published), 0, 0, 0)
    found = judge(Measured(value, reach, reach, 100), theirs, half_unit(published), 0.02 * theirs.value, "block")
    assert found[:2] == (word, why)


def test_a_change_is_paired() -> None:
    """Of 10,000 items 300 changed here, half of them each way: ±0.34 points, and ±0.68 on 2,500."""
    found = paired_difference(150, 150, 10_000)
    assert found.ci_low is not None
    ours = Measured(0, -100 * found.ci_low, -100 * found.ci_low, 10_000)
    assert round(ours.below, 2) == 0.34
    assert round(ours.on(2500).below, 2) == 0.68
    assert judge(ours, ours._replace(value=0.1), 0.1, 2).word == "agrees"
    assert judge(ours, ours.on(541)._replace(value=-5.8), 0.1, 2).word == "differs"


shares = st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@settings(deadline=None)  # a busy machine
@given(shares, st.floats(0, 1), st.integers(1, 20_000))
def test_one_word_and_what_it_means(mine: tuple[int, int], value: float, items: int) -> None:
    """Whatever the figures: the word is what the interval says, and only `cannot tell` has a reason."""
    found = judge(measured(*mine), share(round(100 * value, 1), items), 0.05, 2)
    assert found.word in WORDS
    assert found.difference is not None
    low, high = found.difference.value - found.difference.below, found.difference.value + found.difference.above
    inside = low >= -2 and high <= 2
    assert (found.word == "agrees") == inside
    assert (found.word == "differs") == (not inside and (low > 0 or high < 0))
    assert bool(found.why) == (found.word == "cannot tell")


@settings(deadline=None)
@given(st.lists(shares, min_size=2, max_size=6))
def test_a_mean_is_surer_than_its_parts(parts: list[tuple[int, int]]) -> None:
    """Its interval is as wide as that of independent parts: not wider than the widest of them."""
    whole = mean([measured(*part) for part in parts])
    assert math.isclose(whole.value, sum(100 * c / n for c, n in parts) / len(parts), abs_tol=1e-9)
    assert whole.below + whole.above <= max(e.below + e.above for e in (measured(*p) for p in parts)) + 1e-9

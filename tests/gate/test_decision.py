"""The gate's test of times: error rates by simulation with the code itself, and what a look may decide."""

import math

import numpy as np
import numpy.typing as npt
import pytest
import scipy
from hypothesis import given
from hypothesis import strategies as st

from mtbench.experiments.gate.decision import (
    confirmation_pairs,
    confirmed,
    decide,
    looks,
    smallest_detectable,
    time_test,
)

MARGIN = 0.02
SHARED = 0.5  # of a process's variance: the part that all its cells have in common
WITHIN = 0.0005  # standard deviation of what differs between two times inside a process


def draw(
    rng: np.random.Generator, pairs: int, cells: int, process_sd: float, slowdown: float = 0.0, slow_cells: int = 1
) -> dict[str, npt.NDArray[np.float64]]:
    """Return by cell log(head's time / base's time) of each pair; the first `slow_cells` are slower by `slowdown`."""
    shape = (pairs, 2)
    common = rng.standard_normal((*shape, 1))
    own = rng.standard_normal((*shape, cells))
    log_times = process_sd * (math.sqrt(SHARED) * common + math.sqrt(1 - SHARED) * own)
    log_times += WITHIN * rng.standard_normal((*shape, cells))
    d = log_times[:, 1] - log_times[:, 0]
    d[:, :slow_cells] += math.log1p(slowdown)
    return {f"cell{i}": d[:, i] for i in range(cells)}


def gate(
    rng: np.random.Generator, cells: int, process_sd: float, slowdown: float, *, calibrated: bool = True
) -> tuple[str, int]:
    """Return the word over made-up pairs, with the fresh pairs that confirm a FAIL, and how many were used."""
    at = looks(math.sqrt(2) * process_sd if calibrated else None, MARGIN)
    decided = decide(draw(rng, at[-1], cells, process_sd, slowdown), at, MARGIN)
    if decided.word != "FAIL":
        return decided.word, decided.tested
    wanted = confirmation_pairs(decided, at)
    fresh = draw(rng, wanted, cells, process_sd, slowdown)
    return "FAIL" if confirmed(decided, fresh) else "INCONCLUSIVE", decided.tested + wanted


def rates(trials: int, cells: int, process_sd: float, slowdown: float, *, calibrated: bool = True) -> dict[str, float]:
    """Return the share of each word and the mean number of pairs."""
    rng = np.random.default_rng([trials, cells, round(1e4 * process_sd), round(1e4 * slowdown)])
    words, pairs = zip(
        *(gate(rng, cells, process_sd, slowdown, calibrated=calibrated) for _ in range(trials)), strict=True
    )
    shares = {word: words.count(word) / trials for word in ("PASS", "FAIL", "INCONCLUSIVE")}
    return {**shares, "pairs": float(np.mean(pairs))}


@pytest.mark.parametrize("process_sd", [0.005, 0.02])
def test_error_rates(process_sd: float) -> None:
    """No change never fails, 3 % always fails and never passes. `make slow` has more trials and all noises."""
    assert rates(200, 12, process_sd, 0.0)["FAIL"] <= 0.01
    slower = rates(200, 12, process_sd, 0.03)
    assert slower["FAIL"] >= 0.95
    assert slower["PASS"] <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("process_sd", [0.005, 0.01, 0.02])
@pytest.mark.parametrize("cells", [1, 12, 30])
def test_error_rates_over_many_trials(process_sd: float, cells: int) -> None:
    """FAIL without a change at most 1 %, at 3 % at least 95 %; PASS of 3 % at most 0.5 %, of 2 % at most 3.5 %."""
    assert rates(2000, cells, process_sd, 0.0)["FAIL"] <= 0.01
    slower = rates(2000, cells, process_sd, 0.03)
    assert slower["FAIL"] >= 0.95
    assert slower["PASS"] <= 0.005
    assert rates(2000, cells, process_sd, 0.02)["PASS"] <= 0.035


@pytest.mark.parametrize(("process_sd", "least_power"), [(0.01, 0.98), (0.07, 0.1)])
def test_error_rates_without_a_calibration(process_sd: float, least_power: float) -> None:
    """5 % is found and never passes; a build with itself never fails, and 20 pairs or so tell that noise hides 2 %."""
    same = rates(200, 2, process_sd, 0.0, calibrated=False)
    assert same["FAIL"] <= 0.01
    assert same["pairs"] < (12 if process_sd == 0.01 else 28)
    slower = rates(200, 2, process_sd, 0.05, calibrated=False)
    assert slower["FAIL"] >= least_power
    assert slower["PASS"] <= 0.005


def test_noise_without_hope_ends_the_gate() -> None:
    """At the first look if no estimate is near a FAIL; a slowdown that stands out of the noise is still found."""
    unit = np.tile([1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 0.2, -0.2], 5)
    at = looks(None, MARGIN)
    noisy = {"noisy": 0.12 * unit - 0.02, "quiet": 0.001 * unit}
    ended = decide(noisy, at, MARGIN)
    assert (ended.word, ended.tested, ended.next_look, list(ended.noisy)) == ("INCONCLUSIVE", 6, None, ["noisy"])
    assert ended.cells == {"noisy": "INCONCLUSIVE", "quiet": "PASS"}
    assert decide({cell: d[:6] for cell, d in noisy.items()}, at, MARGIN) == ended
    assert decide({"slow": 0.12 * unit + 0.15}, at, MARGIN).word == "FAIL"


def test_looks_grow_with_the_noise_and_end_at_the_cap() -> None:
    """At most five looks, from 6 pairs to ⌈(5.5 s / log 1.02)²⌉ + 6; 40 without a floor; or as asked."""
    for sd in (0.0, 0.002, 0.007, 0.014, 0.021, 0.04):
        at = looks(sd, MARGIN)
        assert at[0] == 6
        assert at[-1] == math.ceil((5.5 * sd / math.log1p(MARGIN)) ** 2) + 6
        assert len(at) <= 5
        assert list(at) == sorted(set(at))
    assert looks(None, MARGIN)[-1] == 40
    assert looks(None, MARGIN, 12)[-1] == 12
    assert looks(0.04, MARGIN, 12)[-1] == 12
    assert looks(0.002, MARGIN, 12)[-1] == 12
    assert looks(None, MARGIN, 3) == (3,)


@given(st.floats(2e-3, 0.1))
def test_the_smallest_detectable_slowdown_takes_40_pairs(sd: float) -> None:
    """In steps of 0.1 %: a margin of that size has its last look within 40 pairs, the next smaller one has not."""
    least = smallest_detectable(sd)
    assert looks(sd, least)[-1] <= 41
    assert looks(sd, least - 0.001)[-1] >= 40
    assert f"{100 * least:g}" == f"{100 * least:.1f}".removesuffix(".0")


def test_one_look_is_the_t_test_of_scipy() -> None:
    """One cell, one look: FAIL exactly where scipy's one-sided t test says so and the estimate reaches the margin."""
    rng = np.random.default_rng(0)
    found = set()
    for shift in np.linspace(-0.02, 0.06, 60):
        d = rng.normal(shift, 0.01, 8)
        word = decide({"cell": d}, [8], MARGIN).word
        slower = scipy.stats.ttest_1samp(d, 0, alternative="greater").pvalue < 0.01 and d.mean() >= math.log1p(MARGIN)
        fast = scipy.stats.ttest_1samp(d, math.log1p(MARGIN), alternative="less").pvalue < 0.025
        assert word == ("FAIL" if slower else "PASS" if fast else "INCONCLUSIVE")
        found.add(word)
    assert found == {"FAIL", "PASS", "INCONCLUSIVE"}


def test_levels_are_shared_by_looks_and_cells() -> None:
    """A p-value between 1 % and 1 % / (looks · tests) does not fail among several looks or cells."""
    d = np.array([0.03, 0.05, 0.01, 0.04, 0.045, 0.005])
    assert 0.001 < scipy.stats.ttest_1samp(d, 0, alternative="greater").pvalue < 0.01
    alone = decide({"cell": d}, [6], MARGIN)
    assert alone.word == "FAIL"
    assert decide({"cell": d}, [6, 12, 18, 24, 30], MARGIN).word == "INCONCLUSIVE"
    noise = {f"cell{i}": d[::-1] * (-1.0) ** np.arange(6) for i in range(9)}
    assert decide({"cell": d, **noise}, [6], MARGIN).word == "INCONCLUSIVE"


def test_one_undecided_cell_keeps_the_gate_from_passing() -> None:
    """All cells must be shown to be as fast; a cell that has passed needs no further pairs."""
    fast, wide = np.zeros(6), np.array([0.02, -0.02, 0.016, -0.016, 0.012, -0.012])
    decided = decide({"fast": fast, "wide": wide}, [6, 10], MARGIN)
    assert decided.word == "INCONCLUSIVE"
    assert decided.cells == {"fast": "PASS", "wide": "INCONCLUSIVE"}
    assert decided.open == ["wide"]
    assert decided.next_look == 10
    longer = np.concatenate((wide, [0.001, -0.001, 0, 0]))
    assert decide({"fast": fast, "wide": longer}, [6, 10], MARGIN).next_look is None


def test_the_mean_over_cells_finds_what_no_cell_shows() -> None:
    """Many cells, each a little slower with noise of its own: their mean fails."""
    rng = np.random.default_rng(3)
    d = {f"cell{i}": rng.normal(0.03, 0.06, 10) for i in range(12)}
    decided = decide(d, [10], MARGIN)
    assert decided.word == "FAIL"
    assert decided.all_cells == "FAIL"
    assert "FAIL" not in decided.cells.values()
    assert confirmed(decided, d) == [None]


def test_the_mean_is_over_cells_of_the_same_pair() -> None:
    """Cell b has no valid time in the first pair. Side by side, values of other pairs would hide what all share."""
    shared = np.tile([0.06, -0.01], 7)
    d = {"a": shared[:12], "b": shared[1:13]}
    assert decide(d, [12], MARGIN).all_cells == "FAIL"
    assert decide(d, [12], MARGIN, means=shared[1:13]).all_cells != "FAIL"
    assert decide(d, [12], MARGIN, means=shared[:11]).all_cells == "INCONCLUSIVE"


def test_fresh_pairs_without_a_slowdown_do_not_confirm() -> None:
    decided = decide({"cell": [0.05, 0.051, 0.052, 0.053, 0.054, 0.055]}, [6, 10], MARGIN)
    assert decided.word == "FAIL"
    assert confirmation_pairs(decided, [6, 10]) == 10
    assert confirmation_pairs(decided._replace(tested=24), [6, 12, 24]) == 24
    assert not confirmed(decided, {"cell": [0.001, -0.001, 0.002, -0.002, 0.0, 0.001]})
    assert not confirmed(decided, {"cell": [0.05]})
    assert confirmed(decided, {"cell": [0.05, 0.06, 0.04, 0.05, 0.05, 0.06]})


def test_a_cell_is_confirmed_by_its_own_fresh_pairs() -> None:
    slow, fast = [0.05, 0.06, 0.04, 0.05, 0.055, 0.045], [0.001, -0.001, 0.002, -0.002, 0.0, 0.001]
    decided = decide({"a": slow, "b": slow}, [6], MARGIN)
    assert confirmed(decided, {"a": slow, "b": slow}) == ["a", "b"]
    assert confirmed(decided, {"a": slow, "b": fast}) == ["a"]


@given(
    st.lists(st.floats(-0.2, 0.2), min_size=12, max_size=12),
    st.integers(0, 12),
)
def test_more_pairs_never_undo_a_word(d: list[float], kept: int) -> None:
    """What a look decided stays when later pairs are added: a resumed gate says the same."""
    before, after = (decide({"cell": d[:n]}, [4, 8, 12], MARGIN) for n in (kept, 12))
    if before.word != "INCONCLUSIVE":
        assert after == before


def test_the_shown_bounds_are_those_of_the_test() -> None:
    """`fail_low` > 1 exactly where the lower bound test holds; `pass_high` < 1 + margin exactly where PASS holds."""
    rng = np.random.default_rng(1)
    for shift in np.linspace(-0.01, 0.05, 40):
        d = rng.normal(shift, 0.008, 6)
        shown = time_test(d, [6], MARGIN, "INCONCLUSIVE", 1)
        word = decide({"cell": d}, [6], MARGIN).word
        assert shown.fail_low is not None
        assert shown.pass_high is not None
        assert shown.ratio is not None
        assert (shown.fail_low > 1 and shown.ratio >= 1 + MARGIN) == (word == "FAIL")
        if word != "FAIL":
            assert (shown.pass_high < 1 + MARGIN) == (word == "PASS")


def test_pairs_needed_decide_if_nothing_changes() -> None:
    """At the named number of pairs the same mean and noise decide; at a tenth less they do not."""
    rng = np.random.default_rng(2)
    for shift in (0.0, 0.012, 0.025):
        unit = rng.standard_normal(6)
        unit = (unit - unit.mean()) / unit.std(ddof=1)
        d = shift + 0.02 * unit
        needed = time_test(d, [6], MARGIN, "INCONCLUSIVE", 1).pairs_needed
        assert needed is not None

        def word(pairs: int, shift: float = shift) -> str:
            many = rng.standard_normal(pairs)
            many = (many - many.mean()) / many.std(ddof=1)
            return decide({"cell": shift + 0.02 * many}, [pairs], MARGIN).word

        assert word(needed + 1) != "INCONCLUSIVE"
        assert word(round(0.9 * needed)) == "INCONCLUSIVE"


def test_the_pairs_needed_are_more_than_there_are() -> None:
    """A budget ended the gate before its second look: the pairs so far would be enough, but a look needs more."""
    d = [0.0, 1e-4, -1e-4, 0.0, 1e-4, 0.0, -1e-4]
    assert time_test(d, [6, 12], MARGIN, "INCONCLUSIVE", 1).pairs_needed == 8

"""The field's words for acceptance: one handful of commits, every owner's figure worked out by hand."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtbench.results import acceptance
from mtbench.results.samples import Measured
from mtbench.runs.plan import Cell

# Three answers of 11, 4 and 1 tokens; the second waited once. 9 forwards, of which 8 committed: 4 3 1 3, 2 1 1, 1.
COMMITS = [[4, 3, 1, 3], [2, 0, 1, 1], [1]]
OFFERED = 8 * 3  # three guesses whenever anything was judged
BATCH_FORWARDS = 5  # the first two answers in one batch of 4 forwards, the third alone


@pytest.mark.parametrize(
    ("owner", "by_hand"),
    [
        # accepted 3+2+0+2 + 1+0+0 + 0 = 8 in 8 drafts
        ("vllm", 1 + Fraction(8, 8)),
        # completion tokens 12 + 5 + 2, a prefill's token in each, over 9 verifications
        ("sglang", Fraction(12 + 5 + 2, 9)),
        # chunks 1 4 3 1 3, 1 2 1 1, 1 1: means 12/5, 5/4, 1
        ("specdec_bench", (Fraction(12, 5) + Fraction(5, 4) + 1) / 3),
        # all steps in one list, the waiting one with 0
        ("spec_bench", Fraction(4 + 3 + 1 + 3 + 2 + 0 + 1 + 1 + 1, 9)),
        # per request 1 + 7/4, 1 + 1/3, 1 + 0
        ("aiperf", (1 + Fraction(7, 4) + 1 + Fraction(1, 3) + 1) / 3),
        ("aiperf_token_weighted", 1 + Fraction(7 + 1 + 0, 4 + 3 + 1)),
        # 16 tokens in 9 forwards
        ("mars", Fraction(16, 9)),
        # 16 tokens in the 5 forwards of the batches
        ("mars_cached", Fraction(16, 5)),
    ],
)
def test_a_figure_is_its_owners(owner: str, by_hand: Fraction) -> None:
    """Each formula, from the same commits, as its owner has it."""
    assert acceptance.derived(COMMITS, OFFERED, BATCH_FORWARDS)[owner] == pytest.approx(float(by_hand), abs=1e-12)


def test_every_owner_has_a_name_and_a_figure() -> None:
    """What is computed is what is shown, in the same order."""
    assert list(acceptance.derived(COMMITS, OFFERED, BATCH_FORWARDS)) == list(acceptance.OWNERS)


def test_our_own_words() -> None:
    """Length and rate leave the forward that committed nothing out; the histogram has it."""
    assert acceptance.length(COMMITS) == 2
    assert acceptance.rate(COMMITS, OFFERED) == pytest.approx(8 / 24)
    assert acceptance.per_position(COMMITS) == [4 / 8, 3 / 8, 1 / 8]
    assert acceptance.histogram(COMMITS) == {"0": 1, "1": 4, "2": 1, "3": 2, "4": 1}


def test_where_nothing_is_offered_there_is_no_rate() -> None:
    """One token per forward has a length, and no figure of those who count drafts; unknown offers, no rate."""
    plain = [[1, 1], [1]]
    assert acceptance.rate(plain, 0) is None
    assert (acceptance.length(plain), acceptance.per_position(plain)) == (1, [])
    of_drafts = ("vllm", "aiperf", "aiperf_token_weighted")
    assert [acceptance.derived(plain, 0, 2)[owner] for owner in of_drafts] == [None] * 3
    assert acceptance.rate(COMMITS, None) is None
    assert None not in acceptance.derived(COMMITS, None, BATCH_FORWARDS).values()
    assert acceptance.derived(COMMITS, OFFERED, None)["mars_cached"] is None


@given(st.lists(st.lists(st.integers(0, 6), max_size=8), max_size=5))
def test_no_commits_break_a_figure(commits: list[list[int]]) -> None:
    """Empty answers and rows that only waited included: a number or None, and positions add up to the length."""
    steps = [step for answer in commits for step in answer if step]
    figures = acceptance.derived(commits, sum(step - 1 for step in steps), sum(map(len, commits)))
    assert all(figure is None or figure >= 0 for figure in figures.values())
    if steps:
        assert 1 + sum(acceptance.per_position(commits)) == pytest.approx(acceptance.length(commits))
        assert acceptance.per_position(commits) == sorted(acceptance.per_position(commits), reverse=True)
    else:
        assert (acceptance.length(commits), acceptance.per_position(commits)) == (None, [])


def measured(lines: list[dict[str, Any]], timings: list[dict[str, Any]]) -> Measured:
    nothing: dict[str, Any] = dict.fromkeys(Cell.model_fields)  # no field of the cell is read here
    by_item = {str(number): line for number, line in enumerate(lines)}
    return Measured(
        Cell.model_construct(**nothing), by_item, timings, {(t["round"], t["block"]) for t in timings}, {}, None
    )


def test_a_cell_tells_what_its_lines_tell() -> None:
    """Offers of all answers, the batches' forwards of round 1 alone."""
    places = zip(COMMITS, (0, 0, 1), strict=True)
    lines = [{"commits": c, "drafted": 3 * sum(n > 0 for n in c), "block": block} for c, block in places]
    timings = [{"round": r, "block": b, "batch_forwards": n} for r, b, n in ((1, 0, 4), (1, 1, 1), (2, 0, 4))]
    told = acceptance.of_cell(measured(lines, timings))
    assert told == {
        "length": 2,
        "rate": pytest.approx(1 / 3),
        "per_position": [0.5, 0.375, 0.125],
        "offered": 24,
        "derived": acceptance.derived(COMMITS, 24, 5),
    }


def test_lines_from_before_offers_were_stored_are_read() -> None:
    """No rate, and no guess at one."""
    told = acceptance.of_cell(measured([{"commits": [2, 1], "block": 0}], []))
    assert told is not None
    assert (told["length"], told["rate"], told["offered"]) == (1.5, None, None)
    assert told["derived"]["mars_cached"] is None


def test_an_engine_that_reports_its_acceptance_is_taken_at_its_word() -> None:
    """Its totals of round 1, and no figure but those made of them."""
    hidden = [{"commits": None, "drafted": None, "block": 0}]
    timings = [
        {"round": 1, "block": 0, "accepted": 30, "drafted": 80, "drafts": 20},
        {"round": 1, "block": 1, "accepted": 6, "drafted": 16, "drafts": 4},
        {"round": 2, "block": 0, "accepted": 99, "drafted": 99, "drafts": 9},
    ]
    told = acceptance.of_cell(measured(hidden, timings))
    assert told is not None
    assert (told["length"], told["rate"], told["offered"]) == (1 + 36 / 24, 36 / 96, 96)
    assert told["per_position"] is None
    known = {owner for owner, figure in told["derived"].items() if figure is not None}
    assert known == {"vllm", "aiperf_token_weighted"}


def test_an_engine_that_hides_its_acceptance_has_none() -> None:
    """Not 0, and not a part of it: one silent block is silence."""
    hidden = [{"commits": None, "drafted": None, "block": 0}]
    told = {"round": 1, "block": 0, "accepted": 3, "drafted": 8, "drafts": 2}
    silent = {"round": 1, "block": 1, "accepted": None, "drafted": None, "drafts": None}
    assert acceptance.of_cell(measured(hidden, [{"round": 1, "block": 0}])) is None
    assert acceptance.of_cell(measured(hidden, [told, silent])) is None
    assert acceptance.of_cell(measured([], [])) is None
    nothing_drafted = told | {"accepted": 0, "drafted": 0, "drafts": 0}
    assert acceptance.reported([nothing_drafted]) == {
        "length": None,
        "rate": None,
        "per_position": None,
        "offered": 0,
        "derived": dict.fromkeys(acceptance.OWNERS),
    }

"""The figures of a load on cases computed by hand, and what is said of two arms."""

from typing import Any

import pytest
from made_loads import line, point, refused

from mtbench.experiments.load.format import RequestLine
from mtbench.experiments.load.request import Limits
from mtbench.experiments.load.runner import window_s
from mtbench.experiments.load.summary import Sent, cell, compare, is_good
from mtbench.hardware import machine
from mtbench.report.phrases import shown_verdict
from mtbench.results.figure_formats import Verdict

SLO: Limits = {"ttft": 0.2, "tpot": 0.03}
SLOW: dict[str, Any] = {"ttft_s": 0.5, "e2e_s": 0.7}


def sent(points: list[Any], scores: Any = None, slo: Limits = SLO, arm: str = "a") -> Sent:
    return Sent(arm, 2.0, points, scores or {}, slo)


def rounds(requests: list[RequestLine], count: int = 5, **given: Any) -> list[Any]:
    return [point(number, requests, **given) for number in range(1, count + 1)]


@pytest.mark.parametrize(
    ("request_", "good"),
    [
        (line(), True),
        (line(ttft_s=0.21), False),
        (line(tpot_s=0.031), False),
        (line(tpot_s=None), True),
        (line(ttft_s=None), False),
        (refused(0), False),
    ],
)
def test_a_good_request(request_: RequestLine, good: bool) -> None:
    assert is_good(request_, SLO) is good


def test_goodput_by_hand() -> None:
    """Per round of 4 s: five requests, of which four are answered, three in time, two of these correctly."""
    requests = [line(0), line(1), line(2), line(3, **SLOW), refused(4)]
    assert cell(sent(rounds([line(forwards=None)]))).tokens_per_forward is None
    scores = {f"{number}.a": [1.0, 0.0, 1.0, 1.0, None] for number in range(1, 6)}
    found = cell(sent(rounds(requests), scores))
    assert (found.sent, found.ok, found.rejected, found.failed) == (25, 20, 5, 0)
    assert (found.good, found.good_and_correct) == (15, 10)
    assert found.achieved_rate.value == 1.0
    assert found.goodput.value == 0.75
    assert found.correct_goodput is not None
    assert found.correct_goodput.value == 0.5
    assert found.goodput.ci_low == pytest.approx(0.75)
    assert found.tokens_per_s.value == 11.0
    assert found.tokens_per_forward is not None
    assert found.tokens_per_forward.value == 2.2
    assert found.ttft.p50.value == pytest.approx(0.1)
    assert found.e2e.p99.value == pytest.approx(0.3 + 0.4 * 0.97)
    assert any("20% rejected" in flag for flag in found.flags)


def test_an_item_counts_once() -> None:
    """Accuracy is over items, each with its first answer; correct goodput is over requests."""
    points = [point(1, [line(0), line(1)]), point(2, [line(1), line(0)])]
    found = cell(sent(points, {"1.a": [1.0, 0.0], "2.a": [1.0, 1.0]}))
    assert found.items == 2
    assert found.accuracy is not None
    assert found.accuracy.value == 0.5
    assert found.good_and_correct == 3


@pytest.mark.parametrize(
    ("method", "forwards", "flagged"),
    [("eagle", 24, True), ("eagle", 12, False), ("mars", 24, False), ("ar", 24, False)],
)
def test_drafts_that_are_hardly_accepted_are_flagged(method: str, forwards: int, flagged: bool) -> None:
    """MARS accepts nothing at its default threshold: that is its option."""
    points = rounds([line(tokens=24, forwards=forwards)])
    found = cell(Sent("a", 2.0, points, {}, SLO, f"{method}:on=ar,engine=graph"))
    assert ("its drafts are hardly ever accepted (1.00 tokens per forward)" in found.flags) is flagged


def test_nothing_answered() -> None:
    found = cell(sent(rounds([refused(0)]), {f"{n}.a": [None] for n in range(1, 6)}))
    assert found.goodput.value == 0.0
    assert found.goodput.ci_low is None
    assert found.e2e.p50.value is None
    assert found.accuracy is not None
    assert found.accuracy.value is None


def test_energy_is_over_all_tokens() -> None:
    found = cell(sent(rounds([line(), line(1)], energy_j=44.0)))
    assert found.j_per_token is not None
    assert found.j_per_token.value == 2.0


def other(scores: Any = None, **given: Any) -> Sent:
    return sent(rounds([line(0, **given), line(1, **given)], arm="b"), scores, arm="b")


def test_words_are_the_projects() -> None:
    base = sent(rounds([line(0), line(1)]))
    [faster] = compare(base, [other(e2e_s=0.15)], 0.02)
    assert faster.speedup.value == pytest.approx(2.0)
    assert faster.speed_verdict.word == "faster"
    assert faster.goodput_verdict.word == "same"
    [slower] = compare(base, [other(**SLOW)], 0.02)
    assert slower.speed_verdict.word == "slower"
    assert slower.goodput_ratio.value is None
    assert shown_verdict(slower.goodput_verdict).text == "inconclusive: nothing measured"
    few = sent(rounds([line(0), line(1)], 3))
    assert shown_verdict(compare(few, [other()], 0.02)[0].speed_verdict).text == "inconclusive: 3 of 5 rounds"


def test_rounds_that_a_quota_stopped_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five others are enough for a word. An arm says how many were stopped."""
    monkeypatch.setattr(machine, "THROTTLED_SHARE", 0.02)  # tests/helpers/common_fixtures.py has none

    def stopped(first: int, count: int = 6, throttled_s: float = 0.5) -> Sent:
        points = rounds([line(0, e2e_s=0.15), line(1, e2e_s=0.15)], count, arm="b")
        lost = [p.changed(throttled_s=throttled_s, requests=[line(0, **SLOW), line(1, **SLOW)]) for p in points]
        return sent([*lost[:first], *points[first:]], arm="b")

    base = sent(rounds([line(0), line(1)], 6))
    [one] = compare(base, [stopped(1)], 0.02)
    assert one.speed_verdict.word == "faster"
    assert one.speedup.value == pytest.approx(2.0)
    [few] = compare(base, [stopped(2)], 0.02)
    assert shown_verdict(few.speed_verdict).text == "inconclusive: 4 of 5 rounds"
    [none] = compare(base, [stopped(6)], 0.02)
    assert shown_verdict(none.speed_verdict).text == "inconclusive: the CPU quota stopped the process"
    flag = "the CPU quota stopped the process in 2 of 6 rounds; raise the quota, or end other programs that share it"
    assert flag in cell(stopped(2)).flags
    assert not any("quota" in flag for flag in cell(stopped(6, throttled_s=0.05)).flags)


def test_times_are_compared_on_the_same_requests() -> None:
    """What only one arm answered says nothing about the other's speed."""
    base = sent(rounds([line(0), line(1, e2e_s=9.0)]))
    arm = sent(rounds([line(0), refused(1)], arm="b"), arm="b")
    assert compare(base, [arm], 0.02)[0].speedup.value == pytest.approx(1.0)


def test_accuracies_are_compared_on_the_same_items() -> None:
    lines, right = [line(n) for n in range(100)], {f"{n}.a": [1.0] * 100 for n in range(1, 6)}
    wrong = {f"{n}.b": [0.0] * 50 + [1.0] * 50 for n in range(1, 6)}
    arm = sent(rounds(lines, arm="b"), wrong, arm="b")
    [found] = compare(sent(rounds(lines), right), [arm], 0.02)
    assert found.items == 100
    assert found.accuracy_difference is not None
    assert found.accuracy_difference.value == -0.5
    assert found.accuracy_verdict == Verdict(word="worse than margin")


def test_a_window_ends_with_the_last_answer() -> None:
    assert window_s([line(start_s=3.9, e2e_s=0.3), refused(1)], planned_s=4.0) == pytest.approx(4.2)
    assert window_s([line(start_s=3.5)], planned_s=4.0) == 4.0

"""What a run says while it decodes, where the output is not a terminal."""

import io

import pytest
from rich.console import Console
from whole import plan_of

from mtbench.report import progress as module
from mtbench.report.progress import RunProgress


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def lines_of(clock: Clock, until: float, judging_s: float = 0.0) -> list[str]:
    """Eleven seconds of loading and of warm-up, then four batches, of 11 seconds each."""
    written = io.StringIO()
    cell = plan_of(limit=4).cells[0]
    with RunProgress(Console(file=written, width=200)) as progress:
        progress.show("loading the models")
        clock.now += 11
        progress.show("warming up ar b1")
        progress.begin(1, 4, until, lambda share: judging_s * share)
        for _ in range(4):
            clock.now += 11
            progress.decoded(cell, 1, 1, {"tokens": 22, "wall_s": 11.0, "row_forwards": 22})
    return written.getvalue().splitlines()


def test_a_line_every_ten_seconds_says_what_is_done_and_the_time_that_is_left(clock: Clock) -> None:
    """Loading and warm-up are not counted in the time of a batch."""
    rest = "cell 1/1 ar@ar/graph b1 | 2 tokens/s, 1.00 tokens/forward"
    assert lines_of(clock, float("inf")) == [
        "loading the models",
        "warming up ar b1",
        f"1/4 batches | {rest}",
        f"2/4 batches, 22 s left | {rest}",
        f"3/4 batches, 11 s left | {rest}",
        f"4/4 batches | {rest}",
    ]


def test_the_time_left_has_judging_in_it(clock: Clock) -> None:
    left = [line.split(" | ")[0] for line in lines_of(clock, float("inf"), judging_s=7.0)]
    assert left[3:5] == ["2/4 batches, 29 s left", "3/4 batches, 18 s left"]


def test_the_time_left_is_at_most_that_of_the_budget(clock: Clock) -> None:
    left = [line.split(" | ")[0] for line in lines_of(clock, until=38.0)]
    assert left[3:5] == ["2/4 batches, 5 s left (budget)", "3/4 batches, 0 s left (budget)"]

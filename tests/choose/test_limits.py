"""The limits of `--slo` in a race, and at its end."""

from made_records import generation_line, timing_line

from mtbench.experiments.choose.limits import misses_slo


def test_a_cell_is_over_a_limit_by_the_blocks_so_far() -> None:
    """Gaps of 10 ms, then of 90 ms. Samples that are not clean do not count."""
    timings = [
        timing_line(block=b, ttft_s=0.1, step_s=[0.1, gap, gap], dropped=dropped)
        for b, (gap, dropped) in enumerate([(0.01, None), (0.09, "slow clock"), (0.09, None)])
    ]
    lines = [[generation_line(item=str(b), block=b, commits=[1, 1, 1])] for b in range(3)]
    assert misses_slo(timings, lines, {"itl": 0.05}) == [False, False, True]
    assert misses_slo(timings, lines, {"ttft": 0.05}) == [True, True, True]
    assert misses_slo(timings, lines, {"ttft": 0.5, "itl": 0.1}) == [False] * 3
    assert misses_slo(timings, lines, {}) == []

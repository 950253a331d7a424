"""The limits of `mtbench choose --slo`: 95th percentiles of the time to the first token and between two commits."""

from collections.abc import Sequence

from mtbench.results.aggregate import commit_gaps, percentiles
from mtbench.results.figure_formats import Percentiles
from mtbench.results.format import ResultCell
from mtbench.runs.formats import GenerationLine, Slo, TimingLine


def over_limits(cells: Sequence[ResultCell], slo_s: Slo) -> list[str]:
    """Return the cells that are over a limit. Plain decoding stays: it is what one has."""
    return [c.cell for c in cells if not c.reference and _over(c.ttft_s, c.commit_latency_s, slo_s)]


def misses_slo(timings: Sequence[TimingLine], lines: Sequence[Sequence[GenerationLine]], slo_s: Slo) -> list[bool]:
    """Return after each number of blocks, from 1 on, whether a cell is over a limit. `lines`: answers by block."""
    first_s: list[float] = []
    gaps_s: list[float] = []
    found = []
    for timing, of_block in zip(timings, lines, strict=False) if slo_s else ():
        if not timing.dropped:
            first_s += [] if timing.ttft_s is None else [timing.ttft_s]
            gaps_s += commit_gaps(of_block, {timing.block: timing.step_s})
        found.append(_over(percentiles(first_s), percentiles(gaps_s), slo_s))
    return found


def _over(first: Percentiles, gap: Percentiles, slo_s: Slo) -> bool:
    measured = {"ttft": first.p95, "itl": gap.p95}
    return any(p95 > limit for name, limit in slo_s.items() if (p95 := measured[name]) is not None)

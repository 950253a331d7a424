"""The times of a pair of processes: medians over rounds, shared blocks, parts that add up, a machine's noise."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_gates import time_test, timed_cell
from made_records import timing_line

from mtbench.experiments.gate import timing
from mtbench.experiments.gate.timed import undecided
from mtbench.records import dump
from mtbench.runs.directory import RunDirectory

CELL = "arithmetic.ar.ar.graph.b1"


def process(folder: Path, lines: list[dict[str, Any]]) -> timing.Process:
    run = RunDirectory(folder)
    run.append(f"timings/{CELL}.jsonl", [dump(timing_line(**line)) for line in lines])
    return timing.read(run, CELL)


def rounds(block: int, *walls: float, **parts: float) -> list[dict[str, Any]]:
    return [{"block": block, "round": i + 1, "wall_s": wall} | parts for i, wall in enumerate(walls)]


def test_the_time_of_a_cell_is_the_sum_of_the_medians(tmp_path: Path) -> None:
    """One outlier in three rounds changes nothing."""
    base = process(tmp_path / "a", rounds(0, 1.0, 1.1, 9.0) + rounds(1, 2.0, 2.0, 2.0))
    head = process(tmp_path / "b", rounds(0, 1.21, 1.21, 1.21) + rounds(1, 2.2, 9.0, 2.2))
    pair = timing.pair(base, head)
    assert pair is not None
    assert pair.base_s == pytest.approx(3.1)
    assert pair.head_s == pytest.approx(3.41)
    assert pair.difference == pytest.approx(math.log(1.1))


def test_only_blocks_of_both_processes_count(tmp_path: Path) -> None:
    """A block whose samples are all dropped in one process leaves the other's sum, too."""
    many = [line for block in range(6) for line in rounds(block, 1.0, 1.0)]
    dropped = [
        line | {"dropped": "device shared with another process"} if line["block"] == 5 else line for line in many
    ]
    pair = timing.pair(process(tmp_path / "a", many), process(tmp_path / "b", dropped))
    assert pair is not None
    assert (pair.base_s, pair.head_s) == (5.0, 5.0)


def test_a_process_that_lost_a_fifth_of_its_samples_is_void(tmp_path: Path) -> None:
    lines = [line for block in range(4) for line in rounds(block, 1.0)]
    lines[0]["dropped"] = "hardware slowdown"
    void = process(tmp_path / "a", lines).void
    assert void == "3 of 4 samples left: hardware slowdown"
    assert process(tmp_path / "b", []).void is not None


def test_too_few_shared_blocks_are_no_pair(tmp_path: Path) -> None:
    base = process(tmp_path / "a", [line for block in range(4) for line in rounds(block, 1.0)])
    assert timing.pair(base, process(tmp_path / "b", rounds(0, 1.0) + rounds(1, 1.0))) is None
    assert timing.pair(base, process(tmp_path / "c", [])) is None


def test_the_parts_add_up(tmp_path: Path) -> None:
    """Prefill, forward passes and the host's part are shares of base's wall time and sum to the whole difference."""
    base = process(
        tmp_path / "a", rounds(0, 2.0, prefill_s=0.5, device_s=1.0) + rounds(1, 2.0, prefill_s=0.5, device_s=1.0)
    )
    head = process(
        tmp_path / "b", rounds(0, 2.4, prefill_s=0.7, device_s=1.1) + rounds(1, 2.0, prefill_s=0.5, device_s=1.0)
    )
    pair = timing.pair(base, head)
    assert pair is not None
    mean = timing.mean_attribution([pair, pair])
    assert mean is not None
    assert mean.forward is not None
    assert mean.host is not None
    assert (mean.prefill, mean.forward, mean.total) == pytest.approx((0.05, 0.025, 0.1))
    assert mean.prefill + mean.forward + mean.host == pytest.approx(mean.total)


def test_hidden_parts_are_not_made_up(tmp_path: Path) -> None:
    """A server tells no time of its forward passes: null, and no host's part."""
    one, other = (process(tmp_path / name, rounds(0, 1.0)) for name in "ab")
    pair = timing.pair(one, other)
    assert pair is not None
    assert pair.attribution.forward is None
    assert pair.attribution.host is None


def test_the_floor_of_known_noise(tmp_path: Path) -> None:
    """sd of the pairs, its bound ×1.29 at ten pairs, the drift per pair and the outliers."""
    rng = np.random.default_rng(0)
    d = rng.normal(0, 0.01, 10)
    walls = [math.exp(0.01 * n) for n in range(20)]  # two processes per pair, each 1 % slower than the last
    processes = [process(tmp_path / str(n), rounds(0, wall, wall, wall * 2)) for n, wall in enumerate(walls)]
    floor = timing.floor_of(CELL, d.tolist(), processes)
    assert floor.pair_sd == pytest.approx(np.std(d, ddof=1))
    assert floor.pair_sd_high / floor.pair_sd == pytest.approx(1.293, abs=1e-3)
    assert floor.drift_per_pair == pytest.approx(0.02)
    assert floor.outliers == pytest.approx(1 / 3)
    assert floor.block_sd == pytest.approx(math.log(2) / math.sqrt(3))


def test_the_noise_is_said_of_a_noisy_cell() -> None:
    """Even if another undecided cell may be slower."""
    tests = [time_test(change, word="INCONCLUSIVE", pairs_needed=9) for change in (0.03, 0.01, 0.02)]
    cells = [timed_cell(number, test=test) for number, test in enumerate(tests)]
    found = [*undecided(cells, [cells[1].cell], "pairs differ by 8 %")]
    assert [finding.cell for finding in found] == [cells[n].cell for n in (1, 0, 2)]
    assert ["pairs differ by 8 %" in finding.text for finding in found] == [True, False, False]
    assert ["about 9 pairs" in finding.text for finding in found] == [False, True, True]

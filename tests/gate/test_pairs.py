"""Pairs of processes: medians over rounds, shared blocks, means of all cells, a machine's noise."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_gates import request
from made_records import timing_line

from mtbench.experiments.gate import timed as timed_stage
from mtbench.experiments.gate.floor import noise_of
from mtbench.experiments.gate.pairs import (
    CellTimes,
    PairRunner,
    PairTimes,
    Times,
    differences,
    mean_differences,
    pair_of,
    read_blocks,
)
from mtbench.plan.directory import RunDirectory
from mtbench.records import dump

CELL = "arithmetic.ar.ar.graph.b1"


def timed(folder: Path, lines: list[dict[str, Any]]) -> tuple[dict[int, Times], str | None]:
    """What a process timed of a cell, and why it is void."""
    run = RunDirectory(folder)
    run.append(f"timings/{CELL}.jsonl", [dump(timing_line(**line)) for line in lines])
    return read_blocks(run, CELL)


def process(folder: Path, lines: list[dict[str, Any]]) -> dict[int, Times]:
    return timed(folder, lines)[0]


def rounds(block: int, *walls: float, **parts: float) -> list[dict[str, Any]]:
    return [{"block": block, "round": i + 1, "wall_s": wall} | parts for i, wall in enumerate(walls)]


def test_the_time_of_a_cell_is_the_sum_of_the_medians(tmp_path: Path) -> None:
    """One outlier in three rounds changes nothing."""
    base = process(tmp_path / "a", rounds(0, 1.0, 1.1, 9.0) + rounds(1, 2.0, 2.0, 2.0))
    head = process(tmp_path / "b", rounds(0, 1.21, 1.21, 1.21) + rounds(1, 2.2, 9.0, 2.2))
    pair = pair_of(base, head)
    assert pair is not None
    assert pair.base.wall_s == pytest.approx(3.1)
    assert pair.head.wall_s == pytest.approx(3.41)
    assert pair.difference == pytest.approx(math.log(1.1))


def test_the_time_of_other_tokens_is_that_of_as_many(tmp_path: Path) -> None:
    """Head takes as long for half of the tokens: twice the time per token."""
    base = process(tmp_path / "a", rounds(0, 1.0, tokens=8) + rounds(1, 1.0, tokens=2))
    pair = pair_of(base, process(tmp_path / "b", rounds(0, 1.0, tokens=4) + rounds(1, 1.0, tokens=1)))
    assert pair is not None
    assert (pair.base.wall_s, pair.head.wall_s) == (2.0, 4.0)
    assert pair.difference == pytest.approx(math.log(2))


def test_only_blocks_of_both_processes_count(tmp_path: Path) -> None:
    """A block whose samples are all dropped in one process leaves the other's sum, too."""
    many = [line for block in range(6) for line in rounds(block, 1.0, 1.0)]
    dropped = [
        line | {"dropped": "device shared with another process"} if line["block"] == 5 else line for line in many
    ]
    pair = pair_of(process(tmp_path / "a", many), process(tmp_path / "b", dropped))
    assert pair is not None
    assert (pair.base.wall_s, pair.head.wall_s) == (5.0, 5.0)


def test_a_process_that_lost_a_fifth_of_its_samples_is_void(tmp_path: Path) -> None:
    lines = [line for block in range(4) for line in rounds(block, 1.0)]
    lines[0]["dropped"] = "hardware slowdown"
    _, void = timed(tmp_path / "a", lines)
    assert void == "3 of 4 samples left: hardware slowdown"
    assert timed(tmp_path / "b", [])[1] is not None


def test_too_few_shared_blocks_are_no_pair(tmp_path: Path) -> None:
    base = process(tmp_path / "a", [line for block in range(4) for line in rounds(block, 1.0)])
    assert pair_of(base, process(tmp_path / "b", rounds(0, 1.0) + rounds(1, 1.0))) is None
    assert pair_of(base, process(tmp_path / "c", [])) is None


def test_the_floor_of_known_noise() -> None:
    """sd of the pairs, and its bound ×1.29 at ten pairs."""
    d = np.random.default_rng(0).normal(0, 0.01, 10)
    floor = noise_of(CELL, d.tolist())
    assert floor.pair_sd == pytest.approx(np.std(d, ddof=1))
    assert floor.pair_sd_high / floor.pair_sd == pytest.approx(1.293, abs=1e-3)


def a_pair(**ratios: float) -> PairTimes:
    """A pair with head's time over base's by cell; the other cells have no valid times."""
    return PairTimes({cell: CellTimes(Times(1.0, 1), Times(ratio, 1)) for cell, ratio in ratios.items()}, {})


def test_the_mean_is_over_the_cells_of_one_pair() -> None:
    """A pair in which a cell has no valid time has no mean, and shifts no other."""
    pairs = [a_pair(a=1.1, b=1.1), a_pair(a=2.0), a_pair(a=1.2, b=1.0)]
    assert differences(pairs, ["a", "b"])["a"] == pytest.approx([math.log(1.1), math.log(2.0), math.log(1.2)])
    assert differences(pairs, ["a", "b"])["b"] == pytest.approx([math.log(1.1), 0.0])
    assert mean_differences(pairs, ["a", "b"]) == pytest.approx([math.log(1.1), math.log(1.2) / 2])
    assert mean_differences(pairs, []) == []


def test_the_order_of_the_processes_is_abba() -> None:
    """Base begins as often as head, never twice more in a row, so that a drift of the machine cancels."""
    runner = PairRunner(request(), (), (), lambda _: None)
    begun = [runner.first("pairs", number) for number in range(1, 9)]
    assert begun in ([0, 1, 1, 0] * 2, [1, 0, 0, 1] * 2, [0, 0, 1, 1] * 2, [1, 1, 0, 0] * 2)


def test_void_times_of_head_alone_fail() -> None:
    """Beyond a fifth of the pairs. In both builds they decide nothing; up to a fifth is a note."""
    valid = a_pair(a=1.0)
    for faults, pairs, level in (
        ((None, "hot"), 1, "fail"),
        (("hot", "hot"), 1, "inconclusive"),
        ((None, "hot"), 4, "note"),
        (("hot", "hot"), 4, "note"),
    ):
        [finding] = timed_stage._void([PairTimes({}, {"a": faults}), *[valid] * pairs], ["a"])
        assert (finding.kind, finding.level) == ("void", level)

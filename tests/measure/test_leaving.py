"""Cells that leave a run: they decode no further blocks, and are compared on the blocks that they have."""

from collections.abc import Sequence

import pytest
from made_records import cell_data, generation_line, timing_line

from mtbench.plan.formats import Elimination
from mtbench.plan.plan import Group
from mtbench.results.comparisons import compare
from mtbench.results.samples import CellData, _valid

PLAIN, GONE = "ar@ar/graph", "mars:tau=0.8@mars/graph"


def test_blocks_count_for_the_cells_that_were_there() -> None:
    """A block counts for a cell if all cells have it that left no earlier than the cell."""
    group = Group(
        suite="a", batch_size=1, blocks=[[n] for n in range(8)], rounds=[8], cells=["p", "a", "b"], batching="static"
    )
    dropped = {("p", 7), ("a", 1)}
    timings = {
        name: [timing_line(block=b, dropped="noise" if (name, b) in dropped else None) for b in range(blocks)]
        for name, blocks in (("p", 8), ("a", 6), ("b", 4))
    }
    left = {n: Elimination(cell=n, block=b, lost=False, reason="") for n, b in (("a", 6), ("b", 3))}
    valid = _valid(group, timings, {}, left)
    assert {name: {b for _, b in pairs} for name, pairs in valid.items()} == {
        "p": {0, 1, 2, 3, 4, 5, 6},
        "a": {0, 2, 3, 4, 5},
        "b": {0, 2},  # its line of block 3 came while another worker let it leave
    }


def test_in_a_race_a_cell_has_the_blocks_that_it_decoded() -> None:
    """It came in later: its blocks count for it and beside it, and the earlier ones for the others."""
    group = Group(
        suite="a", batch_size=1, blocks=[[n] for n in range(12)], rounds=[12], cells=["p", "a", "b"], batching="static"
    )
    blocks = {"p": range(12), "a": range(12), "b": range(5, 12)}
    dropped = {("b", 6), ("p", 1)}
    timings = {
        name: [timing_line(block=b, dropped="noise" if (name, b) in dropped else None) for b in own]
        for name, own in blocks.items()
    }
    valid = _valid(group, timings, {}, {}, raced=True)
    assert {name: {b for _, b in pairs} for name, pairs in valid.items()} == {
        "p": {*range(12)} - {1, 6},
        "a": {*range(12)} - {1, 6},
        "b": {*range(5, 12)} - {6},
    }


def test_a_ratio_is_of_the_blocks_that_both_have() -> None:
    def data(arm: str, walls: Sequence[float], **given: object) -> CellData:
        lines = [generation_line(item=f"a/{b}/0", block=b) for b in range(len(walls))]
        return cell_data(
            lines, [timing_line(block=b, wall_s=w, tokens=1) for b, w in enumerate(walls)], arm=arm, **given
        )

    group = {PLAIN: data(PLAIN, [2.0] * 6 + [50.0] * 4), GONE: data(GONE, [1.0] * 6, baselines=[PLAIN])}
    [speedup] = compare(group, 0.0, 0.02)[GONE].speedup
    assert speedup.value == pytest.approx(2)
    assert speedup.verdict.word == "faster"
    shared_by_looks = compare(group, 0.0, 0.02, looks=5)[GONE].speedup[0]
    assert (shared_by_looks.value, shared_by_looks.ci_low) == (speedup.value, speedup.ci_low)

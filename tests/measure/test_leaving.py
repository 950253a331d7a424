"""Cells that leave a run: they decode no further blocks, and are compared on the blocks that they have."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from made_records import cell_data, generation_line, timing_line
from stages import assemble, generate, score
from stored import stored_lines
from whole import Quiet, figures, finish, start

from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Elimination, Race
from mtbench.plan.plan import Group, RunRequest
from mtbench.plan.request import Execution
from mtbench.records import dump
from mtbench.results.comparisons import compare
from mtbench.results.samples import CellData, _valid

PLAIN, GONE = "ar@ar/graph", "mars:tau=0.8@mars/graph"


class After:
    """Lets a cell leave after so many blocks; counts the blocks by its calls."""

    def __init__(self, run: RunDirectory, cell: str, blocks: int) -> None:
        self.run, self.cell, self.blocks = run, cell, blocks

    def __call__(self, cells: Sequence[str]) -> Sequence[Elimination]:
        ended = len(stored_lines(self.run, f"timings/{self.cell}.jsonl"))
        if ended != self.blocks or stored_lines(self.run, "eliminated.jsonl"):
            return []
        return [Elimination(cell=self.cell, block=ended, lost=True, reason="surely slower")]


@pytest.mark.whole
def test_a_cell_that_left_decodes_no_further_blocks_and_is_compared_on_its_own(tmp_path: Path) -> None:
    """Interrupted in between, it stays away; the other cells are those of a run in which it never left."""
    request = RunRequest(method=("ar", "mars:tau=0.8"), limit=16, batch_size=(2,), rounds=1, max_new_tokens=6)
    whole = finish(start(tmp_path / "whole", request))
    run = start(tmp_path / "race", request)
    [group] = [g for g in whole["cells"] if g["arm"] == GONE]
    cell = group["cell"]
    race = Race(schema_version=2, request={}, slo_s={}, refused={}, looks={"arithmetic b2": [6, 8]})
    run.write_json("race.json", dump(race))
    with pytest.raises(KeyboardInterrupt):
        generate(run, Quiet(until=13), Execution(leave=After(run, cell, 6)))
    generate(run, Quiet(), Execution(leave=After(run, cell, 6)))
    score(run)
    results = assemble(run)

    plain, gone = results.cells
    assert [len(stored_lines(run, f"timings/{c.cell}.jsonl")) for c in (plain, gone)] == [8, 6]
    assert (plain.status, gone.status) == ("ok", "left")
    assert gone.left is not None
    assert (gone.left.block, gone.left.lost) == (6, True)
    assert (gone.items, gone.blocks, plain.blocks) == (12, 6, 8)
    assert gone.speedup[0].value is not None
    assert gone.accuracy_vs[0].n == gone.agreement[0].items == 12
    assert "looks" in results.statistics.method
    stayed = figures(dump(plain))
    assert stayed == figures(whole["cells"][0])


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

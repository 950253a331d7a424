"""Read the stored lines of each cell and sum over those that count.

A block counts in a round only if every arm of the group has a clean timing line for it. Over several rounds a block
has the mean of its lines. A sum is None if an engine hides one of its values.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from mtbench import statistics
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import Environment, FailureLine, GenerationLine, Scores, TimingLine
from mtbench.runs.plan import Cell, Group, Plan
from mtbench.runs.stored_lines import read_answers, read_timings
from mtbench.statistics import Totals


@dataclass(eq=False)
class CellData:
    """The stored lines of one cell."""

    cell: Cell
    lines: dict[str, GenerationLine]  # by item
    timings: list[TimingLine]
    valid: set[tuple[int, int]]  # (round, block) pairs that are clean for every arm of the group
    scores: Mapping[str, float]  # by item
    error: str | None

    @cached_property
    def samples(self) -> list[TimingLine]:
        """The timing lines that count, ordered by block and round."""
        kept = [t for t in self.timings if (t.round, t.block) in self.valid]
        return sorted(kept, key=lambda t: (t.block, t.round))

    def by_block(self, name: str) -> npt.NDArray[np.float64]:
        """Return the field `name` of the timing lines per block, (K,). No engine may hide it."""
        return statistics.mean_by([t.block for t in self.samples], [getattr(t, name) for t in self.samples])

    def total(self, name: str) -> float | None:
        """Return the field `name` summed over blocks; None without a sample, or if a line hides it."""
        if not self.samples or any(getattr(t, name) is None for t in self.samples):
            return None
        return float(self.by_block(name).sum())

    def by_round(self, name: str) -> list[float]:
        """Return the field `name` per round, summed over the blocks that every round has."""
        rounds = sorted({t.round for t in self.samples})
        blocks = [{t.block for t in self.samples if t.round == r} for r in rounds]
        shared = set.intersection(*blocks) if blocks else set()
        return [sum(getattr(t, name) for t in self.samples if t.round == r and t.block in shared) for r in rounds]

    def counted(self, name: str) -> int | None:
        """Return the field `name` of the generation lines summed over all answers; None if a line hides it."""
        return add(getattr(line, name) for line in self.lines.values())

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(len(line.token_ids) for line in self.lines.values())

    @cached_property
    def totals(self) -> Totals | None:
        """What the arm did on the blocks; None without a sample, or if an engine hides a part of it."""
        names = ("tokens", "row_forwards", "batch_forwards", "device_s", "decode_s", "wall_s")
        totals = [self.total(name) for name in names]
        known = [total for total in totals if total is not None]
        if len(known) < len(names):
            return None
        slots = [t.rows * (t.batch_forwards or 0) for t in self.samples]
        row_slots = float(statistics.mean_by([t.block for t in self.samples], slots).sum())
        return Totals(row_slots=row_slots, **dict(zip(names, known, strict=True)))

    @property
    def repeated(self) -> tuple[int, int]:
        """Requests of later rounds with the tokens of round 1, and all requests of later rounds."""
        identical = [(t.identical, t.items) for t in self.timings if t.identical is not None]
        return sum(same for same, _ in identical), sum(items for _, items in identical)


def add(counts: Iterable[int | None]) -> int | None:
    """Return the sum; None if one of the counts is hidden."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def read(run: RunDirectory, plan: Plan) -> dict[str, CellData]:
    """Return the data of every cell of the plan, by the cell's name.

    Raise UserError for a line that does not belong to the plan.
    """
    errors = {failure.cell: failure.error for failure in run.read_lines("failures.jsonl", FailureLine)}
    scores = run.read("scores.json", Scores).root if run.has("scores.json") else {}
    sessions = run.read("environment.json", Environment).sessions
    data = {}
    for group in plan.groups:
        suite = plan.suite(group.suite)
        order = {item.item: number for number, item in enumerate(suite.items)}
        timings = {name: read_timings(run, group, name, sessions) for name in group.cells}
        valid = _valid(group, timings, errors)
        for name in group.cells:
            lines = read_answers(run, group, suite, name)
            data[name] = CellData(
                cell=plan.cell(name),
                lines={line.item: line for line in sorted(lines, key=lambda line: order[line.item])},
                timings=timings[name],
                valid=valid,
                scores=scores.get(name, {}),
                error=errors.get(name),
            )
    return data


def _valid(group: Group, timings: Mapping[str, list[TimingLine]], errors: Mapping[str, str]) -> set[tuple[int, int]]:
    """Return the (round, block) pairs for which every cell that did not fail has a clean line."""
    clean = [{(t.round, t.block) for t in timings[name] if not t.dropped} for name in group.cells if name not in errors]
    return set.intersection(*clean) if clean else set()

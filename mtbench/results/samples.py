"""Read the stored lines of each cell and sum over those that count.

A block counts in a round only if every arm of the group has a clean timing line for it. In a race an arm may wait while
others decode a block: it counts for these. An arm that left the run counts only for its own blocks, and is compared on
those. An arm that lost too many of its own lines has no samples, and the
others are compared without it. All blocks that count have the same number of rounds: those that the plan repeats, or,
if these are too few for an interval, all blocks with round 1. A block has the median of its rounds. Blocks with turns
of the same conversations are one unit; of times in servers, blocks in a row that last a second. A sum is None if an
engine hides one of its values.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mtbench import statistics
from mtbench.decoding.arms import is_served
from mtbench.measure import cache_probe
from mtbench.plan.formats import CacheRecord, Elimination, GenerationLine, Readings, Scores, StoredReading, TimingLine
from mtbench.plan.plan import Cell, Group, Item
from mtbench.plan.run import Run
from mtbench.results import verdicts
from mtbench.results.speed_factors import Totals
from mtbench.statistics import Ratio, Unit

Value = Callable[[TimingLine], float | None]
STRETCHED = 1.1  # ratio of two arms' stretches above which their times are not compared
SERVED_UNIT_S = 1.0  # least time of a unit of servers' times (`statistics.units_of`)
FAR_OFF = 4.0  # times its usual time, above which a block's time is not the arm's speed


@dataclass(eq=False)
class CellData:
    """The stored lines of one cell."""

    cell: Cell
    lines: dict[str, GenerationLine]  # by item
    timings: list[TimingLine]
    valid: set[tuple[int, int]]  # (round, block) pairs that are clean for every arm of the group, or none
    repeated_blocks: int  # blocks 0 … of which the plan times every round
    unit_of: Mapping[int, int]  # block -> its unit: the first block of the same conversations
    timed_unit_of: Mapping[int, int]  # block -> its unit of the intervals of times
    scores: Mapping[str, float]  # by item
    error: str | None
    left: Elimination | None = None
    cache: CacheRecord = cache_probe.UNPROBED  # probes of its prefix cache
    unit: Unit = "block"  # of the intervals of times; round: arms decoded one after the other
    validity: Mapping[str, float] = field(default_factory=dict)  # by item: 1 if the answer is what it must be
    readings: Mapping[str, StoredReading] = field(default_factory=dict)  # of scored items

    def beside(self, other: "CellData") -> tuple["CellData", "CellData"] | None:
        """Return both with the samples that count for both; None if they differ and have none in common."""
        if self.valid == other.valid:
            return self, other
        shared = self.valid & other.valid
        return (dataclasses.replace(self, valid=shared), dataclasses.replace(other, valid=shared)) if shared else None

    @cached_property
    def samples(self) -> list[TimingLine]:
        """The timing lines that count, ordered by block and round."""
        clean = [t for t in self.timings if (t.round, t.block) in self.valid]
        kept = [t for t in clean if t.block < self.repeated_blocks]
        if self.unit != "round":
            first, of = [t for t in clean if t.round == 1], self.timed_unit_of
            units, units_first = ({of[t.block] for t in lines} for lines in (kept, first))
            if len(units) < min(len(units_first), statistics.UNITS_NEEDED[self.unit]):
                kept = first
        return sorted(kept, key=lambda t: (t.block, t.round))

    @property
    def stretch(self) -> float:
        """The factor by which other processes delayed the arm's server on the processor; 1: not known."""
        counted = [(t.wanted_s, t.cpu_s) for t in self.samples if t.wanted_s and t.cpu_s]
        return sum(wanted_s for wanted_s, _ in counted) / sum(cpu_s for _, cpu_s in counted) if counted else 1.0

    @property
    def not_clean(self) -> int:
        """Timing lines that no arm may use, because a line of this block and round is missing or dropped."""
        return sum((t.round, t.block) not in self.valid for t in self.timings)

    def per_unit(self, of: str | Value) -> npt.NDArray[np.float64]:
        """Return a field of the timing lines, or another value of them, per unit of the intervals of times.

        A round has its own samples: arms that are compared have the same. A hidden value is NaN.
        """
        values = np.array([getattr(t, of) if isinstance(of, str) else of(t) for t in self.samples], float)
        if self.unit != "round":
            return self._by_unit(values)
        rounds = np.unique([t.round for t in self.samples], return_inverse=True)[1]
        return np.bincount(rounds, weights=values).astype(np.float64)

    def ratio(self, above: str | Value, below: str | Value) -> Ratio:
        """Return Σ above / Σ below over these units; no value without a sample, or if an engine hides one."""
        return statistics.ratio_of_totals([self.per_unit(above)], [self.per_unit(below)], unit=self.unit)

    def by_block(self, name: str) -> npt.NDArray[np.float64]:
        """Return the field `name` of the timing lines per unit of blocks, (K,). No engine may hide it."""
        return self._by_unit([getattr(t, name) for t in self.samples])

    def _by_unit(self, values: statistics.Values) -> npt.NDArray[np.float64]:
        """Return the sum over each unit's blocks of the block's median; values: one per sample."""
        medians = statistics.median_by([t.block for t in self.samples], values)
        units = [self.timed_unit_of[block] for block in sorted({t.block for t in self.samples})]
        return np.bincount(np.unique(units, return_inverse=True)[1], weights=medians).astype(np.float64)

    def tokens_and_forwards(self, *, with_surplus: bool = False) -> tuple[list[int], list[int]] | None:
        """Return the tokens of the answers and their forwards per unit of blocks; None if an engine hides forwards.

        `with_surplus`: with the tokens that a last forward accepted behind the answer's end.
        """
        lines = self.lines.values()
        return self.sums((g.block, len(g.token_ids) + (g.surplus or 0) * with_surplus, g.forwards) for g in lines)

    def tokens_and_steps(self) -> tuple[list[int], list[int]] | None:
        """Return the tokens of the answers and the forwards that committed any, per unit; None if they are hidden.

        Tokens that a last forward accepted beyond the budget count, as in DeepSpec.
        """
        counts = list[tuple[int, int, int | None]]()
        for line in self.lines.values():
            beyond = line.surplus or 0 if line.finish_reason == "length" else 0
            steps = None if line.commits is None else sum(commit > 0 for commit in line.commits)
            counts.append((line.block, sum(line.commits or ()) + beyond, steps))
        return self.sums(counts)

    def sums(self, counts: Iterable[tuple[int, int | None, int | None]]) -> tuple[list[int], list[int]] | None:
        """Return two sums per unit of blocks; None if a count is hidden. counts: block, and its part of either sum."""
        first, second = Counter[int](), Counter[int]()
        for block, one, other in counts:
            if one is None or other is None:
                return None
            first[self.unit_of[block]] += one
            second[self.unit_of[block]] += other
        return [first[unit] for unit in sorted(first)], [second[unit] for unit in sorted(first)]

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
        """The arm's work on the blocks; None without a sample, or if an engine hides a part of it."""
        names = ("tokens", "row_forwards", "batch_forwards", "device_s", "decode_s", "wall_s")
        totals = [self.total(name) for name in names]
        given = [total for total in totals if total is not None]
        if len(given) < len(names):
            return None
        slots = [t.rows * (t.batch_forwards or 0) for t in self.samples]
        row_slots = float(self._by_unit(slots).sum())
        return Totals(row_slots=row_slots, **dict(zip(names, given, strict=True)))

    @cached_property
    def unread(self) -> dict[str, str]:
        """Why the score's rule finds no result, by item."""
        return {item: reading.unread for item, reading in self.readings.items() if reading.unread}

    @property
    def values(self) -> dict[str, float]:
        """By scored item: its score by value, or its only score; empty if no item has one by value."""
        by_value = {item: reading.by_value for item, reading in self.readings.items() if reading.by_value is not None}
        return {**self.scores, **by_value} if by_value else {}

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


def read(run: Run) -> dict[str, CellData]:
    """Return the data of every cell of the plan, by the cell's name."""
    plan, files = run.plan, run.directory
    errors = {failure.cell: failure.error for failure in run.failures}
    left = {line.cell: line for line in run.left}
    scores = files.read("scores.json", Scores).root if files.has("scores.json") else {}
    valid = files.read("valid.json", Scores).root if files.has("valid.json") else {}
    readings = files.read("readings.json", Readings).root if files.has("readings.json") else {}
    data = {}
    for group in plan.groups:
        suite = plan.suite(group.suite)
        order = {item.item: number for number, item in enumerate(suite.items)}
        unit_of = _units(group, suite.items)
        clean = _valid(group, run.timings, errors, left, raced=run.race is not None)
        served = any(is_served(plan.cell(name).engine) for name in group.cells)
        timed = _timed_units(unit_of, [t for n in group.cells for t in run.timings[n]]) if served else unit_of
        alone: Unit = "block" if len({*unit_of.values()}) == len(unit_of) else "conversation"
        unit: Unit = "round" if plan.request.apart else alone if timed == unit_of else "second"
        for name in group.cells:
            data[name] = CellData(
                cell=plan.cell(name),
                lines={line.item: line for line in sorted(run.answers[name], key=lambda line: order[line.item])},
                timings=run.timings[name],
                valid=clean.get(name, set()),
                repeated_blocks=min(group.rounds),
                unit_of=unit_of,
                timed_unit_of=timed,
                scores=scores.get(name, {}),
                error=errors.get(name),
                left=left.get(name),
                cache=cache_probe.read(files, name),
                unit=unit,
                validity=valid.get(name, {}),
                readings={item: r for item, r in readings.get(name, {}).items() if item in scores.get(name, {})},
            )
    return data


class FarOff(NamedTuple):
    """A block whose time is far off the cell's other blocks."""

    block: int
    wall_s: float
    ratio: float  # how many times as long as usual


def far_off(group: Iterable[CellData]) -> dict[str, FarOff]:
    """Return by cell the block that is furthest from the others, if it takes over FAR_OFF times as long as usual.

    Longer work is no such block. So its time, and its time per forward (per token, if forwards are hidden), must be far
    above the cell's medians; and its time over the median of the other arms on the same block, above the ratio's.
    """
    walls: dict[str, dict[int, float]] = {}
    paces: dict[str, dict[int, float]] = {}
    for data in group:
        walls[data.cell.cell] = _by_block(data.samples, [t.wall_s for t in data.samples])
        pace = [t.wall_s / (t.batch_forwards or t.tokens or 1) for t in data.samples]
        paces[data.cell.cell] = _by_block(data.samples, pace)
    of_cells = {}
    for cell, of_block in walls.items():
        beside = {b: [of[b] for name, of in walls.items() if name != cell and b in of] for b in of_block}
        row = _over_usual({b: wall_s / np.median(beside[b]) for b, wall_s in of_block.items() if beside[b]})
        alone = _over_usual(of_block)
        ratios = {b: min(ratio, alone[b], row.get(b, ratio)) for b, ratio in _over_usual(paces[cell]).items()}
        worst = max(ratios, key=ratios.__getitem__, default=None)
        if worst is not None and ratios[worst] > FAR_OFF:
            of_cells[cell] = FarOff(worst, of_block[worst], ratios[worst])
    return of_cells


def _by_block(timings: Sequence[TimingLine], values: Sequence[float]) -> dict[int, float]:
    blocks = [t.block for t in timings]
    return dict(zip(sorted(set(blocks)), statistics.median_by(blocks, values).tolist(), strict=True))


def _over_usual(values: Mapping[int, float]) -> dict[int, float]:
    usual = np.median(list(values.values())) if values else 1.0
    return {block: float(value / usual) for block, value in values.items()}


def _units(group: Group, items: Sequence[Item]) -> dict[int, int]:
    """Return block -> the first block with a turn of the same conversation; a block of first turns is its own."""
    block_of = {index: block for block, indices in enumerate(group.blocks) for index in indices}
    units: dict[int, int] = {}
    for block, indices in enumerate(group.blocks):
        before = items[indices[0]].follows
        units[block] = block if before is None else units.get(block_of.get(before, block), block)
    return units


def _timed_units(unit_of: Mapping[int, int], timings: Iterable[TimingLine]) -> dict[int, int]:
    """Return block -> its unit: units that follow each other, and last a second for each arm."""
    least_s: dict[int, float] = {}
    for line in timings:
        if not line.dropped:
            least_s[line.block] = min(line.wall_s, least_s.get(line.block, line.wall_s))
    firsts = sorted(set(unit_of.values()))
    lasts_s = [sum(least_s.get(block, 0.0) for block, first in unit_of.items() if first == one) for one in firsts]
    numbers = statistics.units_of(lasts_s, SERVED_UNIT_S)
    first_of = dict(reversed([*zip(numbers, firsts, strict=True)]))
    merged = {first: first_of[number] for number, first in zip(numbers, firsts, strict=True)}
    return {block: merged[first] for block, first in unit_of.items()}


def _valid(
    group: Group,
    timings: Mapping[str, list[TimingLine]],
    errors: Mapping[str, str],
    left: Mapping[str, Elimination],
    *,
    raced: bool = False,
) -> dict[str, set[tuple[int, int]]]:
    """Return by cell the (round, block) pairs that count: those for which every compared cell has a clean line.

    raced: a cell need not have decoded a block; then it counts for the others, and not for the cell.

    A cell is compared only with cells that did not leave before it. A cell that lost too many of its own
    lines is not compared and has none. If all cells lost too many, the lines that all of them have left count.
    """
    until = {name: left[name].block if name in left else math.inf for name in group.cells}
    present = {name: [t for t in timings[name] if t.block < until[name]] for name in group.cells if name not in errors}
    ran = {name: {(t.round, t.block) for t in lines} for name, lines in present.items()}
    clean = {name: {(t.round, t.block) for t in lines if not t.dropped} for name, lines in present.items()}
    lost = {name: len(present[name]) - len(pairs) for name, pairs in clean.items()}
    void = {n for n in clean if lost[n] and verdicts.too_many_dropped(used=len(clean[n]), dropped=lost[n])}
    if len(void) == len(clean):
        void = set()
    wanted = set.union(set(), *ran.values())
    lacking = {name: (ran[name] if raced else wanted) - clean[name] for name in clean if name not in void}
    valid = {name: clean.get(name, wanted) for name in group.cells if name not in void}
    for name in valid:
        beside = (pairs for other, pairs in lacking.items() if until[other] >= until[name])
        valid[name] = valid[name].difference(*beside)
    return valid

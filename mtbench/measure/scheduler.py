"""Say which block of a group is next, which cells decode it, and until when.

Later rounds repeat blocks of the first, so they come after it. Blocks that are on disk are not decoded again.

In a race within a time budget those arms take part in a block that can all get a decision in the time that is left:
first one arm of each method, in the order of the plan. The others wait. They come in when there is time: an arm has the
blocks that it decoded, and plain decoding has all.
"""

import random
import time
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median_low
from typing import NamedTuple

from mtbench.measure.block_writer import BlockWriter
from mtbench.measure.time_budget import FEWEST_ARMS, MARGIN, Part, TimeBudget, fitting, needs_s, part_of
from mtbench.plan.plan import MIN_BLOCKS, Cell

OWN_BLOCKS = 3  # of a cell, whose median is its time; with fewer it counts with the median of all cells


class Visit(NamedTuple):
    """Blocks that the same cells decode side by side, on servers of their own."""

    number: int  # 0: the same servers as in other rounds
    round: int
    cells: Sequence[Cell]
    chains: list[list[int]]  # of blocks. One worker decodes a chain in order


class Scheduler:
    """The order of a group's blocks. Making it deletes the lines of blocks that some live cell has not finished.

    In a race that is plain decoding, or one of the cells that have `recovered` from a failure.
    """

    def __init__(self, writer: BlockWriter, budget: TimeBudget, recovered: Collection[str] = ()) -> None:
        self.writer, self.group, self.suite, self.budget = writer, writer.group, writer.suite, budget
        self.apart, self.seed = writer.plan.request.apart, writer.plan.request.seed
        self.raced = writer.run.race is not None
        self.limited = self.raced and budget.seconds is not None  # arms may wait while others decode
        self.share_until = float("inf")  # by time.monotonic: the end of this group's share of the time budget
        self._whole = set[tuple[str, int]]()  # rounds that a cell alone has finished
        methods = [cell.method for cell in writer.cells]
        self._turn = {cell.cell: methods[:n].count(cell.method) for n, cell in enumerate(writer.cells)}
        self._taking_part = list[Cell]()
        self.workers = 1  # that decode blocks side by side
        self.done = self._keep_finished_blocks(recovered)
        self.tried_s: float | None = None  # time of a block of plain decoding before the first one
        self.warm_up_s = 0.0  # time of plain decoding's warm-up, which stands for that of others

    @property
    def deadline(self) -> float:
        """The time at which the last block has ended, by time.monotonic."""
        return min(self.share_until, self.budget.until)

    @property
    def todo(self) -> list[tuple[int, int]]:
        """(round, block) in the order in which they run; rounds count from 1. None if no cell is live."""
        if not self.writer.live():
            return []
        rounds = enumerate(self.group.rounds, start=1)
        return [(r, b) for r, blocks in rounds for b in range(blocks) if (r, b) not in self.done]

    @property
    def work(self) -> int:
        """Batches to decode."""
        return sum((cell.cell, r) not in self._whole for r, _ in self.todo for cell in self.writer.live())

    def visits(self) -> Iterator[Visit]:
        """Yield what is to be decoded, in order."""
        for round_, of_round in groupby(self.todo, key=itemgetter(0)):
            blocks = [block for _, block in of_round]
            if not self.apart:
                yield Visit(0, round_, self.writer.cells, self._chains(blocks))
                continue
            cells = self.writer.cells
            order = random.Random(f"{self.seed}/{self.group.batch_size}").sample(cells, len(cells))
            turned = order if round_ % 2 else order[::-1]  # a drift of the machine affects all cells alike
            for number, cell in enumerate(turned, start=round_ * len(order)):
                if (cell.cell, round_) not in self._whole:
                    yield Visit(number, round_, [cell], self._chains(blocks))

    def order(self, visit: Visit, block: int, cells: Sequence[Cell]) -> list[Cell]:
        """Return those of the cells that are live in the random order in which they decode a block."""
        cells = self.writer.live(cells)
        random.Random(f"{self.seed}/{self.group.batch_size}/{visit.round}/{block}").shuffle(cells)
        return cells

    def end(self, round_: int, block: int) -> None:
        """Note that a block has ended; in a race with plain decoding's line, apart in the cells of a visit only."""
        run, plain = self.writer.run, next((c for c in self.writer.live() if self.raced and c.is_reference), None)
        if not self.apart and (plain is None or any(line.block == block for line in run.timings[plain.cell])):
            self.done.add((round_, block))

    def is_later(self, block: int) -> bool:
        """Return whether a block has later turns of conversations."""
        return self.suite.items[self.group.blocks[block][0]].follows is not None

    def _chains(self, blocks: Sequence[int]) -> list[list[int]]:
        """Return the blocks in chains: a later turn is decoded right after the one that it follows."""
        chains: list[list[int]] = []
        for block in blocks:
            if self.is_later(block) and chains and chains[-1][-1] == block - 1:
                chains[-1].append(block)
            else:
                chains.append([block])
        return chains

    def block_s(self, cell: Cell) -> float | None:
        """Return the expected time of a cell's block; None if no block of the group was seen.

        One odd block does not change it much.
        """
        timings = self.writer.run.timings
        seen = [line.wall_s for line in timings[cell.cell]]
        if len(seen) < OWN_BLOCKS:
            seen = [line.wall_s for name in self.group.cells for line in timings[name]]
        return median_low(seen) if seen else self.tried_s

    def part(self, warm: Collection[tuple[str, int]] = (), cells: Sequence[Cell] | None = None) -> Part:
        """Return what the cells, by default the live ones, have yet to do. warm: of a session."""
        cells = self.writer.live() if cells is None else cells
        block_s = [seen_s / self.workers for cell in cells if (seen_s := self.block_s(cell)) is not None]
        ended = {cell.cell: self._ended(cell) for cell in cells}
        started = [name for name, _ in warm]
        return part_of(self.group, cells, block_s, ended=ended, started=started, warm_up_s=self.warm_up_s)

    def taking_part(self, warm: Collection[tuple[str, int]]) -> list[Cell]:
        """Return the live cells that decode the next block. warm: of a session.

        Those come first that need the fewest blocks. An arm that takes part goes on until the time is surely too short
        for it; another comes in if there is a margin.
        """
        live = self.writer.live()
        if not self.limited or not live:
            return live
        there = [cell for cell in live if cell.is_reference or self.writer.begun(cell) or not self.late]
        plain, *others = sorted(there, key=lambda c: (not c.is_reference, self._needed(c), self._turn[c.cell]))
        part, left_s = self.part(warm, [plain, *others]), self.deadline - time.monotonic()
        now = sum(cell in self._taking_part for cell in live)
        n = max(fitting(left_s, [part]), min(now, fitting(MARGIN * left_s, [part])), FEWEST_ARMS)
        self._taking_part = [plain, *others[: n - 1]]
        return self._taking_part

    def _ended(self, cell: Cell) -> int:
        return sum(not line.dropped for line in self.writer.run.timings[cell.cell])

    def _needed(self, cell: Cell) -> int:
        return max(0, MIN_BLOCKS - self._ended(cell))

    @property
    def late(self) -> bool:
        """Whether too few blocks are to come for an arm that begins now."""
        return bool(self.done) and len(self.todo) < MIN_BLOCKS

    def leave_out_hopeless(self, warm: Collection[tuple[str, int]], *, ended: bool = False) -> None:
        """Let arms leave the race that have not begun, and cannot get a decision even beside plain decoding alone.

        ended: the time is over.
        """
        live = self.writer.live()
        waiting = [cell for cell in live[1:] if not self.writer.begun(cell)] if self.limited else []
        if not waiting or not self.writer.begun(live[0]):
            return
        left_s, out = self.budget.left_s, ended or self.late
        if gone := [c for c in waiting if out or self.part(warm, [live[0], c]).needs_s() > left_s]:
            most = len(self.writer.cells)
            reason = self.budget.too_short(most - len(gone), most, [self.part(warm, [live[0], *waiting])])
            if self.late:
                reason += f", or prompts for {MIN_BLOCKS} blocks more"
            self.writer.leave_out(gone, reason)

    def has_time(self, warm: Collection[tuple[str, int]], cells: Sequence[Cell]) -> bool:
        """Return whether a block of these cells, with the starts of servers, is expected to end before the deadline.

        The first block of all begins in any case: only one was seen, which may be odd.
        """
        part, begun = self.part(warm, cells), any(map(self.writer.begun, self.writer.cells))
        expected_s = (sum(part.starts_s) + self.workers * sum(part.block_s)) if begun else 0.0
        return time.monotonic() + expected_s <= self.deadline

    def time_to_start(self, cell: Cell, warm: Collection[tuple[str, int]]) -> tuple[float, bool]:
        """Return the time in which a cell's server must be ready, in seconds, and whether a late one leaves the race.

        Time for a decision among the other cells is kept.
        """
        others = [other for other in self.writer.live(self._taking_part) if other is not cell]
        waited = cell in self._taking_part[1:] and not self.writer.begun(cell)
        may_leave = waited and len(others) >= FEWEST_ARMS
        kept_s = needs_s([self.part(warm, others)]) if may_leave else 0.0
        return max(0.0, self.deadline - time.monotonic() - kept_s), may_leave

    def _keep_finished_blocks(self, recovered: Collection[str]) -> set[tuple[int, int]]:
        """Delete the lines of blocks that some live cell has not finished; return the others, (round, block).

        Conversations are kept whole, since a new server has no cached turns. Of cells that decode apart, delete those
        of rounds that a cell has not finished: a visit has one server. In a race plain decoding tells which blocks are
        whole, since its line comes last.
        """
        run = self.writer.run
        finished = {
            cell.cell: {(line.round, line.block) for line in run.timings[cell.cell]} for cell in self.writer.live()
        }
        if self.apart:
            rounds = {r: {(r, block) for block in range(n)} for r, n in enumerate(self.group.rounds, start=1)}
            self._whole = {(name, r) for name, own in finished.items() for r in rounds if rounds[r] <= own}
            finished = {name: set().union(*(rounds[r] for n, r in self._whole if n == name)) for name in finished}
        plain = [
            own
            for name, own in finished.items()
            if self.raced and (name in recovered or self.writer.plan.cell(name).is_reference)
        ]
        done = set.intersection(*(plain or finished.values())) if finished else set()
        for round_, blocks in enumerate(self.group.rounds, start=1):
            for chain in self._chains(range(blocks)):
                whole = {(round_, block) for block in chain}
                done = done if whole <= done else done - whole
        for name, own in finished.items():
            run.keep_blocks(name, own if self.apart else done)
        return done

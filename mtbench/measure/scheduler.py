"""Say which block of a group is next, which cells decode it, and until when.

Later rounds repeat blocks of the first, so they come after it. Blocks that are on disk are not decoded again.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from mtbench.decoding.arms import is_served
from mtbench.document.formatting import duration
from mtbench.measure.block_writer import BlockWriter
from mtbench.measure.time_budget import FEWEST_ARMS, Part, TimeBudget, needs_s, part_of
from mtbench.plan.plan import Cell


class Visit(NamedTuple):
    """Blocks that the same cells decode side by side, on servers of their own."""

    number: int  # 0: the same servers as in other rounds
    round: int
    cells: Sequence[Cell]
    chains: list[list[int]]  # of blocks. One worker decodes a chain in order


class Scheduler:
    """The order of a group's blocks. Making it deletes the lines of blocks that some live cell has not finished."""

    def __init__(self, writer: BlockWriter, budget: TimeBudget, *, apart: bool, seed: int) -> None:
        self.writer, self.group, self.suite, self.budget = writer, writer.group, writer.suite, budget
        self.apart, self.seed = apart, seed
        self.deadline = budget.until  # by time.monotonic: no block begins later
        self.may_leave_out = False  # arms for which the time budget has no room
        self._whole = set[tuple[str, int]]()  # rounds that a cell alone has finished
        self.done = self._keep_finished_blocks()

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

    @property
    def shapes(self) -> Collection[int]:
        """A block of each number of rows that is to be decoded."""
        return {len(self.group.blocks[block]): block for _, block in self.todo}.values()

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

    def order(self, visit: Visit, block: int) -> list[Cell]:
        """Return the live cells of a visit in the random order in which they decode a block."""
        cells = self.writer.live(visit.cells)
        random.Random(f"{self.seed}/{self.group.batch_size}/{visit.round}/{block}").shuffle(cells)
        return cells

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

    def part(self, warm: Collection[tuple[str, int]] = (), without: Cell | None = None) -> Part:
        """Return what the live cells, or all `without` one, have yet to do. warm: of a session."""
        cells = [cell for cell in self.writer.live() if cell is not without]
        return part_of(self.group, cells, len(self.done), [name for name, _ in warm])

    @property
    def fits(self) -> bool:
        """Whether a time budget decides how many servers start."""
        served = any(is_served(cell.engine) for cell in self.writer.live())
        return self.budget.seconds is not None and served and not self.apart and bool(self.todo)

    def fit(
        self, block_s: float, warm: Collection[tuple[str, int]], later: "Sequence[Scheduler]", *, fewer_arms: bool
    ) -> None:
        """Say what fits in the time budget, and let the last arms of a race leave. block_s: of plain decoding.

        As many arms stay as get a decision at this batch size and at the `later` ones; time for these is kept.
        """
        budget, plain = self.budget, self.writer.live()[0]
        self.may_leave_out = fewer_arms and not self.writer.begun(plain)
        budget.block_s = block_s
        schedulers = [self, *(one for one in later if one.todo)]
        parts = [one.part(warm) for one in schedulers]
        takes = f"a block of {plain.arm} at batch size {plain.batch_size} takes {duration(block_s)}"
        self.writer.progress.note(f"{takes}; {budget.described(parts)}")
        arms, reason = budget.room(parts)
        if reason and self.may_leave_out:
            for one in schedulers:
                one.writer.leave_out(one.writer.live()[max(arms, FEWEST_ARMS) :], reason)
        if arms:
            self.deadline -= needs_s(parts[1:], block_s, arms)

    def time_to_start(self, cell: Cell, warm: Collection[tuple[str, int]], now: float) -> tuple[float, bool]:
        """Return the time in which a cell's server must be ready, in seconds, and whether a late one leaves the race.

        Time for a decision among the other cells is kept.
        """
        others = self.part(warm, without=cell)
        may_leave = self.may_leave_out and cell is not self.writer.live()[0] and len(others.starts_s) >= FEWEST_ARMS
        kept_s = needs_s([others], self.budget.block_s) if may_leave else 0.0
        return max(0.0, self.deadline - now - kept_s), may_leave

    def _keep_finished_blocks(self) -> set[tuple[int, int]]:
        """Delete the lines of blocks that some live cell has not finished; return the others, (round, block).

        Conversations are kept whole, since a new server has no cached turns. Of cells that decode apart, delete those
        of rounds that a cell has not finished: a visit has one server.
        """
        run = self.writer.run
        finished = {
            cell.cell: {(line.round, line.block) for line in run.timings[cell.cell]} for cell in self.writer.live()
        }
        if self.apart:
            rounds = {r: {(r, block) for block in range(n)} for r, n in enumerate(self.group.rounds, start=1)}
            self._whole = {(name, r) for name, own in finished.items() for r in rounds if rounds[r] <= own}
            finished = {name: set().union(*(rounds[r] for n, r in self._whole if n == name)) for name in finished}
        done = set.intersection(*finished.values()) if finished else set()
        for round_, blocks in enumerate(self.group.rounds, start=1):
            for chain in self._chains(range(blocks)):
                whole = {(round_, block) for block in chain}
                done = done if whole <= done else done - whole
        for name, own in finished.items():
            run.keep_blocks(name, own if self.apart else done)
        return done

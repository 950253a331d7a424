"""Decode one group of cells, block by block: its scheduler orders the blocks, its runner decodes, its writer stores."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

from mtbench.decoding.arms import is_served
from mtbench.document.formatting import duration
from mtbench.measure import cache_probe
from mtbench.measure.block_runner import BlockRunner
from mtbench.measure.block_writer import BlockWriter
from mtbench.measure.judging_time import expected_judging_s
from mtbench.measure.scheduler import Scheduler, Visit
from mtbench.measure.time_budget import TimeBudget
from mtbench.measure.workers import Done, WorkerSession, in_parallel
from mtbench.plan.plan import Cell
from mtbench.plan.request import Execution
from mtbench.records import dump


class Stage:
    """One group of cells: what writes its blocks, orders them and decodes them."""

    def __init__(
        self, writer: BlockWriter, budget: TimeBudget, execution: Execution, recovered: Collection[str] = ()
    ) -> None:
        self.writer, self.budget, self.execution = writer, budget, execution
        self.run, self.plan, self.progress = writer.run, writer.plan, writer.progress
        self.scheduler = Scheduler(writer, budget, recovered)
        self.runner = BlockRunner(writer, self.scheduler)

    def decode(self, sessions: Sequence[WorkerSession]) -> bool:
        """Decode what is to be decoded before the deadline; return whether that is all.

        Within a visit workers share one queue.
        """
        scheduler, writer, runner = self.scheduler, self.writer, self.runner
        scheduler.workers = len(sessions)
        for session in sessions:  # the servers of other batch sizes end
            ended = {c.cell for c in self.plan.cells if is_served(c.engine) and c not in writer.cells}
            session.warm = {shape for shape in session.warm if shape[0] not in ended}
        if time.monotonic() > scheduler.deadline:
            return not scheduler.todo
        self._try_plain(sessions[0])
        writer.let_leave(self.execution.leave)
        if not (todo := scheduler.todo):
            for cell in writer.cells:
                runner.visit -= 1  # each server alone: nothing else decodes
                self._probe(sessions[0], [cell])
            return True
        shapes = {len(scheduler.group.blocks[block]): block for _, block in todo}.values()  # a block of each
        for visit in scheduler.visits():
            runner.visit = visit.number
            if visit.number or visit.round == todo[0][0]:
                in_parallel(sessions, partial(self._warm_up, visit=visit, shapes=shapes))
            queue = deque(visit.chains)
            in_parallel(sessions, partial(self._decode_queue, visit=visit, queue=queue))
            if queue or visit.round == todo[-1][0]:
                self._probe(sessions[0], visit.cells)
            if queue:
                return False
        return True

    def _warm_up(self, session: WorkerSession, visit: Visit, shapes: Collection[int]) -> None:
        part, sizes = self._taking_part(session, visit), [len(self.writer.group.blocks[block]) for block in shapes]
        cold = [c for c in part if visit.number or not {(c.cell, size) for size in sizes} <= session.warm]
        self.runner.warm_up(session, cold, shapes)

    def _taking_part(self, session: WorkerSession, visit: Visit) -> list[Cell]:
        return [cell for cell in self.scheduler.taking_part(session.warm) if cell in visit.cells]

    def _decode_queue(self, session: WorkerSession, visit: Visit, queue: deque[list[int]]) -> None:
        """Decode chains of blocks until the queue, which all workers share, is empty, or until no cell is live."""
        scheduler = self.scheduler
        while True:
            if not self.writer.live():
                queue.clear()
            part = self._taking_part(session, visit)
            if not scheduler.has_time(session.warm, part):
                return
            try:
                chain = queue.popleft()
            except IndexError:
                return
            for place, block in enumerate(chain):
                late = place and time.monotonic() > self.budget.until  # later turns: the conversation is decoded anew
                if self.execution.wait is not None and not late:
                    self.execution.wait()
                if late or not self.runner.run_block(session, visit, block, part):
                    queue.appendleft(chain[place:])
                    return
                self.budget.expect_judging(partial(expected_judging_s, self.run, self.plan))
                scheduler.leave_out_hopeless(session.warm)
                self.writer.let_leave(self.execution.leave)

    def _try_plain(self, session: WorkerSession) -> None:
        """Time a block of plain decoding, so that the scheduler knows how many arms have time."""
        scheduler = self.scheduler
        plain = next((cell for cell in self.writer.live() if cell.is_reference), None)
        if plain is None or not (scheduler.limited and scheduler.todo) or scheduler.block_s(plain) is not None:
            return
        _, block = scheduler.todo[0]
        began = time.monotonic()
        outcome = self.runner.decode(session, plain, block, self.writer.suite.max_new_tokens)
        if isinstance(outcome, Done):
            scheduler.tried_s = wall_s = outcome.timing.wall_s
            scheduler.warm_up_s = max(0.0, time.monotonic() - began - wall_s)
            takes = f"a block of {plain.arm} at batch size {plain.batch_size} takes {duration(wall_s)}"
            self.progress.note(f"{takes}; {self.budget.outlook([scheduler.part(session.warm)])}")

    @property
    def unprobed(self) -> list[Cell]:
        """The cells whose prefix cache has no probe yet. Of a private suite no file may hold prompts."""
        gone = self.writer.failed.union(line.cell for line in self.run.left if line.lost or line.unraced)
        withheld = self.writer.suite.withheld
        due = [c for c in self.writer.cells if c.prefix_cache and not (c.simulated or withheld or c.cell in gone)]
        return [c for c in due if self.budget.judged and not cache_probe.read(self.run.directory, c.cell).checks]

    def _probe(self, session: WorkerSession, cells: Collection[Cell]) -> None:
        """Probe the prefix caches of cells, on their own servers. If that fails, it costs the probe alone."""
        for cell in [cell for cell in self.unprobed if cell in cells]:
            self.progress.show(f"probing the prefix cache of {cell.arm} b{cell.batch_size}")
            ask = partial(self.runner.ask, session, cell, until=self.budget.deadline)
            record = cache_probe.probe(self.plan, cell, self.writer.answered[cell.cell], ask)
            self.run.directory.write_json(cache_probe.FILE.format(cell.cell), dump(record))

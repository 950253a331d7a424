"""Decode one group of cells, block by block: its scheduler orders the blocks, its runner decodes, its writer stores."""

import time
from collections import deque
from collections.abc import Collection, Sequence
from functools import partial

from mtbench.measure import cache_probe
from mtbench.measure.block_runner import BlockRunner
from mtbench.measure.block_writer import BlockWriter, Progress
from mtbench.measure.scheduler import Scheduler, Visit
from mtbench.measure.time_budget import TimeBudget
from mtbench.measure.workers import Done, WorkerSession, in_parallel
from mtbench.plan.plan import Cell, Group, Plan
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.records import dump

HERE = Execution()  # in this process, with the plan's values


class Stage:
    """One group of cells: what writes its blocks, orders them and decodes them."""

    def __init__(
        self, run: Run, plan: Plan, group: Group, failed: set[str], progress: Progress, budget: TimeBudget
    ) -> None:
        self.run, self.plan, self.budget, self.progress = run, plan, budget, progress
        self.writer = BlockWriter(run, plan, group, failed, progress)
        request = plan.request
        self.scheduler = Scheduler(self.writer, budget, apart=request.apart, seed=request.seed)
        self.runner = BlockRunner(plan, self.writer, self.scheduler, progress)

    def decode(
        self, sessions: Sequence[WorkerSession], execution: Execution = HERE, later: "Sequence[Stage]" = ()
    ) -> bool:
        """Decode what is to be decoded. Within a visit workers share one queue.

        The hooks of `execution` are called. Time is kept for the `later` stages. Return False if the deadline left
        blocks undone.
        """
        scheduler, writer, runner = self.scheduler, self.writer, self.runner
        if time.monotonic() > scheduler.deadline:
            return not scheduler.todo
        self._fit(sessions[0], execution, later)
        writer.let_leave(execution.leave)
        if not (todo := scheduler.todo):
            for cell in writer.cells:
                runner.visit -= 1  # each server alone: nothing else decodes
                self._probe(sessions[0], [cell])
            return True
        shapes = scheduler.shapes
        for visit in scheduler.visits():
            runner.visit = visit.number
            if visit.number or visit.round == todo[0][0]:
                in_parallel(sessions, lambda session: runner.warm_up(session, writer.live(visit.cells), shapes))  # noqa: B023
            queue = deque(visit.chains)
            in_parallel(sessions, partial(self._decode_queue, visit=visit, queue=queue, execution=execution))
            if queue or visit.round == todo[-1][0]:
                self._probe(sessions[0], visit.cells)
            if queue:
                return False
        return True

    def _decode_queue(
        self, session: WorkerSession, visit: Visit, queue: deque[list[int]], execution: Execution
    ) -> None:
        """Decode chains of blocks until the queue, which all workers share, is empty, or until no cell is live."""
        scheduler = self.scheduler
        while time.monotonic() <= scheduler.deadline:
            if not self.writer.live():
                queue.clear()
            try:
                chain = queue.popleft()
            except IndexError:
                return
            for place, block in enumerate(chain):
                if place and time.monotonic() > scheduler.deadline:  # later turns: the conversation is decoded anew
                    queue.appendleft(chain[place:])
                    return
                if execution.wait is not None:
                    execution.wait()
                self.runner.run_block(session, visit, block)
                self.writer.let_leave(execution.leave)

    def _fit(self, session: WorkerSession, execution: Execution, later: "Sequence[Stage]") -> None:
        """Time a block of plain decoding, so that the scheduler knows how many servers have time to start."""
        if not self.scheduler.fits:
            return
        plain, (_, block) = self.writer.live()[0], self.scheduler.todo[0]
        outcome = self.runner.decode(session, plain, block, self.writer.suite.max_new_tokens)
        if isinstance(outcome, Done):
            others = [stage.scheduler for stage in later]
            self.scheduler.fit(outcome.timing.wall_s, session.warm, others, fewer_arms=execution.fewer_arms)

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

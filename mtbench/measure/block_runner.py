"""Decode blocks on workers: after a warm-up, again if the machine was disturbed, on servers that start here."""

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from itertools import product
from uuid import uuid4

from mtbench.clients.engine_server import READY_S
from mtbench.decoding.arms import is_served
from mtbench.decoding.output import Generation
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.measure.block_writer import BlockWriter
from mtbench.measure.scheduler import Scheduler, Visit
from mtbench.measure.time_budget import remember_start
from mtbench.measure.workers import Died, Done, Failed, Task, WorkerSession
from mtbench.plan.directory import JsonObject
from mtbench.plan.plan import LEARNS, Cell

WARM_UP_TOKENS = 16
WARM_UPS = 6  # most calls per shape: an arm that moves shared memory makes another arm prepare again
ATTEMPTS = 2  # if a worker dies, a new one decodes the batch once more
REPEATS = 2  # most times that a sample is decoded again because the machine was disturbed
REPEATED_SHARE = 0.1  # of a stage's batches, that are decoded again at most


class BlockRunner:
    """Decodes a group's blocks. Cells fail by what happens here."""

    def __init__(self, writer: BlockWriter, scheduler: Scheduler) -> None:
        self.plan, self.writer, self.scheduler, self.progress = writer.plan, writer, scheduler, writer.progress
        self.group, self.suite = writer.group, writer.suite
        self.room = self.suite.room  # of every batch: shapes are the same for all blocks
        self.visit = 0  # the number of the visit whose servers run
        self.repeats = max(2 * REPEATS, round(REPEATED_SHARE * scheduler.work))  # that are left
        self.again = Counter[str]()  # batches that were decoded again, by reason
        self._cache = uuid4().hex  # of prompts, by which this group's requests share it

    def run_block(self, session: WorkerSession, visit: Visit, block: int, cells: Sequence[Cell]) -> bool:
        """Decode a block with cells of a visit, and store it. Return whether it is whole.

        In a race plain decoding's lines come last: with them the block is whole.
        """
        scheduler, last = self.scheduler, None
        for place, cell in enumerate(scheduler.order(visit, block, cells)):
            if not self.writer.live([cell]):  # another worker has marked it
                continue
            if time.monotonic() > scheduler.budget.deadline:
                return False
            outcome = self._undisturbed(session, cell, visit.round, block)
            store = partial(self.writer.store, session, cell, visit.round, block, place, outcome)
            if scheduler.raced and cell.is_reference:
                last = store
            else:
                store()
        if last is not None:
            last()
        scheduler.end(visit.round, block)
        return True

    def _undisturbed(self, session: WorkerSession, cell: Cell, round_: int, block: int) -> Done | Failed:
        """Decode one block; again, at once and beside the same arms, if the machine was disturbed meanwhile.

        Once only a later turn whose prompt is cached, else all of it would be; and an arm that drafts earlier answers.
        """
        void: list[JsonObject] = []
        once = LEARNS in cell.flags or (cell.prefix_cache and self.scheduler.is_later(block))
        while True:
            cache = f"{self._cache}.{round_}.{len(void)}" if cell.prefix_cache else None
            outcome = self.decode(session, cell, block, self.suite.max_new_tokens, cache=cache)
            if isinstance(outcome, Failed):
                return outcome
            conditions = outcome.conditions
            reason, more = conditions["dropped"], not once and len(void) < REPEATS and self.repeats > 0
            if not (reason and more and time.monotonic() <= self.scheduler.deadline):
                return outcome._replace(conditions=conditions | {"disturbed": void or None})
            self.repeats -= 1
            self.again[reason] += 1
            took = {name: conditions[name] for name in ("cpu_s", "wanted_s")}
            void.append({"wall_s": outcome.timing.wall_s, "reason": reason, **took})

    def decode(
        self,
        session: WorkerSession,
        cell: Cell,
        block: int,
        budget: int,
        *,
        cold: bool = False,
        unseen: bool = False,
        within_s: float = READY_S,
        cache: str | None = None,
    ) -> Done | Failed:
        """Decode one block, after a warm-up unless `cold`. A cell fails by an error, or if two workers die of it.

        budget: most new tokens of an answer. unseen: with prompts that no server has kept; a cell that fails by these
        has not failed. within_s: time in which its server must be ready; a late cell has not failed. cache: as in
        `Plan.requests`.
        """
        budget = min(budget, self.suite.max_new_tokens)
        answered = self.writer.answered[cell.cell]
        asked = self.plan.requests(self.suite, self.group.blocks[block], answered, budget, cache)
        requests = [request.unseen if unseen else request for request in asked]
        task = Task(cell=cell.cell, requests=requests, room=self.room, visit=self.visit, within_s=within_s)
        outcome: Done | Failed = Failed("", late=True)
        for _ in range(ATTEMPTS):
            if not cold and (cell.cell, len(requests)) not in session.warm:  # a new worker
                self.warm_up(session, [cell], [block])
                if (cell.cell, len(requests)) not in session.warm:  # it failed, or is late
                    break
            try:
                outcome = session.worker.decode(task)
                break
            except Died as death:
                if session.worker.closed:  # the run has ended it
                    raise
                outcome = Failed(f"{death}, and so did another one at the same batch")
                self.progress.note(f"{cell.cell}: {death}; a new worker continues")
                session.worker.revive()
                session.begin()
        if isinstance(outcome, Failed) and not (outcome.late or unseen):
            self.writer.fail(cell, outcome)
        return outcome

    def warm_up(self, session: WorkerSession, cells: Sequence[Cell], blocks: Collection[int]) -> None:
        """Decode a few tokens of a block of every shape until no cell prepares anything any more.

        The time of the calls beyond that of the last, warm one is stored as the cell's preparation.
        """
        for cell in self.writer.live(cells):
            if is_served(cell.engine):
                self._start(session, cell, min(blocks))
        cells = [cell for cell in cells if not is_served(cell.engine)]
        wall_s: dict[tuple[str, int], list[float]] = {}
        unseen = defaultdict[str, list[tuple[int, float]]](list)
        for call in range(WARM_UPS):
            preparing = call == 0
            for block, cell in product(blocks, self.writer.live(cells)):
                if time.monotonic() > self.scheduler.deadline:
                    return
                self.progress.show(f"warming up {cell.arm} b{cell.batch_size}")
                outside = cell.engine is None  # maybe a server
                outcome = self.decode(session, cell, block, WARM_UP_TOKENS, cold=True, unseen=outside)
                if isinstance(outcome, Failed) and outside:  # no text has the tokens in that order
                    outcome = self.decode(session, cell, block, WARM_UP_TOKENS, cold=True)
                elif isinstance(outcome, Done) and outside and (ttft_s := outcome.timing.ttft_s):
                    unseen[cell.cell].append((outcome.timing.prompt_tokens, ttft_s))
                if isinstance(outcome, Done):
                    session.warm.add((cell.cell, len(self.group.blocks[block])))
                    wall_s.setdefault((cell.cell, block), []).append(outcome.timing.wall_s)
                    preparing |= outcome.timing.preparation_s > 0
            if not preparing:
                break
        for cell in self.writer.live(cells):
            calls = [walls for (name, _), walls in wall_s.items() if name == cell.cell]
            prepared_s = sum(max(0.0, sum(walls) - len(walls) * walls[-1]) for walls in calls)
            self.writer.store_preparation(session, cell, prepared_s, unseen=unseen[cell.cell])

    def _start(self, session: WorkerSession, cell: Cell, block: int) -> None:
        """Start a cell's server by one call of a few tokens: it prepares no shapes.

        If it fails, so does its arm at batch sizes that have not begun. If it is late, the other arms may go on.
        """
        shapes = {(cell.cell, len(rows)) for rows in self.group.blocks}
        if shapes <= session.warm and not self.visit:
            return
        self.progress.show(f"starting the server of {cell.arm} b{cell.batch_size}")
        within_s, may_leave = self.scheduler.time_to_start(cell, session.warm)
        outcome = self.decode(session, cell, block, WARM_UP_TOKENS, cold=True, within_s=within_s)
        if isinstance(outcome, Done):
            session.warm |= shapes
            started_s = outcome.timing.preparation_s
            if started_s:
                remember_start(cell, started_s)
            self.writer.store_preparation(session, cell, started_s, server=outcome.server)
        elif may_leave and outcome.late:
            self.writer.leave_out([cell], outcome.error)
        elif outcome.late:
            self.progress.note(f"time budget: {outcome.error}")
        else:
            error = f"at batch size {cell.batch_size}: {outcome.error}"
            for other in self.plan.cells:
                if other.arm == cell.arm and not self.writer.begun(other):
                    self.writer.fail(other, outcome._replace(error=error))

    def recovered(self, session: WorkerSession, cells: Collection[str]) -> list[str]:
        """Return those of the failed `cells` that decode again, tried for a few tokens.

        Only then are blocks of the other arms deleted, to be decoded side by side with theirs.
        """
        outcomes: dict[str, Done | Failed] = {}
        for number, cell in enumerate([cell for cell in self.writer.cells if cell.cell in cells], start=1):
            self.visit = -number if self.plan.request.apart else 0
            outcomes[cell.cell] = self.decode(session, cell, 0, WARM_UP_TOKENS, cold=True)
        for name, outcome in outcomes.items():
            if isinstance(outcome, Failed):
                self.progress.note(f"{name} still fails: {outcome.error}")
        return [name for name, outcome in outcomes.items() if isinstance(outcome, Done)]

    def ask(self, session: WorkerSession, cell: Cell, request: Request, until: float) -> Generation:
        """Return the answer of a cell's server to one request. until: by time.monotonic.

        Raises UserError if it fails and TimeoutError behind that time.
        """
        if (within_s := until - time.monotonic()) < 0:
            raise TimeoutError("the time budget is spent; `--resume` does it")
        task = Task(cell=cell.cell, requests=[request], room=self.room, visit=self.visit, within_s=within_s)
        outcome = session.worker.decode(task)
        if isinstance(outcome, Failed):
            raise UserError(outcome.error)
        return outcome.generations[0]

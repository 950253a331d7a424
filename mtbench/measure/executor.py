"""Execute a plan: decode its cells, and store answers and times.

Inside every block all arms run next to each other in random order, so that a drift of the machine affects them alike.
Needs torch and transformers only, except for private suites, whose prompts are read again. Blocks that are on disk are
kept; missing ones are run.
"""

import itertools
import random
import shlex
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol
from uuid import uuid4

from mtbench import kernels
from mtbench.clients.engine_server import READY_S
from mtbench.decoding.arms import is_served
from mtbench.decoding.external import ExternalEngine
from mtbench.decoding.output import Generation
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.decoding.request import Request
from mtbench.document.formatting import counted, duration, percent
from mtbench.errors import UserError
from mtbench.hardware import machine
from mtbench.lineup.planner import with_dtype
from mtbench.measure import cache_probe
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.time_budget import FEWEST_ARMS, Part, TimeBudget, needs_s, part_of, remember_start
from mtbench.measure.untimed import UntimedPasses
from mtbench.measure.workers import Died, Done, Failed, Task, WorkerSession, in_parallel, start_workers
from mtbench.models import token_map
from mtbench.options.engine_options import refuse_engine_options
from mtbench.options.fields import fields_of
from mtbench.plan.directory import JsonObject
from mtbench.plan.formats import Elimination, FailureLine, GenerationLine
from mtbench.plan.lines import generation_line, timing_line
from mtbench.plan.plan import LEARNS, Cell, Group, Plan, SuitePlan
from mtbench.plan.prompts import open_plan
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.records import dump

HERE = Execution()  # in this process, with the plan's values
LOOK_S = 0.3  # in which the load of other programs is counted
WARM_UP_TOKENS = 16
WARM_UPS = 6  # most calls per shape: an arm that moves shared memory makes another arm prepare again
ATTEMPTS = 2  # if a worker dies, a new one decodes the batch once more
REPEATS = 2  # most times that a sample is decoded again because the machine was disturbed
REPEATED_SHARE = 0.1  # of a stage's batches, that are decoded again at most


class Progress(Protocol):
    """Receives the progress of a run and shows it (mtbench/report/progress.py)."""

    def begin(self, cells: int, work: int, until: float) -> None: ...
    def skip(self, work: int) -> None: ...
    def decoded(self, cell: Cell, index: int, rows: int, timing: Mapping[str, Any] | None) -> None: ...
    def note(self, text: str) -> None: ...
    def show(self, text: str) -> None: ...


def generate(run: Run, progress: Progress, execution: Execution = HERE) -> None:
    """Run the blocks of the plan that are not on disk yet.

    In this process, by workers on this machine, or by workers of a Ray cluster. Time budget and data folder are the
    plan's unless the execution has its own. Raises UserError if no cell can run, if the plan uses a server that the
    execution does not name, or if the run started on another device or in another dtype.
    """
    plan = open_plan(run, execution.data_dir, offline=execution.offline)
    token_map.refuse_changed(plan.token_maps)
    if not execution.ray:  # a cluster has other machines
        plan = with_dtype(plan, run.sessions[0].dtype if run.sessions else None)
    in_this_process = execution.ray is None and execution.workers in (None, 1)
    pool = ModelPool(plan.request, processes=1 if execution.wait is None else 2) if in_this_process else None
    budget_s = plan.request.time_budget_s if execution.time_budget_s is None else execution.time_budget_s
    budget = TimeBudget(budget_s, judged=not execution.timed_only)
    failed, may_pass = _failed_cells(run, plan)
    stages = [Stage(run, plan, group, failed, progress, budget) for group in plan.groups]
    work = sum(stage.work for stage in stages)
    if not work and not may_pass and not any(stage.unprobed for stage in stages):
        progress.begin(len(plan.cells), 0, budget.until)
    else:
        due = [cell for stage in stages if stage.todo for cell in stage.live()]
        _refuse_other_servers(due, execution.servers)
        used = {(cell.engine, option) for cell in plan.cells for option in cell.engine_options}
        refuse_engine_options(used, plan.request.engine_option, execution.engine_options)
        _refuse_new_options(due if run.sessions else [])
        if budget_s is not None and any(is_served(cell.engine) for cell in due):
            parts = [stage.part() for stage in stages if stage.todo]
            if execution.fewer_arms:
                budget.refuse_too_short(parts)
            progress.note(budget.described(parts))
        progress.show("loading the models")
        with start_workers(pool, plan.request, plan.cells, execution.workers, execution.ray) as started:
            if len(started) > 1:
                progress.note(f"{len(started)} workers are loading the models")
            sessions = [WorkerSession(worker, len(started), run) for worker in started]
            in_parallel(sessions, WorkerSession.begin)
            for note in kernels.notes(run.sessions[-1].kernels_off):
                progress.note(note)
            _say_if_busy(run, {cell.engine for cell in due if is_served(cell.engine)}, progress)
            recovered = {cell for stage in stages for cell in stage.recovered(sessions[0], may_pass)}
            if recovered:
                run.keep_failures([line for line in run.failures if line.cell not in recovered or line.stage])
                failed -= recovered
                stages = [Stage(run, plan, group, failed, progress, budget) for group in plan.groups]
            progress.begin(len(plan.cells), sum(stage.work for stage in stages), budget.until)
            undone = [n for n, stage in enumerate(stages, 1) if not stage.run_blocks(sessions, execution, stages[n:])]
            for reason, n in sum((stage.again for stage in stages), Counter[str]()).items():
                progress.note(f"the machine was disturbed: {reason}; {counted(n, 'block')} decoded again")
            if undone:
                progress.note("time budget spent; `--resume` runs what is missing")
    if execution.timed_only:
        return
    lost = {line.cell for line in run.left if line.lost or line.unraced}
    passes = UntimedPasses(run, plan, failed, budget.deadline, execution.peak_memory, lost)
    if pool is not None:
        passes.execute(pool, progress.note, progress.show)
    else:
        passes.execute_in_child(progress.note, progress.show)


def _say_if_busy(run: Run, engines: Collection[str], progress: Progress) -> None:
    """Say that other programs use the cores on which the servers of these engines are to run."""
    shares = machine.load_of_others(LOOK_S) if engines else None
    if shares is None or shares[0] < machine.MOST_OTHERS:
        return
    busy = {name: SERVING_ENGINES[name].busy for name in engines if (run.sessions[-1].threads or 1) > 1}
    given = {*map(str, run.plan.request.engine_option)}
    options = {f"{name}:{option}" for name, option in busy.items() if option} - given
    remedy = "".join(f", or give `--engine-option {option}`" for option in sorted(options))
    progress.note(f"other programs use {percent(shares[0], 0)} % of the cores; stop them{remedy}")


def _failed_cells(run: Run, plan: Plan) -> tuple[set[str], set[str]]:
    """Return the cells that failed in an earlier session or when they were planned; store the latter's errors.

    Return also which of them failed for a cause that may have passed.
    """
    run.keep_failures(run.failures)  # without a torn line
    faults = {cell.cell: cell.fault for cell in plan.cells if cell.fault}
    decoding = [line for line in run.failures if line.stage is None]
    failed = {line.cell for line in decoding}
    run.add_failures([FailureLine(cell=cell, error=error) for cell, error in faults.items() if cell not in failed])
    return failed | faults.keys(), {line.cell for line in decoding if line.again} - faults.keys()


def _refuse_other_servers(cells: Sequence[Cell], servers: Collection[str]) -> None:
    """Raise UserError if a cell uses a server that this command does not name: the plan is untrusted input."""
    for cell in cells:
        method = cell.built
        if isinstance(method, ExternalEngine) and method.server is not None and method.server not in servers:
            raise UserError(
                f"the plan asks the server {method.server!r}, which this command does not name; if you trust it, add "
                f"`--server {shlex.quote(method.server)}`."
            )


def _refuse_new_options(cells: Sequence[Cell]) -> None:
    """Raise UserError if a cell that began lacks the value of an option: its method was a different one."""
    for cell in cells:
        if new := fields_of(METHODS[cell.method]).keys() - cell.options.keys():
            raise UserError(
                f"{cell.cell} began before {cell.method} had the option {min(new)!r}, so later blocks may differ from "
                "earlier ones; resume it with the mtbench that began it, or start another run with `-o DIR`."
            )


class Stage:
    """One group of cells, block by block."""

    def __init__(
        self, run: Run, plan: Plan, group: Group, failed: set[str], progress: Progress, budget: TimeBudget
    ) -> None:
        self.run, self.plan, self.group, self.progress = run, plan, group, progress
        self.failed = failed  # cells of all groups
        self.budget, self.deadline = budget, budget.until  # by time.monotonic: no block begins later
        self.may_leave_out = False  # arms for which the time budget has no room
        self.suite: SuitePlan = plan.suite(group.suite)
        self.cells = [plan.cell(name) for name in group.cells]
        self.room = self.suite.room  # of every batch: shapes are the same for all blocks
        self.writing = threading.RLock()
        self.cache = uuid4().hex  # of prompts, by which this stage's requests share it
        self.visit, self.visiting = 0, self.cells  # those that decode now
        self.whole = set[tuple[str, int]]()  # rounds that a cell alone has finished
        self.repeats = 0  # batches that may still be decoded again
        self.again = Counter[str]()  # batches that were, by reason
        self.done = self._keep_finished_blocks()
        self.tokens: dict[str, dict[str, list[int]]] = {name: {} for name in group.cells}  # by cell and item
        self.answered: dict[str, dict[str, Sequence[int]]] = {name: {} for name in group.cells}  # as later turns see it
        for name in group.cells:
            for line in run.answers[name]:
                self._remember(name, line)

    @property
    def left(self) -> set[str]:
        return {line.cell for line in self.run.left}

    @property
    def todo(self) -> list[tuple[int, int]]:
        """(round, block) in the order in which they run; rounds count from 1. None if no cell is live."""
        if not self.live():
            return []
        rounds = enumerate(self.group.rounds, start=1)
        return [(r, b) for r, blocks in rounds for b in range(blocks) if (r, b) not in self.done]

    @property
    def work(self) -> int:
        """Batches to decode."""
        return sum((cell.cell, round_) not in self.whole for round_, _ in self.todo for cell in self.live())

    def part(self, warm: Collection[tuple[str, int]] = (), without: Cell | None = None) -> Part:
        """Return what the live cells, or all `without` one, have yet to do. warm: of a session."""
        cells = [cell for cell in self.live() if cell is not without]
        return part_of(self.group, cells, len(self.done), [name for name, _ in warm])

    def recovered(self, session: WorkerSession, cells: Collection[str]) -> list[str]:
        """Return those of the failed `cells` that decode again, tried for a few tokens.

        Only then are blocks of the other arms deleted, to be decoded side by side with theirs.
        """
        tried = [cell for cell in self.cells if cell.cell in cells]
        outcomes: dict[str, Done | Failed] = {}
        for number, cell in enumerate(tried, start=1):
            self.visit = -number if self.plan.request.apart else 0
            outcomes[cell.cell] = self._attempt(session, cell, 0, WARM_UP_TOKENS, cold=True)
        for name, outcome in outcomes.items():
            if isinstance(outcome, Failed):
                self.progress.note(f"{name} still fails: {outcome.error}")
        return [name for name, outcome in outcomes.items() if isinstance(outcome, Done)]

    def run_blocks(
        self, sessions: Sequence[WorkerSession], execution: Execution = HERE, later: "Sequence[Stage]" = ()
    ) -> bool:
        """Run round by round, since later rounds repeat blocks of the first. Within a round workers share one queue.

        The hooks of `execution` are called. Time is kept for the `later` stages. Return False if the deadline left
        blocks undone.
        """
        if time.monotonic() > self.deadline:
            return not self.todo
        self._fit(sessions[0], execution, later)
        self._let_leave(execution)
        if not (todo := self.todo):
            for cell in self.cells:
                self.visit -= 1  # each server alone: nothing else decodes
                self._probe(sessions[0], [cell])
            return True
        self.repeats = max(2 * REPEATS, round(REPEATED_SHARE * self.work))
        shapes = {len(self.group.blocks[block]): block for _, block in todo}.values()
        for round_, of_round in itertools.groupby(todo, key=itemgetter(0)):
            blocks = [block for _, block in of_round]
            for visit, cells in self._visits(round_):
                self.visit, self.visiting = visit, cells
                if self.visit or round_ == todo[0][0]:
                    in_parallel(sessions, lambda session: self._warm_up(session, self._alive(self.visiting), shapes))
                queue = deque(self._chains(blocks))
                run_queue = partial(self._run_queue, round_=round_, queue=queue, execution=execution)
                in_parallel(sessions, run_queue)
                if queue or round_ == todo[-1][0]:
                    self._probe(sessions[0], cells)
                if queue:
                    return False
        return True

    def _visits(self, round_: int) -> list[tuple[int, list[Cell]]]:
        """Return the cells that decode side by side in a round, with a number: all, or each apart in turned order."""
        if not self.plan.request.apart:
            return [(0, self.cells)]
        order = random.Random(f"{self.plan.request.seed}/{self.group.batch_size}").sample(self.cells, len(self.cells))
        visits = enumerate(order if round_ % 2 else order[::-1], start=round_ * len(order))
        return [(visit, [cell]) for visit, cell in visits if (cell.cell, round_) not in self.whole]

    def _run_queue(self, session: WorkerSession, round_: int, queue: deque[list[int]], execution: Execution) -> None:
        """Run chains of blocks until the queue, which all workers share, is empty, or until no cell is live."""
        while time.monotonic() <= self.deadline:
            if not self.live():
                queue.clear()
            try:
                chain = queue.popleft()
            except IndexError:
                return
            for place, block in enumerate(chain):
                if place and time.monotonic() > self.deadline:  # later turns: the conversation is decoded anew
                    queue.appendleft(chain[place:])
                    return
                if execution.wait is not None:
                    execution.wait()
                self._run_block(session, round_, block)
                self._let_leave(execution)

    @property
    def unprobed(self) -> list[Cell]:
        """The cells whose prefix cache has no probe yet. Of a private suite no file may hold prompts."""
        gone = self.failed.union(line.cell for line in self.run.left if line.lost or line.unraced)
        due = [c for c in self.cells if c.prefix_cache and not (c.simulated or self.suite.withheld or c.cell in gone)]
        return [c for c in due if self.budget.judged and not cache_probe.read(self.run.directory, c.cell).checks]

    def _probe(self, session: WorkerSession, cells: Collection[Cell]) -> None:
        """Probe the prefix caches of cells, on their own servers. If that fails, it costs the probe alone."""
        for cell in (cell for cell in self.unprobed if cell in cells):
            record = cache_probe.probe(self.plan, cell, self.answered[cell.cell], partial(self._ask, session, cell))
            self.run.directory.write_json(cache_probe.FILE.format(cell.cell), dump(record))

    def _ask(self, session: WorkerSession, cell: Cell, request: Request) -> Generation:
        """Return the answer of a cell's server to a probe. Raises UserError and TimeoutError."""
        self.progress.show(f"probing the prefix cache of {cell.arm} b{cell.batch_size}")
        if (within_s := self.budget.deadline - time.monotonic()) < 0:
            raise TimeoutError("the time budget is spent; `--resume` does it")
        task = Task(cell=cell.cell, requests=[request], room=self.room, visit=self.visit, within_s=within_s)
        outcome = session.worker.decode(task)
        if isinstance(outcome, Failed):
            raise UserError(outcome.error)
        return outcome.generations[0]

    def _chains(self, blocks: Sequence[int]) -> list[list[int]]:
        """Return chains of blocks. One worker runs a chain in order: a later turn right after the one it follows."""
        chains: list[list[int]] = []
        for block in blocks:
            if self._is_later(block) and chains and chains[-1][-1] == block - 1:
                chains[-1].append(block)
            else:
                chains.append([block])
        return chains

    def _is_later(self, block: int) -> bool:
        """Return whether a block has later turns of conversations."""
        return self.suite.items[self.group.blocks[block][0]].follows is not None

    def _let_leave(self, execution: Execution) -> None:
        """Let the cells leave that the hook names."""
        if execution.leave is not None:
            with self.writing:
                self._leave(execution.leave(self.group.cells))

    def _leave(self, lines: Iterable[Elimination]) -> None:
        """Let cells leave."""
        for line in lines:
            self.run.add_left([line])
            self.progress.skip(sum(self.group.rounds) - len(self.run.timings[line.cell]))
            when = "is left out" if line.unraced else f"leaves after {line.block} blocks"
            cell = self.plan.cell(line.cell)
            self.progress.note(f"{cell.arm} at batch size {cell.batch_size} {when}: {line.reason}")

    def _leave_out(self, cells: Sequence[Cell], reason: str) -> None:
        """Let cells leave before they begin."""
        gone = partial(Elimination, block=0, lost=False, reason=reason, rival=None, unraced=True)
        with self.writing:
            self._leave(gone(cell=cell.cell) for cell in cells)

    def _fit(self, session: WorkerSession, execution: Execution, later: "Sequence[Stage]") -> None:
        """Time a block of plain decoding, say what fits in the time budget, and let the last arms of a race leave.

        As many arms stay as get a decision at this batch size and at the later ones; time for these is kept.
        """
        budget, live = self.budget, self.live()
        servers = any(is_served(cell.engine) for cell in live)
        if budget.seconds is None or not servers or self.plan.request.apart or not self.todo:
            return
        outcome = self._attempt(session, live[0], self.todo[0][1], self.suite.max_new_tokens)
        if isinstance(outcome, Failed):
            return
        self.may_leave_out = execution.fewer_arms and not self.run.timings[live[0].cell]
        budget.block_s = outcome.timing.wall_s
        stages = [self, *(stage for stage in later if stage.todo)]
        parts = [stage.part(session.warm) for stage in stages]
        takes = f"a block of {live[0].arm} at batch size {live[0].batch_size} takes {duration(budget.block_s)}"
        self.progress.note(f"{takes}; {budget.described(parts)}")
        arms, reason = budget.room(parts)
        if reason and self.may_leave_out:
            for stage in stages:
                stage._leave_out(stage.live()[max(arms, FEWEST_ARMS) :], reason)
        if arms:
            self.deadline -= needs_s(parts[1:], budget.block_s, arms)

    def _start(self, session: WorkerSession, cell: Cell, block: int) -> None:
        """Start a cell's server by one call of a few tokens: it prepares no shapes.

        If it fails, so does its arm at batch sizes that have not begun. If it is late, the other arms may go on.
        """
        shapes = {(cell.cell, len(rows)) for rows in self.group.blocks}
        if shapes <= session.warm and not self.visit:
            return
        self.progress.show(f"starting the server of {cell.arm} b{cell.batch_size}")
        others, within_s = self.part(session.warm, without=cell), self.deadline - time.monotonic()
        may_leave = self.may_leave_out and cell is not self.live()[0] and len(others.starts_s) >= FEWEST_ARMS
        if may_leave:  # time for a decision among the others
            within_s -= needs_s([others], self.budget.block_s)
        outcome = self._attempt(session, cell, block, WARM_UP_TOKENS, cold=True, within_s=max(0.0, within_s))
        if isinstance(outcome, Done):
            session.warm |= shapes
            started_s = outcome.timing.preparation_s
            if started_s:
                remember_start(cell, started_s)
            self._store_preparation(session, cell, started_s, server=outcome.server)
        elif may_leave and outcome.late:
            self._leave_out([cell], outcome.error)
        elif outcome.late:
            self.progress.note(f"time budget: {outcome.error}")
        else:
            error = f"at batch size {cell.batch_size}: {outcome.error}"
            for other in self.plan.cells:
                if other.arm == cell.arm and not self.run.timings[other.cell]:
                    self._fail(other, outcome._replace(error=error))

    def _warm_up(self, session: WorkerSession, cells: Sequence[Cell], blocks: Collection[int]) -> None:
        """Decode a few tokens of a block of every shape until no cell prepares anything any more.

        The time of the calls beyond that of the last, warm one is stored as the cell's preparation.
        """
        for cell in self._alive(cells):
            if is_served(cell.engine):
                self._start(session, cell, min(blocks))
        cells = [cell for cell in cells if not is_served(cell.engine)]
        wall_s: dict[tuple[str, int], list[float]] = {}
        unseen = defaultdict[str, list[tuple[int, float]]](list)
        for call in range(WARM_UPS):
            preparing = call == 0
            for block, cell in itertools.product(blocks, self._alive(cells)):
                self.progress.show(f"warming up {cell.arm} b{cell.batch_size}")
                outside = cell.engine is None  # maybe a server
                outcome = self._attempt(session, cell, block, WARM_UP_TOKENS, cold=True, unseen=outside)
                if isinstance(outcome, Failed) and outside:  # no text has the tokens in that order
                    outcome = self._attempt(session, cell, block, WARM_UP_TOKENS, cold=True)
                elif isinstance(outcome, Done) and outside and (ttft_s := outcome.timing.ttft_s):
                    unseen[cell.cell].append((outcome.timing.prompt_tokens, ttft_s))
                if isinstance(outcome, Done):
                    session.warm.add((cell.cell, len(self.group.blocks[block])))
                    wall_s.setdefault((cell.cell, block), []).append(outcome.timing.wall_s)
                    preparing |= outcome.timing.preparation_s > 0
            if not preparing:
                break
        for cell in self._alive(cells):
            calls = [walls for (name, _), walls in wall_s.items() if name == cell.cell]
            prepared_s = sum(max(0.0, sum(walls) - len(walls) * walls[-1]) for walls in calls)
            self._store_preparation(session, cell, prepared_s, unseen=unseen[cell.cell])

    def _store_preparation(self, session: WorkerSession, cell: Cell, seconds: float, **found: Any) -> None:
        line = {"session": session.session, "cell": cell.cell, "preparation_s": seconds}
        line |= {name: value for name, value in found.items() if value}
        with self.writing:
            self.run.directory.append("preparation.jsonl", [line])

    def _run_block(self, session: WorkerSession, round_: int, block: int) -> None:
        order = self._alive(self.visiting)
        random.Random(f"{self.plan.request.seed}/{self.group.batch_size}/{round_}/{block}").shuffle(order)
        for place, cell in enumerate(order):
            if cell.cell not in self.failed and cell.cell not in self.left:  # another worker may have marked it
                outcome = self._undisturbed(session, cell, round_, block)
                with self.writing:
                    self._write(session, cell, round_, block, place, outcome)

    def _undisturbed(self, session: WorkerSession, cell: Cell, round_: int, block: int) -> Done | Failed:
        """Decode one block; again, at once and beside the same arms, if the machine was disturbed meanwhile.

        Once only a later turn whose prompt is cached, else all of it would be; and an arm that drafts earlier answers.
        """
        void: list[JsonObject] = []
        once = LEARNS in cell.flags or (cell.prefix_cache and self._is_later(block))
        while True:
            cache = f"{self.cache}.{round_}.{len(void)}" if cell.prefix_cache else None
            outcome = self._attempt(session, cell, block, self.suite.max_new_tokens, cache=cache)
            if isinstance(outcome, Failed):
                return outcome
            conditions = outcome.conditions
            reason, more = conditions["dropped"], not once and len(void) < REPEATS and self.repeats > 0
            if not (reason and more and time.monotonic() <= self.deadline):
                return outcome._replace(conditions=conditions | {"disturbed": void or None})
            self.repeats -= 1
            self.again[reason] += 1
            took = {name: conditions[name] for name in ("cpu_s", "wanted_s")}
            void.append({"wall_s": outcome.timing.wall_s, "reason": reason, **took})

    def _write(
        self, session: WorkerSession, cell: Cell, round_: int, block: int, place: int, outcome: Done | Failed
    ) -> None:
        index = self.plan.cells.index(cell) + 1
        if isinstance(outcome, Failed):
            self.progress.decoded(cell, index, 0, None)
            return
        generations, timing, conditions, _ = outcome
        numbers = self.group.blocks[block]
        items = [self.suite.items[number] for number in numbers]
        identical = None
        if round_ == 1:
            prompts = [self.suite.prompt(number, self.answered[cell.cell]) for number in numbers]
            withheld = self.suite.withheld is not None
            lines = [
                generation_line(item.item, prompt, generation, block, public=not withheld and item.shared is None)
                for item, prompt, generation in zip(items, prompts, generations, strict=True)
            ]
            self.run.add_answers(cell.cell, lines)
            for line in lines:
                self._remember(cell.cell, line)
        else:
            first = self.tokens[cell.cell]
            identical = sum(first[i.item] == g.token_ids for i, g in zip(items, generations, strict=True))
        timed = timing_line(session.session, round_, block, place, timing, conditions, identical)
        self.run.add_timing(cell.cell, timed)
        self.progress.decoded(cell, index, len(items), dump(timed))

    def _attempt(
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

        unseen: with prompts that no server has kept; a cell that fails by these has not failed. within_s: time in
        which its server must be ready; a late cell has not failed. cache: as in `Plan.requests`.
        """
        budget = min(budget, self.suite.max_new_tokens)
        asked = self.plan.requests(self.suite, self.group.blocks[block], self.answered[cell.cell], budget, cache)
        requests = [request.unseen if unseen else request for request in asked]
        task = Task(cell=cell.cell, requests=requests, room=self.room, visit=self.visit, within_s=within_s)
        outcome: Done | Failed = Failed("", late=True)
        for _ in range(ATTEMPTS):
            if not cold and (cell.cell, len(requests)) not in session.warm:  # a new worker
                self._warm_up(session, [cell], [block])
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
            self._fail(cell, outcome)
        return outcome

    def _remember(self, cell: str, line: GenerationLine) -> None:
        self.tokens[cell][line.item] = line.token_ids
        self.answered[cell][line.item] = line.context

    def _fail(self, cell: Cell, failed: Failed) -> None:
        with self.writing:
            if cell.cell not in self.failed:
                line = FailureLine(cell=cell.cell, error=failed.error)
                self.run.add_failures([line.changed(again=True) if failed.again else line])
                self.failed.add(cell.cell)
                later = "; `--resume` tries it again" if failed.again else ""
                self.progress.note(f"{cell.cell} failed: {failed.error}{later}")

    def live(self) -> list[Cell]:
        """Return the cells that decode further blocks."""
        return self._alive(self.cells)

    def _alive(self, cells: Iterable[Cell]) -> list[Cell]:
        return [cell for cell in cells if cell.cell not in self.failed and cell.cell not in self.left]

    def _keep_finished_blocks(self) -> set[tuple[int, int]]:
        """Delete the lines of blocks that some live arm has not finished; return the others, (round, block).

        Conversations are kept whole, since a new server has no cached turns. Of arms that decode apart, delete those of
        rounds that an arm has not finished: a visit has one server.
        """
        finished = {
            cell.cell: {(line.round, line.block) for line in self.run.timings[cell.cell]} for cell in self.live()
        }
        if self.plan.request.apart:
            rounds = {r: {(r, block) for block in range(n)} for r, n in enumerate(self.group.rounds, start=1)}
            self.whole = {(name, r) for name, own in finished.items() for r in rounds if rounds[r] <= own}
            finished = {name: set().union(*(rounds[r] for n, r in self.whole if n == name)) for name in finished}
        done = set.intersection(*finished.values()) if finished else set()
        for round_, blocks in enumerate(self.group.rounds, start=1):
            for chain in self._chains(range(blocks)):
                whole = {(round_, block) for block in chain}
                done = done if whole <= done else done - whole
        for name, own in finished.items():
            self.run.keep_blocks(name, own if self.plan.request.apart else done)
        return done

"""The middle stage: run the plan's cells and write down what came out and how long it took.

Inside every block all arms run next to each other in random order, so that a drift of the machine meets them alike.
Needs torch and transformers only, but for private suites, which are asked again. What is on disk counts; what is
missing is run.
"""

import contextlib
import dataclasses
import itertools
import multiprocessing
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from mtbench.decoding.output import Generation, said
from mtbench.errors import UserError
from mtbench.runs import energy, peak_memory, rescoring
from mtbench.runs.directory import Record, RunDirectory
from mtbench.runs.model_pool import ModelPool, resolve_device
from mtbench.runs.plan import Cell, Group, Plan, RunRequest, SuitePlan
from mtbench.runs.prompts import open_plan
from mtbench.runs.requests import requests_of
from mtbench.runs.workers import Died, Done, Failed, Task, Worker, start_workers, undisturbed

WARM_UP_TOKENS = 16
WARM_UPS = 6  # an arm that moves shared memory makes another prepare once more
LIVES = 2  # a batch whose worker dies is tried once more, by a new one


class Progress(Protocol):
    """Told what happens; shows it (mtbench/report/terminal.py)."""

    def begin(self, cells: int, work: int) -> None: ...
    def decoded(self, cell: Cell, index: int, rows: int, timing: Mapping[str, Any] | None) -> None: ...
    def note(self, text: str) -> None: ...


def generate(
    run: RunDirectory,
    progress: Progress,
    time_budget_s: float | None = None,
    workers: int | None = None,
    ray: str | None = None,
    data_dir: str | None = None,
    *,
    peak_memory_on_cpu: bool = False,
) -> None:
    """Run whatever of the plan is not on disk yet; `time_budget_s` is this session's, else the plan's.

    By this process, by so many `workers` of this machine, or by those of the Ray cluster at an address. `data_dir`:
    where private suites' data is, if elsewhere than the plan says. `peak_memory_on_cpu`: measure peak memory on a CPU
    too, in one process per cell. Raises UserError if nothing can be run at all, or if
    the run was begun on another kind of device or in another type.
    """
    plan = open_plan(run, data_dir)
    alone = ray is None and workers in (None, 1)
    pool = ModelPool(plan.request) if alone else None
    budget_s = plan.request.time_budget_s if time_budget_s is None else time_budget_s
    deadline = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    run.keep_lines("failures.jsonl", run.lines("failures.jsonl"))
    broken = {cell.cell: cell.fault for cell in plan.cells if cell.fault}
    failed = {f["cell"] for f in run.lines("failures.jsonl") if f.get("stage") is None}
    run.append("failures.jsonl", [{"cell": c, "error": why} for c, why in broken.items() if c not in failed])
    failed |= broken.keys()
    stages = [Stage(run, plan, group, failed, progress) for group in plan.groups]
    work = sum(stage.work for stage in stages)
    if not work:
        progress.begin(len(plan.cells), 0)
    else:
        with start_workers(pool, plan.request, plan.cells, workers, ray) as workers_:
            if len(workers_) > 1:
                progress.note(f"{len(workers_)} workers are loading the models")
            sessions = [WorkerSession(worker, len(workers_), run) for worker in workers_]
            side_by_side(sessions, WorkerSession.begin)
            progress.begin(len(plan.cells), work)
            if not all(stage.run_blocks(sessions, deadline) for stage in stages):
                progress.note("time budget spent; what is missing runs with --resume")
    if pool is not None:
        _untimed(run, plan, pool, failed, progress.note, deadline, peak_memory_on_cpu)
    else:
        _untimed_apart(run, plan, failed, progress.note, deadline, peak_memory_on_cpu)


def _untimed(
    run: RunDirectory,
    plan: Plan,
    pool: ModelPool,
    failed: set[str],
    note: Callable[[str], None],
    deadline: float,
    peak_memory_on_cpu: bool,
) -> None:
    """The passes behind the timed one: re-scoring, energy, memory."""
    for cell in plan.cells:
        if cell.cell not in failed:
            rescoring.check(run, cell, plan.suite(cell.suite), pool, note)
    energy.measure(run, plan, pool, failed, note, deadline)
    if pool.device != "cpu" or peak_memory_on_cpu:
        peak_memory.measure(run, plan, pool, failed, note, deadline)
    pool.clear()


def _untimed_apart(
    run: RunDirectory,
    plan: Plan,
    failed: set[str],
    note: Callable[[str], None],
    deadline: float,
    peak_memory_on_cpu: bool,
) -> None:
    """The same in a process of its own: who hands out work to GPUs must never be seen on one."""
    sessions = run.read_json("environment.json").get("sessions", [])
    there = sessions[0]["device"] if sessions else None
    here = "cpu" if there == "cpu" else resolve_device("auto")
    request = plan.request.changed(device=here)
    if there != here:
        note(f"decoded on {there}, and here is {here}: answers are not re-scored, nor memory measured")
        return
    context = multiprocessing.get_context("spawn")
    heard, tell = context.Pipe(duplex=False)
    arguments = (str(run.path), plan, request, failed, tell, deadline, peak_memory_on_cpu)
    child = context.Process(target=_untimed_in_child, args=arguments)
    with undisturbed():
        child.start()
    tell.close()
    try:
        with contextlib.suppress(EOFError):
            while True:
                note(heard.recv())
    except BaseException:
        child.kill()
        raise
    finally:
        child.join()
    if child.exitcode:
        note(f"the untimed passes died (exit code {child.exitcode}); `--resume` tries them again")


def _untimed_in_child(
    path: str,
    plan: Plan,
    request: RunRequest,
    failed: set[str],
    tell: Connection,
    deadline: float,
    peak_memory_on_cpu: bool,
) -> None:
    _untimed(RunDirectory(Path(path)), plan, ModelPool(request), failed, tell.send, deadline, peak_memory_on_cpu)


KIND = ("--device", "--dtype", "the GPU")  # of a session; a cell's are all of one


def _kind(session: Mapping[str, Any]) -> tuple[str | None, ...]:
    gpu = session.get("gpu") or {}
    return session["device"], session["dtype"], gpu.get("name") if session["device"] == "cuda" else None


class WorkerSession:
    """A worker, and what it is known by: its session, and which shapes it has warmed up."""

    _writing = threading.Lock()  # of environment.json

    def __init__(self, worker: Worker, of: int, run: RunDirectory) -> None:
        self.worker, self.of, self.run = worker, of, run

    def begin(self) -> None:
        """Note the process in environment.json: its session is that entry's number, from 1."""
        try:
            described = {**self.worker.describe(), "workers": self.of}
        except Died as death:
            raise UserError(f"{death} while it loaded the models; make room, or take fewer `--workers`.") from None
        self.warm: set[tuple[str, int]] = set()  # cell, rows
        with self._writing:
            environment = self.run.read_json("environment.json")
            sessions = environment.get("sessions", [])
            for what, there, here in zip(KIND, _kind(sessions[0]), _kind(described), strict=True) if sessions else ():
                if there != here:
                    raise UserError(
                        f"this run was begun with {what} {there}, here it would go on with {here}; a cell must not mix "
                        "them. Go on where it began, or start another run with `-o DIR`."
                    )
            self.session = len(sessions) + 1
            self.run.write_json("environment.json", {**environment, "sessions": [*sessions, described]})

    def prepare(self, task: Task) -> None:
        """Warm up the task's shape, if it is cold: the worker has just begun in the place of another."""
        shape = (task.cell, len(task.requests))
        if shape not in self.warm:
            short = [
                dataclasses.replace(request, max_new_tokens=min(WARM_UP_TOKENS, request.max_new_tokens))
                for request in task.requests
            ]
            few = dataclasses.replace(task, requests=short)
            for _ in range(WARM_UPS):
                outcome = self.worker.decode(few)
                if isinstance(outcome, Failed) or not outcome.timing.preparation_s:
                    break
            self.warm.add(shape)


def side_by_side(sessions: Sequence[WorkerSession], work: Callable[[WorkerSession], None]) -> None:
    """Every hand does its part at once. What one raises ends them all."""
    if len(sessions) == 1:
        return work(sessions[0])
    with ThreadPoolExecutor(len(sessions)) as threads:
        parts = [threads.submit(work, session) for session in sessions]
        try:
            for part in as_completed(parts):
                part.result()
        except BaseException:
            for session in sessions:
                session.worker.close()
            raise


class Stage:
    """One group of cells, block by block."""

    def __init__(self, run: RunDirectory, plan: Plan, group: Group, failed: set[str], progress: Progress) -> None:
        self.run, self.plan, self.group, self.failed, self.progress = run, plan, group, failed, progress
        self.suite: SuitePlan = plan.suite(group.suite)
        self.cells = [plan.cell(name) for name in group.cells]
        self.room = self.suite.room  # of every batch: shapes are the same for all blocks
        self.writing = threading.RLock()
        self.done = self._mend()
        self.tokens: dict[str, dict[str, list[int]]] = {name: {} for name in group.cells}  # by cell and item
        self.said: dict[str, dict[str, Sequence[int]]] = {name: {} for name in group.cells}  # without the end token
        for name in group.cells:
            for line in run.lines(f"generations/{name}.jsonl"):
                self._remember(name, line)

    @property
    def todo(self) -> list[tuple[int, int]]:
        """(round, block) in the order they run; rounds count from 1."""
        rounds = enumerate(self.group.rounds, start=1)
        return [(r, b) for r, blocks in rounds for b in range(blocks) if (r, b) not in self.done]

    @property
    def work(self) -> int:
        """Batches to decode."""
        return len(self.todo) * len(self._live())

    def run_blocks(self, sessions: Sequence[WorkerSession], deadline: float) -> bool:
        """Round by round, for what a round repeats must be there; in a round each hand takes what is next.

        False if the deadline leaves something undone.
        """
        todo = self.todo
        if time.monotonic() > deadline:
            return not todo
        shapes = {len(self.group.blocks[block]): block for _, block in todo}.values()
        side_by_side(sessions, lambda session: self._warm_up(session, shapes))
        for round_, of_round in itertools.groupby(todo, key=lambda at: at[0]):
            queue = deque(self._chains([block for _, block in of_round]))

            def serve(session: WorkerSession, round_: int = round_, queue: deque[list[int]] = queue) -> None:
                while time.monotonic() <= deadline:
                    try:
                        chain = queue.popleft()
                    except IndexError:
                        return
                    for block in chain:
                        self._run_block(session, round_, block)

            side_by_side(sessions, serve)
            if queue:
                return False
        return True

    def _chains(self, blocks: Sequence[int]) -> list[list[int]]:
        """Blocks that one hand runs one after the other: later turns behind the answers they follow."""
        chains: list[list[int]] = []
        for block in blocks:
            later = self.suite.items[self.group.blocks[block][0]].follows is not None
            if later and chains and chains[-1][-1] == block - 1:
                chains[-1].append(block)
            else:
                chains.append([block])
        return chains

    def _warm_up(self, session: WorkerSession, blocks: Collection[int]) -> None:
        """Decode a little of a block of every shape until no arm has anything left to prepare for it.

        What the first calls took beyond the last, warm one is noted as the cell's preparation.
        """
        wall_s: dict[tuple[str, int], list[float]] = {}
        for call in range(WARM_UPS):
            preparing = call == 0
            for block, cell in itertools.product(blocks, self._live()):
                outcome = self._attempt(session, cell, block, WARM_UP_TOKENS, cold=True)
                if isinstance(outcome, Done):
                    session.warm.add((cell.cell, len(self.group.blocks[block])))
                    wall_s.setdefault((cell.cell, block), []).append(outcome.timing.wall_s)
                    preparing |= outcome.timing.preparation_s > 0
            if not preparing:
                break
        for cell in self._live():
            calls = [w for (name, _), w in wall_s.items() if name == cell.cell]
            prepared_s = sum(max(0.0, sum(w) - len(w) * w[-1]) for w in calls)
            line = {"session": session.session, "cell": cell.cell, "preparation_s": prepared_s}
            with self.writing:
                self.run.append("preparation.jsonl", [line])

    def _run_block(self, session: WorkerSession, round_: int, block: int) -> None:
        order = self._live()
        random.Random(f"{self.plan.request.seed}/{self.group.batch_size}/{round_}/{block}").shuffle(order)
        for place, cell in enumerate(order):
            if hidden := self._hidden(cell, block):
                self._fail(cell, f"{hidden} follows an answer whose tokens its engine hides")
            if cell.cell not in self.failed:  # another hand may have found out
                outcome = self._attempt(session, cell, block, self.suite.max_new_tokens)
                with self.writing:
                    self._write(session, cell, round_, block, place, outcome)

    def _write(
        self, session: WorkerSession, cell: Cell, round_: int, block: int, place: int, outcome: Done | Failed
    ) -> None:
        index = self.plan.cells.index(cell) + 1
        if isinstance(outcome, Failed):
            self.progress.decoded(cell, index, 0, None)
            return
        generations, timing, conditions = outcome
        numbers = self.group.blocks[block]
        items = [self.suite.items[number] for number in numbers]
        identical = None
        if round_ == 1:
            prompts = [self.suite.prompt(number, self.said[cell.cell]) for number in numbers]
            shown = self.suite.withheld is None
            of_items = zip(items, prompts, generations, strict=True)
            lines = [_generation_line(i.item, prompt, g, block, shown=shown) for i, prompt, g in of_items]
            self.run.append(f"generations/{cell.cell}.jsonl", lines)
            for line in lines:
                self._remember(cell.cell, line)
        else:
            known = self.tokens[cell.cell]
            identical = sum(known[i.item] == g.token_ids for i, g in zip(items, generations, strict=True))
        line = {
            "session": session.session,
            "round": round_,
            "block": block,
            "order": place,
            **dataclasses.asdict(timing),
            **conditions,
            "identical": identical,
        }
        if timing.preparation_s:
            line["dropped"] = line["dropped"] or "a shape was prepared inside the window"
        self.run.append(f"timings/{cell.cell}.jsonl", [line])
        self.progress.decoded(cell, index, len(items), line)

    def _attempt(
        self, session: WorkerSession, cell: Cell, block: int, budget: int, *, cold: bool = False
    ) -> Done | Failed:
        """Decode one block, of a warm shape unless `cold`. A cell that fails is noted, or kills two workers with it."""
        budget = min(budget, self.suite.max_new_tokens)
        requests = requests_of(self.plan, self.suite, self.group.blocks[block], self.said[cell.cell], budget)
        task = Task(cell=cell.cell, requests=requests, room=self.room)
        outcome: Done | Failed = Failed("")
        for _ in range(LIVES):
            try:
                if not cold:
                    session.prepare(task)
                outcome = session.worker.decode(task)
                break
            except Died as death:
                if session.worker.closed:  # it was told to go
                    raise
                outcome = Failed(f"{death}, and so did another one at the same batch")
                self.progress.note(f"{cell.cell}: {death}; a new one goes on")
                session.worker.revive()
                session.begin()
        if isinstance(outcome, Failed):
            self._fail(cell, outcome.error)
        return outcome

    def _hidden(self, cell: Cell, block: int) -> str | None:
        """An item that follows what is not known."""
        items, said = self.suite.items, self.said[cell.cell]
        turns = [items[number] for number in self.group.blocks[block]]
        lost = [i.item for i in turns if i.follows is not None and items[i.follows].item not in said]
        return lost[0] if lost else None

    def _remember(self, cell: str, line: Mapping[str, Any]) -> None:
        self.tokens[cell][line["item"]] = line["token_ids"]
        if (ids := said(line)) is not None:
            self.said[cell][line["item"]] = ids

    def _fail(self, cell: Cell, error: str) -> None:
        with self.writing:
            if cell.cell not in self.failed:
                self.run.append("failures.jsonl", [{"cell": cell.cell, "error": error}])
                self.failed.add(cell.cell)
                self.progress.note(f"{cell.cell} failed: {error}")

    def _live(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.cell not in self.failed]

    def _mend(self) -> set[tuple[int, int]]:
        """Keep the lines of blocks that every live arm has finished, drop the others; what is kept, (round, block)."""
        timings = {c.cell: self.run.lines(f"timings/{c.cell}.jsonl") for c in self.cells}
        live = [{(t["round"], t["block"]) for t in timings[c.cell]} for c in self._live()]
        done = set.intersection(*live) if live else set()
        for cell in self._live():
            name = f"{cell.cell}.jsonl"
            kept = [t for t in timings[cell.cell] if (t["round"], t["block"]) in done]
            self.run.keep_lines(f"timings/{name}", kept)
            lines = self.run.lines(f"generations/{name}")
            self.run.keep_lines(f"generations/{name}", [g for g in lines if (1, g["block"]) in done])
        return done


def _generation_line(item: str, prompt: Sequence[int], generation: Generation, block: int, *, shown: bool) -> Record:
    """What is stored of an answer; of a private suite's prompt, its length."""
    return {
        "item": item,
        "prompt_ids": list(prompt) if shown else None,
        "prompt_tokens": len(prompt),
        "token_ids": generation.token_ids,
        "text": generation.text,
        "forwards": generation.forwards,
        "commits": generation.commits,
        "positions_fed": generation.positions_fed,
        "draft_forwards": generation.draft_forwards,
        "drafted": generation.drafted,
        "surplus": generation.surplus,
        "finish_reason": generation.finish_reason,
        "block": block,
    }


def estimate_s(plan: Plan) -> float:
    """Seconds the plan would take if every answer used its whole budget and every arm were as slow as the slowest.

    Measured: the first block of every group is decoded for a few tokens, once to warm up and once by the clock.
    """
    pool, total = ModelPool(plan.request), 0.0
    pool.load(plan.cells)
    for group in plan.groups:
        suite = plan.suite(group.suite)
        few = min(WARM_UP_TOKENS, suite.max_new_tokens)
        requests = requests_of(plan, suite, group.blocks[0], max_new_tokens=few)
        for cell in map(plan.cell, group.cells):
            for _ in range(2):
                timing = pool.decode(cell, requests, fixed_length=True)[1]
            before_s = timing.prefill_s or 0.0
            total += sum(group.rounds) * (before_s + (timing.wall_s - before_s) * suite.max_new_tokens / few)
    return total

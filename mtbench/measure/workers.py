"""Workers: this process, processes of this machine with one GPU each, or actors on a Ray cluster.

A worker holds a plan's models and decodes the batches that it receives. Only the process that distributes batches
writes files. A crashed worker loses at most one batch. Ray (docs.ray.io) is an optional extra: it places the actors and
reports crashed ones.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch

from mtbench import plugins
from mtbench.clients.engine_server import READY_S, LateError
from mtbench.clients.openai_client import ServerError
from mtbench.decoding.adaptive_width import set_ridge
from mtbench.decoding.loop import NoProgressError
from mtbench.decoding.method_checks import MethodContractError, whereabouts
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.registry import METHODS, SERVING_ENGINES
from mtbench.decoding.request import Request
from mtbench.errors import NotNumbersError, UserError, first_line
from mtbench.hardware import machine, probe
from mtbench.measure.model_pool import ModelPool, usable_threads
from mtbench.measure.worker_counts import check_reachable, no_cluster, refuse, refuse_count, visible_gpus
from mtbench.models.loading import DTYPES
from mtbench.plan.directory import JsonObject
from mtbench.plan.formats import SessionRecord
from mtbench.plan.plan import Cell, Plan, RunRequest
from mtbench.plan.request import Execution
from mtbench.plan.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A block of requests for one cell."""

    cell: str
    requests: Sequence[Request]
    room: int  # least positions per row
    visit: int = 0  # number of the time in which the cell alone decodes; 0: all decode side by side
    within_s: float = READY_S  # in which a server must be ready that this task starts


class Done(NamedTuple):
    """A decoded task. `conditions`: clocks, power and other processes on the GPU (`machine.window`).

    `server`: the command that starts the cell's server; None: it has none.
    """

    generations: list[Generation]
    timing: Timing
    conditions: JsonObject
    server: str | None = None


class Failed(NamedTuple):
    """A method raised an error, never committed or ran out of memory: its cell fails.

    `again`: the cause may pass, so a later session tries the cell again. `late`: its server was not ready within the
    task's time; then the cell has not failed.
    """

    error: str
    again: bool = False
    late: bool = False


class Died(RuntimeError):
    """The worker crashed; its batch is lost."""


class Worker(Protocol):
    """Decodes one task at a time."""

    name: str
    closed: bool

    def describe(self) -> JsonObject:
        """Load the models; describe the process and its device. Raises UserError if it cannot decode anything."""
        ...

    def decode(self, task: Task) -> Done | Failed:
        """Decode a task. Raises UserError for an error of the whole run, Died if the worker crashed."""
        ...

    def revive(self) -> None:
        """Start a new worker in place of a crashed one."""
        ...

    def close(self) -> None:
        """End the worker at once."""
        ...


class LocalWorker:
    """A plan's models in this process, which decodes the batches."""

    name = "this process"
    closed = False

    def __init__(self, pool: ModelPool, cells: Sequence[Cell], *, in_turns: bool = False) -> None:
        self.pool, self.cells = pool, {cell.cell: cell for cell in cells}
        self.shares, self.strangers = machine.ProcessorShares(), machine.Strangers(in_turns=in_turns)

    def describe(self) -> JsonObject:
        self.pool.load(self.cells.values())
        dtype = DTYPES[self.pool.dtype]
        probed, reason = probe.probe(self.pool.device, dtype)
        if probed is not None:
            set_ridge(self.pool.device, probed.even_positions(dtype))
        roofline = probe.described(probed, reason, self.pool.checkpoints)
        unseen = {"strangers_reason": machine.unseen(self.pool.device)}
        return {**machine.environment(sys.argv), **self.pool.describe(), **roofline, **unseen}

    def decode(self, task: Task) -> Done | Failed:
        cell, self.pool.servers.within_s = self.cells[task.cell], task.within_s
        before = machine.sample(self.pool.device, *self.pool.servers.groups(cell))
        try:
            generations, timing = self.pool.decode(cell, task.requests, room=task.room, visit=task.visit)
        except (NoProgressError, MethodContractError, NotNumbersError) as error:
            return Failed(str(error))
        except UserError as error:
            where = whereabouts(error, METHODS[cell.method])
            if not where:  # not raised by the method: it would fail every cell
                raise
            return Failed(f"{error}{where}")
        except (torch.OutOfMemoryError, MemoryError) as error:
            longest = max(len(request.prompt_ids) for request in task.requests)
            budget = max(request.max_new_tokens for request in task.requests)
            return Failed(
                f"out of memory at batch size {len(task.requests)}, prompts of up to {longest} tokens and {budget} "
                f"new ones ({first_line(error)})"
            )
        except ServerError as error:
            return Failed(str(error), error.again, isinstance(error, LateError))
        except (Exception, SystemExit) as error:  # any fault of the method
            return Failed(f"{type(error).__name__}: {first_line(error)}{whereabouts(error, METHODS[cell.method])}")
        # before anything else changes the device's state
        after = machine.sample(self.pool.device, *self.pool.servers.groups(cell))
        passive = machine.waits_passively(machine.waiting(), torch.get_num_threads())
        never_sleeps = self.pool.device == "cpu" and cell.computes_here and not passive
        shares = machine.processor_shares(before, after, None if never_sleeps else cell.cell)
        # A thread that sleeps at barriers has less, and always as much. A compiler runs in other processes.
        least = 0.0 if self.pool.device == "cpu" and cell.computes_here else machine.POLLING_SHARE
        lacking = not timing.preparation_s and self.shares.lacking(shares, least)
        window = machine.window(before, after, lacking=lacking, others=self.strangers)
        return Done(generations, timing, window, self.pool.servers.command(cell))

    def revive(self) -> None: ...

    def close(self) -> None:
        self.pool.servers.close()


class Process:
    """A worker in its own process, which sees `gpu` alone or, on a CPU (None), uses its share of the cores."""

    def __init__(
        self, number: int, workers: int, request: RunRequest, cells: Sequence[Cell], gpu: str | None = None
    ) -> None:
        self.name, self.gpu = f"worker {number + 1}", gpu
        self.arguments = (workers, request, cells)
        self.closed = False
        self.revive()

    def revive(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=plugins.InChild(_serve), args=(theirs, *self.arguments), daemon=True, name=self.name
        )
        with interrupts_blocked(), _seeing(self.gpu):
            self.process.start()
        theirs.close()
        if self.closed:  # meanwhile
            self.close()

    def describe(self) -> JsonObject:
        return self._ask(None)  # type: ignore[no-any-return]

    def decode(self, task: Task) -> Done | Failed:
        return self._ask(task)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.closed = True
        self.process.kill()
        self.process.join()

    def _ask(self, task: Task | None) -> Any:
        """Send a task, or None for a description; return the answer or raise it. Raises Died if the process ended."""
        try:
            self.connection.send(task)
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            raise Died(f"{self.name} died (exit code {self.process.exitcode})") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer


_starting = threading.Lock()  # the environment of this process is that of one new process at a time


@contextlib.contextmanager
def _seeing(gpu: str | None) -> Iterator[None]:
    """Start a process in here that sees one GPU alone. It does so from its begin, since imports may ask CUDA."""
    with _starting:
        before = os.environ.get(machine.VISIBLE)
        os.environ.update({} if gpu is None else {machine.VISIBLE: gpu})
        try:
            yield
        finally:
            os.environ.pop(machine.VISIBLE, None)
            os.environ.update({} if before is None else {machine.VISIBLE: before})


def _serve(connection: Connection, workers: int, request: RunRequest, cells: Sequence[Cell]) -> None:
    torch.set_num_threads(max(1, usable_threads() // workers))
    worker = LocalWorker(ModelPool(request), cells)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                connection.send(worker.describe() if task is None else worker.decode(task))
            except UserError as error:
                connection.send(error)


@contextlib.contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Start a process in here that ignores SIGINT: the main process handles it and ends its workers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Actor:
    """A worker on a Ray cluster, with its own GPU if the cluster has any."""

    def __init__(self, number: int, gpus: int, request: RunRequest, cells: Sequence[Cell]) -> None:
        self.name = f"actor {number + 1}"
        self.gpus, self.request, self.cells = gpus, request, cells
        self.closed = False
        self.revive()

    def revive(self) -> None:
        import ray

        remote = ray.remote(num_gpus=self.gpus, num_cpus=1, max_restarts=0)(_Remote)
        self.actor = remote.remote(plugins.loaded(), self.request, list(self.cells))

    def describe(self) -> JsonObject:
        return self._get(self.actor.describe.remote())  # type: ignore[no-any-return]

    def decode(self, task: Task) -> Done | Failed:
        return self._get(self.actor.decode.remote(task))  # type: ignore[no-any-return]

    def close(self) -> None:
        import ray

        self.closed = True
        ray.kill(self.actor)

    def _get(self, reference: Any) -> Any:
        import ray

        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:  # the actor died, or could not start
            if isinstance(cause := getattr(error, "cause", None), UserError):
                raise cause from None
            raise Died(f"{self.name} died ({first_line(error)})") from None


class _Remote(LocalWorker):
    """The actor's side."""

    def __init__(self, files: Sequence[plugins.PluginFile], request: RunRequest, cells: Sequence[Cell]) -> None:
        plugins.load(files)
        super().__init__(ModelPool(request), cells)


def _refuse_other_engines(first: SessionRecord, now: SessionRecord) -> None:
    """Raise UserError if a serving engine has another release than in the session that started the run."""
    before, current = first.layers or {}, now.layers or {}
    for name in before.keys() & current.keys():
        if name.rpartition(" by ")[2] in SERVING_ENGINES and before[name] != current[name]:
            engine = name.rpartition(" by ")[2]
            raise UserError(
                f"this run started with {engine} as {before[name]}, and it is {current[name]} now; install that one "
                f"again by `mtbench fetch engine {engine}`, or start another run with `-o DIR`."
            )


def _refuse_other_hardware(first: SessionRecord, now: SessionRecord) -> None:
    """Raise UserError if a session cannot continue the run that session `first` started."""
    gpus = [session.gpu.name if session.gpu and session.device == "cuda" else None for session in (first, now)]
    same = {"--device": (first.device, now.device), "--dtype": (first.dtype, now.dtype), "the GPU": gpus}
    for name, (before, current) in same.items():
        if current != before:
            raise UserError(
                f"this run started with {name} {before}; it cannot resume with {current}. Resume it where it started, "
                "or start another run with `-o DIR`."
            )


class WorkerSession:
    """A worker with its session's number in environment.json and the shapes that it has warmed up."""

    _writing = threading.Lock()  # of environment.json

    def __init__(self, worker: Worker, workers: int, run: Run) -> None:
        self.worker, self.workers, self.run = worker, workers, run
        self.session = 0  # its number, from 1; 0: not begun
        self.warm: set[tuple[str, int]] = set()  # cell, rows

    def begin(self) -> None:
        """Load the models and add the process to environment.json; called again when a new worker replaces a dead one.

        Raises UserError if it cannot load them, or runs on other hardware than the run's first session.
        """
        try:
            described = {**self.worker.describe(), "workers": self.workers}
        except Died as death:
            raise UserError(f"{death} while it loaded the models; free memory, or use fewer `--workers`.") from None
        self.warm.clear()
        with self._writing:
            now, before = SessionRecord.model_validate(described), self.run.sessions
            if before:
                _refuse_other_hardware(before[0], now)
                _refuse_other_engines(before[0], now)
            self.session = len(before) + 1
            self.run.write_environment(self.run.environment.changed(sessions=[*before, now]))


def in_parallel(sessions: Sequence[WorkerSession], work: Callable[[WorkerSession], None]) -> None:
    """Call `work` for every worker, each in a thread. An exception in one closes all workers."""
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


@contextlib.contextmanager
def start_workers(pool: ModelPool | None, plan: Plan, execution: Execution) -> Iterator[Sequence[Worker]]:
    """Start the workers and end them on exit. With a `pool` the worker is this process, on that pool.

    Raises UserError for more workers than GPUs (timings need a GPU of their own), or an unreachable cluster.
    """
    request, cells, workers, ray = plan.request, plan.cells, execution.workers, execution.ray
    started: list[Worker] = []
    try:
        if pool is not None:
            started.append(LocalWorker(pool, cells, in_turns=execution.wait is not None))
        elif ray is not None:
            workers, gpus = _join(ray, workers, request.device)
            started += [Actor(number, gpus, request, cells) for number in range(workers)]
        else:
            assert workers is not None
            refuse(workers, None, request.device)
            seen = [*visible_gpus(request.device), *[None] * workers][:workers]
            started += [Process(number, workers, request, cells, gpu) for number, gpu in enumerate(seen)]
        yield started
    finally:
        for worker in started:
            worker.close()
        if ray is not None and "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def _join(address: str, workers: int | None, device: str) -> tuple[int, int]:
    """Join the cluster at `address`, or start one if it is `local`; return the number of workers and GPUs for each."""
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs Ray; `pip install ray`.") from None
    check_reachable(address)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        options = {"include_dashboard": False} if address == "local" else {}
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:
        raise no_cluster(address, error) from None
    signal.signal(signal.SIGTERM, on_sigterm)  # Ray installs its own handler
    resources = ray.cluster_resources()
    gpus = 0 if device == "cpu" else int(resources.get("GPU", 0))
    most = gpus or int(resources.get("CPU", 1))
    if device == "cuda" and not gpus:
        raise UserError("--device 'cuda' is not available: the cluster has no GPU.")
    if workers is None and not gpus:
        raise UserError("--ray: the cluster has no GPU to count; give the number of workers: `--workers N`.")
    workers = gpus if workers is None else workers
    refuse_count(workers, most, "GPUs of the cluster" if gpus else "cores of the cluster")
    return workers, 1 if gpus else 0

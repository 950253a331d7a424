"""Who decodes: this process; processes of this machine, each with a GPU of its own; or actors on a Ray cluster.

A worker holds a plan's models and decodes the batches it is handed. The process that hands them out is the only one
that writes, so a worker that dies loses the batch it was decoding and nothing else. Ray (docs.ray.io) is an optional
extra: it places the actors and says which of them died.
"""

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch

from mtbench.decoding.loop import NoProgressError
from mtbench.decoding.method_checks import MethodContractError, whereabouts
from mtbench.decoding.openai_client import ServerError
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.errors import UserError, first_line
from mtbench.hardware import machine, probe
from mtbench.models.loading import DTYPES
from mtbench.runs.directory import Record
from mtbench.runs.model_pool import ModelPool, resolve_device
from mtbench.runs.plan import Cell, RunRequest

PATIENCE_S = 5.0  # for a cluster to answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A block of requests for one cell."""

    cell: str
    requests: Sequence[Request]
    room: int  # least positions per row


class Done(NamedTuple):
    """What came of a task. `conditions`: clocks, power, who else was there (`gpu.window`)."""

    generations: list[Generation]
    timing: Timing
    conditions: Record


class Failed(NamedTuple):
    """A method broke, never committed or ran out of memory: it costs its own cell."""

    error: str


class Died(RuntimeError):
    """The worker is gone, and with it what it was doing."""


class Worker(Protocol):
    """One that decodes, one task at a time."""

    name: str
    closed: bool

    def describe(self) -> Record:
        """What results need to know of the process and its device. Raises UserError if nothing can be decoded there."""
        ...

    def decode(self, task: Task) -> Done | Failed:
        """Raises UserError if no cell would fare better, Died if the worker is gone."""
        ...

    def revive(self) -> None:
        """Begin anew where one died."""
        ...

    def close(self) -> None:
        """End it, whatever it is doing."""
        ...


class LocalWorker:
    """A plan's models, loaded in the process where batches are decoded."""

    name = "here"
    closed = False

    def __init__(self, pool: ModelPool, cells: Sequence[Cell]) -> None:
        self.pool, self.cells = pool, {cell.cell: cell for cell in cells}

    def describe(self) -> Record:
        self.pool.load(self.cells.values())
        probed = probe.describe(self.pool.device, DTYPES[self.pool.dtype], self.pool.checkpoints)
        return {**machine.environment(sys.argv), **self.pool.describe(), **probed}

    def decode(self, task: Task) -> Done | Failed:
        cell = self.cells[task.cell]
        before = machine.sample(self.pool.device)
        try:
            generations, timing = self.pool.decode(cell, task.requests, room=task.room)
        except UserError as error:
            where = whereabouts(error, METHODS[cell.method])
            if not where:  # not of the method but of the request: no cell would fare better
                raise
            return Failed(f"{error}{where}")
        except (torch.OutOfMemoryError, MemoryError) as error:
            longest = max(len(request.prompt_ids) for request in task.requests)
            budget = max(request.max_new_tokens for request in task.requests)
            return Failed(
                f"out of memory at batch size {len(task.requests)}, prompts of up to {longest} tokens and {budget} "
                f"new ones ({first_line(error)})"
            )
        except (NoProgressError, MethodContractError, ServerError) as error:
            return Failed(str(error))
        except (Exception, SystemExit) as error:  # a method's own fault, whatever it is
            return Failed(f"{type(error).__name__}: {first_line(error)}{whereabouts(error, METHODS[cell.method])}")
        after = machine.sample(self.pool.device)  # at once, while the device is as the batch left it
        return Done(generations, timing, machine.window(before, after))

    def revive(self) -> None: ...

    def close(self) -> None: ...


class Process:
    """A bench in a process of its own, which sees one GPU or, on a CPU, has its share of the cores."""

    def __init__(self, number: int, of: int, request: RunRequest, cells: Sequence[Cell]) -> None:
        self.name = f"worker {number + 1}"
        self.arguments = (number, of, request, cells)
        self.closed = False
        self.revive()

    def revive(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *self.arguments), daemon=True, name=self.name)
        with undisturbed():
            self.process.start()
        theirs.close()
        if self.closed:  # while it was being born
            self.close()

    def describe(self) -> Record:
        return self._ask(None)  # type: ignore[no-any-return]

    def decode(self, task: Task) -> Done | Failed:
        return self._ask(task)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.closed = True
        self.process.kill()
        self.process.join()

    def _ask(self, what: Task | None) -> Any:
        try:
            self.connection.send(what)
            answer = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            raise Died(f"{self.name} died (exit code {self.process.exitcode})") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(connection: Connection, number: int, of: int, request: RunRequest, cells: Sequence[Cell]) -> None:
    """The life of a worker's process: it ends when nobody asks any more."""
    if resolve_device(request.device) == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[number] if visible else str(number)
    torch.set_num_threads(max(1, torch.get_num_threads() // of))
    worker = LocalWorker(ModelPool(request), cells)
    with contextlib.suppress(EOFError, OSError):
        while True:
            task = connection.recv()
            try:
                connection.send(worker.describe() if task is None else worker.decode(task))
            except UserError as error:
                connection.send(error)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A process that begins in here hears no interruption: the one who hands out the work does, and ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Actor:
    """A bench on a Ray cluster, with a GPU of its own if the cluster has any."""

    def __init__(self, number: int, gpus: int, request: RunRequest, cells: Sequence[Cell]) -> None:
        self.name = f"actor {number + 1}"
        self.gpus, self.request, self.cells = gpus, request, cells
        self.closed = False
        self.revive()

    def revive(self) -> None:
        import ray

        remote = ray.remote(num_gpus=self.gpus, num_cpus=1, max_restarts=0)(_Remote)
        self.actor = remote.remote(self.request, list(self.cells))

    def describe(self) -> Record:
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
            answer = ray.get(reference)
        except ray.exceptions.RayError as error:  # of the actor, or of what it could not even begin
            raise Died(f"{self.name} died ({first_line(error)})") from None
        if isinstance(answer, UserError):
            raise answer
        return answer


class _Remote:
    """What runs at the other end: a mistake of the user's comes back as it is, not wrapped."""

    def __init__(self, request: RunRequest, cells: Sequence[Cell]) -> None:
        self.worker = LocalWorker(ModelPool(request), cells)

    def describe(self) -> Record | UserError:
        try:
            return self.worker.describe()
        except UserError as error:
            return error

    def decode(self, task: Task) -> Done | Failed | UserError:
        try:
            return self.worker.decode(task)
        except UserError as error:
            return error


@contextlib.contextmanager
def start_workers(
    pool: ModelPool | None,
    request: RunRequest,
    cells: Sequence[Cell],
    workers: int | None,
    ray: str | None,
) -> Iterator[Sequence[Worker]]:
    """The workers, ended at the end. With a `pool` it is this process, on it.

    Raises UserError for more workers than GPUs (a GPU that is shared gives no timings), or a cluster that is not there.
    """
    staff: list[Worker] = []
    try:
        if pool is not None:
            staff.append(LocalWorker(pool, cells))
        elif ray is not None:
            workers, gpus = _join(ray, workers, request.device)
            staff += [Actor(number, gpus, request, cells) for number in range(workers)]
        else:
            assert workers is not None
            _check(workers, resolve_device(request.device))
            staff += [Process(number, workers, request, cells) for number in range(workers)]
        yield staff
    finally:
        for worker in staff:
            worker.close()
        if ray is not None and "ray" in sys.modules:
            sys.modules["ray"].shutdown()


def refuse(workers: int | None, ray: str | None, device: str) -> None:
    """Raise UserError for workers that cannot be had, as far as that is known before anything begins."""
    if ray is not None:
        check_reachable(ray)
    elif workers is not None:
        _check(workers, resolve_device(device))


def check_reachable(address: str) -> None:
    """Raise UserError if nobody is at the address of a cluster; Ray itself would go on knocking for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        if not address:
            raise ValueError("no address")
        if host:
            socket.create_connection((host, int(port)), PATIENCE_S).close()
    except (OSError, ValueError) as error:
        raise _no_cluster(address, error) from None


def _no_cluster(address: str, error: BaseException) -> UserError:
    return UserError(f"--ray {address!r}: no cluster ({first_line(error)}); `ray start --head` begins one.")


def _check(workers: int, device: str) -> None:
    there = torch.cuda.device_count() if device == "cuda" else os.cpu_count() or 1
    if not 1 <= workers <= there:
        what = "GPUs" if device == "cuda" else "cores"
        raise UserError(f"--workers {workers} is not allowed; it is from 1 to {there}, the {what} of this machine.")


def _join(address: str, workers: int | None, device: str) -> tuple[int, int]:
    """Join the cluster at `address`, or begin one here if it is `local`: how many workers, and GPUs for each."""
    try:
        import ray
    except ImportError:
        raise UserError("--ray needs Ray; `pip install 'multi-token-bench[ray]'`.") from None
    check_reachable(address)
    at_end = signal.getsignal(signal.SIGTERM)
    try:
        more = {"include_dashboard": False} if address == "local" else {}
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **more)
    except Exception as error:
        raise _no_cluster(address, error) from None
    signal.signal(signal.SIGTERM, at_end)  # Ray puts its own there
    there = ray.cluster_resources()
    gpus = 0 if device == "cpu" else int(there.get("GPU", 0))
    most = gpus or int(there.get("CPU", 1))
    if device == "cuda" and not gpus:
        raise UserError("--device 'cuda' is not here: the cluster has no GPU.")
    if workers is None and not gpus:
        raise UserError("--ray: the cluster has no GPU to count, so say how many workers: `--workers N`.")
    if workers is not None and not 1 <= workers <= most:
        what = "GPUs" if gpus else "cores"
        raise UserError(f"--workers {workers} is not allowed; it is from 1 to {most}, the {what} of the cluster.")
    return workers or gpus, 1 if gpus else 0

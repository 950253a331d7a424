"""One worker in one session: its hardware, its cells, and work in several workers at once."""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from mtbench.errors import UserError
from mtbench.runs.directory import RunDirectory
from mtbench.runs.workers import Died, Failed, Task, Worker

WARM_UP_TOKENS = 16
WARM_UPS = 6  # most calls per shape: an arm that moves shared memory makes another arm prepare again


def _hardware(session: Mapping[str, Any]) -> dict[str, str | None]:
    """Return what all sessions of a run must have in common: device, dtype and, on CUDA, the GPU's name."""
    gpu = session.get("gpu") or {}
    name = gpu.get("name") if session["device"] == "cuda" else None
    return {"--device": session["device"], "--dtype": session["dtype"], "the GPU": name}


def _refuse_other_hardware(first: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise UserError if a session cannot continue the run that session `first` started."""
    current = _hardware(now)
    for name, started_with in _hardware(first).items():
        if current[name] != started_with:
            raise UserError(
                f"this run started with {name} {started_with}; it cannot resume with {current[name]}. Resume it where "
                "it started, or start another run with `-o DIR`."
            )


class WorkerSession:
    """A worker with its session's number in environment.json and the shapes that it has warmed up."""

    _writing = threading.Lock()  # of environment.json

    def __init__(self, worker: Worker, workers: int, run: RunDirectory) -> None:
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
            environment = self.run.read_json("environment.json")
            sessions = environment.get("sessions", [])
            if sessions:
                _refuse_other_hardware(sessions[0], described)
            self.session = len(sessions) + 1
            self.run.write_json("environment.json", {**environment, "sessions": [*sessions, described]})

    def prepare(self, task: Task) -> None:
        """Warm up the task's shape if it is cold: the worker has just replaced a dead one."""
        shape = (task.cell, len(task.requests))
        if shape not in self.warm:
            short = [
                dataclasses.replace(request, max_new_tokens=min(WARM_UP_TOKENS, request.max_new_tokens))
                for request in task.requests
            ]
            warm_up = dataclasses.replace(task, requests=short)
            for _ in range(WARM_UPS):
                outcome = self.worker.decode(warm_up)
                if isinstance(outcome, Failed) or not outcome.timing.preparation_s:
                    break
            self.warm.add(shape)


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

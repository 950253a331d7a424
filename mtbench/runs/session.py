"""One worker in one session: its hardware, its cells, and work in several workers at once."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from mtbench.errors import UserError
from mtbench.records import dump
from mtbench.runs.directory import RunDirectory
from mtbench.runs.formats import Environment, SessionRecord
from mtbench.runs.workers import Died, Worker

WARM_UP_TOKENS = 16
WARM_UPS = 6  # most calls per shape: an arm that moves shared memory makes another arm prepare again


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
            environment = self.run.read("environment.json", Environment)
            now, before = SessionRecord.model_validate(described), environment.sessions
            if before:
                _refuse_other_hardware(before[0], now)
            self.session = len(before) + 1
            self.run.write_json("environment.json", dump(environment.changed(sessions=[*before, now])))


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

"""The thread that decodes, and how the event loop hears of it.

The two share tickets and a queue. The thread never waits for the loop, and the loop never for the thread. What a client
has not read yet is the list of token ids of its own answer, so a slow reader delays nobody and holds one answer.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from mtbench.decoding.live import Ended, Queue, Ticket, serve
from mtbench.decoding.request import Request
from mtbench.errors import UserError, first_line
from mtbench.serving.metrics import Metrics
from mtbench.serving.served import Served


@dataclass(eq=False, slots=True)
class Job(Ticket):
    """A ticket with its times, on the monotonic clock, and the event that wakes its handler."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    arrived_s: float = field(default_factory=time.perf_counter)
    joined_s: float | None = None
    first_s: float | None = None
    latest_s: float = 0.0

    @property
    def ended(self) -> Ended | None:
        return self.outcome if isinstance(self.outcome, Ended) else None


class Worker:
    """Decodes jobs in a thread of its own."""

    def __init__(self, served: Served) -> None:
        self.served, self.queue = served, Queue()
        self.running = 0  # rows that decode
        self.error: BaseException | None = None  # what ended the thread
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._decode, name="decoding", daemon=True)
        self.metrics = self._new_metrics()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread.start()

    async def warm_up(self) -> None:
        """Decode a short request, so that what is compiled or captured is ready. Raises what the method raises."""
        prompt = [0] * self.served.method.block
        room = self.served.max_length - len(prompt)
        job = self.submit(Request(prompt_ids=prompt, max_new_tokens=min(16, room), ignore_eos=True))
        while job.outcome is None and self.alive:
            with suppress(TimeoutError):
                await asyncio.wait_for(job.news.wait(), 0.1)
            job.news.clear()
        if (error := self.error or job.outcome) is not job.ended:
            raise UserError(f"{self.served.arm} cannot be served: {first_line(error)}.")  # type: ignore[arg-type]
        self.metrics = self._new_metrics()

    def submit(self, request: Request) -> Job:
        job = Job(request)
        self.queue.put(job)
        if self.error is not None:  # the thread may have ended before it saw the job
            self._fail([job])
        return job

    def drop(self, job: Job) -> None:
        """Free what a job has, because nobody waits for its answer."""
        if not self.queue.remove(job):
            job.give_up()

    def close(self) -> None:
        """Let the thread end when it has decoded what it has."""
        self.queue.close()

    def joined(self, ticket: Ticket) -> None:
        assert isinstance(ticket, Job)
        ticket.joined_s = time.perf_counter()
        self.running += 1

    def stepped(self, rows: int) -> None:
        self.metrics.forwards.inc(rows)

    def grew(self, grown: Sequence[tuple[Ticket, int]]) -> None:
        now = time.perf_counter()
        for job, tokens in grown:
            assert isinstance(job, Job)
            if job.first_s is None:
                job.first_s = now
                self.metrics.first_s.observe(now - job.arrived_s)
            else:
                for _ in range(tokens):
                    self.metrics.gap_s.observe((now - job.latest_s) / tokens)
            job.latest_s = now
        self.metrics.tokens.inc(sum(tokens for _, tokens in grown))
        self._wake([job for job, _ in grown])

    def left(self, ticket: Ticket) -> None:
        self.running -= ticket.joined_s is not None  # type: ignore[attr-defined]
        self._wake([ticket])

    def _new_metrics(self) -> Metrics:
        return Metrics(self.served.rows, lambda: len(self.queue), lambda: self.running)

    def _decode(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            serve(self.served.make, self.queue, self)
        except BaseException as error:
            self.error = error
            self._fail(self.queue.take(len(self.queue)))

    def _fail(self, tickets: Sequence[Ticket]) -> None:
        for ticket in tickets:
            ticket.outcome = self.error
        self._wake(tickets)

    def _wake(self, tickets: Sequence[Ticket]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(_set, tickets)
        except RuntimeError:  # the loop has ended: nobody waits
            return


def _set(tickets: Sequence[Ticket]) -> None:
    for job in tickets:
        assert isinstance(job, Job)
        job.news.set()

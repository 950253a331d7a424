"""The thread that decodes, and its messages to the event loop.

The two share tickets and a queue. The thread never waits for the loop, nor the loop for the thread. A client's unread
data are the token ids of its own answer, so a slow reader delays nobody and holds one answer.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from mtbench.decoding.live import Ended, Queue, Ticket, serve
from mtbench.decoding.request import Request
from mtbench.errors import NotNumbersError, UserError, first_line
from mtbench.serving.served import Served

Outcome = Literal["ok", "rejected", "failed", "cancelled", "timed_out"]
OUTCOMES: tuple[Outcome, ...] = ("ok", "rejected", "failed", "cancelled", "timed_out")


class Metrics:
    """The metrics for Prometheus: counters and gauges of one server, in a registry of its own."""

    def __init__(self, rows: int, queue: Callable[[], int], running: Callable[[], int]) -> None:
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("mtbench_requests", "Requests by outcome.", ["outcome"], registry=registry)
        for outcome in OUTCOMES:
            self.requests.labels(outcome)
        Gauge("mtbench_queue_length", "Requests that wait for a row.", registry=registry).set_function(queue)
        Gauge("mtbench_rows_running", "Rows that decode a request.", registry=registry).set_function(running)
        Gauge("mtbench_rows", "Rows of the batch.", registry=registry).set(rows)
        self.tokens = Counter("mtbench_tokens", "Tokens decoded.", registry=registry)
        self.forwards = Counter("mtbench_forwards", "Forward passes, counted once per running row.", registry=registry)

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return generate_latest(self.registry)


@dataclass(eq=False, slots=True)
class TimedTicket(Ticket):
    """A ticket with its times, on the monotonic clock, and the event that wakes its handler."""

    news: asyncio.Event = field(default_factory=asyncio.Event)
    arrived_s: float = field(default_factory=time.perf_counter)
    joined_s: float | None = None

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
        """Decode a short request: greedy, sampled, and filtered. Raises UserError with what the method raises.

        When the first one has a row, all that any request needs is compiled and captured (`Batch.prepare`).
        """
        prompt = [0] * self.served.method.block
        room = self.served.max_length - len(prompt)
        request = Request(prompt_ids=prompt, max_new_tokens=min(16, room), ignore_eos=True)
        for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 2)):
            job = self.submit(replace(request, temperature=temperature, top_k=top_k))
            while job.outcome is None and self.alive:
                with suppress(TimeoutError):
                    await asyncio.wait_for(job.news.wait(), 0.1)
                job.news.clear()
            if (error := self.error or job.outcome) is not job.ended and not isinstance(error, NotNumbersError):
                raise UserError(f"{self.served.arm} cannot be served: {first_line(error)}.")  # type: ignore[arg-type]
        self.metrics = self._new_metrics()

    def submit(self, request: Request) -> TimedTicket:
        job = TimedTicket(request)
        self.queue.put(job)
        if self.error is not None:  # the thread may have ended before it saw the job
            self._fail([job])
        return job

    def drop(self, job: TimedTicket) -> None:
        """Free a job's row, because nobody waits for its answer."""
        if not self.queue.remove(job):
            job.give_up()

    async def end(self, within_s: float) -> None:
        """Let the thread end when it has decoded what it has, and wait for that at most `within_s` seconds.

        A process aborts if it ends while another thread of Python is in a product of torch.
        """
        self.queue.close()
        await asyncio.to_thread(self._thread.join, within_s)

    def joined(self, ticket: Ticket) -> None:
        assert isinstance(ticket, TimedTicket)
        ticket.joined_s = time.perf_counter()
        self.running += 1

    def stepped(self, rows: int) -> None:
        self.metrics.forwards.inc(rows)

    def grew(self, grown: Sequence[tuple[Ticket, int]]) -> None:
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
        assert isinstance(job, TimedTicket)
        job.news.set()

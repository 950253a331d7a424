"""Requests that arrive while a batch decodes: a server's side of the decode loop.

Clients put tickets into a queue; one thread decodes them in the rows of one batch (`serve`) and sleeps while there are
none. A request joins at the next step with a free row. It leaves at its end, or within the steps in flight after its
client gave it up (`Ticket.give_up`). Nothing here grows with the life of a server.

The loop is that of a workload (loop.py); `LiveRun` brings the requests and takes the answers.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from mtbench.decoding.batch_clock import Clock
from mtbench.decoding.host_sync import Counts
from mtbench.decoding.loop import Batch
from mtbench.decoding.output import Generation
from mtbench.decoding.request import Request
from mtbench.decoding.run_state import Reads, RunState, contains, finished
from mtbench.errors import UserError, loses_device


class Ended(NamedTuple):
    """A complete answer."""

    generation: Generation
    offered: list[int]  # by forward, tokens beyond the first that could have been committed
    options: Mapping[str, float]  # that its tokens were decoded with


@dataclass(eq=False, slots=True)
class Ticket:
    """A request of a client. The thread that decodes writes `token_ids` and `outcome`, in this order; others read."""

    request: Request
    token_ids: list[int] = field(default_factory=list)  # decided so far, also some beyond a stop string
    outcome: Ended | BaseException | None = None  # None: not complete; an exception: why it failed
    given_up: bool = False

    def give_up(self) -> None:
        """Free the row: nobody waits for the answer."""
        self.given_up = True


class GivenUpError(Exception):
    """Nobody waits for the answer any more."""


class Observer(Protocol):
    """Receives events from the thread that decodes. Its methods must return at once."""

    def joined(self, ticket: Ticket) -> None:
        """Take note that a request has a row."""

    def stepped(self, rows: int) -> None:
        """Take note of a forward over so many requests."""

    def grew(self, grown: Sequence[tuple[Ticket, int]]) -> None:
        """Take note of the number of new tokens of some requests."""

    def left(self, ticket: Ticket) -> None:
        """Take note that a request has its `outcome`."""


class Queue:
    """Tickets that wait for a row, first come, first served. Any thread may use it."""

    def __init__(self) -> None:
        self._tickets: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tickets)

    def put(self, ticket: Ticket) -> None:
        with self._changed:
            self._tickets.append(ticket)
            self._changed.notify()

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket that has no row yet. Return whether it was still there."""
        with self._changed:
            if ticket not in self._tickets:
                return False
            self._tickets.remove(ticket)
            return True

    def take(self, most: int) -> list[Ticket]:
        """Return the next tickets, at most so many."""
        with self._changed:
            return [self._tickets.popleft() for _ in range(min(most, len(self._tickets)))]

    def wait(self) -> bool:
        """Sleep until there is a ticket. Return False if the queue is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._tickets or self._closed)
            return bool(self._tickets)

    def close(self) -> None:
        """Let the thread that decodes end when it has decoded what is here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class LiveRun(RunState):
    """The run of a batch that decodes the requests of a queue."""

    goes_on = True

    def __init__(self, batch: Batch, queue: Queue, observer: Observer) -> None:
        super().__init__()
        self.sets_options = True
        self.most_new_tokens, self.rows = batch.slots, batch.width
        self.queue, self.observer = queue, observer
        self.checkpoint = batch.target.checkpoint
        self.options = {name: float(getattr(batch.method, name)) for name in batch.options}  # of requests without
        self.tickets: dict[int, Ticket] = {}  # by row
        self.known: dict[int, int] = {}  # by row, decided tokens that the host has read
        self._taken: dict[int, Ticket] = {}  # by number, until they are placed
        self._number = 0  # of the latest request

    @property
    def waiting(self) -> bool:
        return len(self.queue) > 0

    def wait(self) -> bool:
        return self.queue.wait()

    def take(self, rows: int) -> list[tuple[int, Request]]:
        taken = []
        for ticket in self.queue.take(rows):
            self._number += 1
            self._taken[self._number] = ticket
            options = {**self.options, **ticket.request.options}
            taken.append((self._number, replace(ticket.request, options=options)))
        return taken

    def place(self, row: int, number: int, request: Request) -> None:
        super().place(row, number, request)
        ticket = self._taken.pop(number)
        self.placed[row].searched, self.tickets[row], self.known[row] = 0, ticket, len(request.prompt_ids)
        self.observer.joined(ticket)

    def count_step(self, positions: int, draft_forwards: int) -> None:
        super().count_step(positions, draft_forwards)
        self.observer.stepped(len(self.live))

    def reads(self) -> Reads:
        return "recent"

    def progress(self) -> None:
        assert self.snapshot.tokens is not None
        grown = []
        for row in self.live:
            if new := self.snapshot.known[row] - self.known[row]:
                self.known[row] += new
                self.tickets[row].token_ids += self.snapshot.tokens[row][-new:]
                grown.append((self.tickets[row], new))
        if grown:
            self.observer.grew(grown)

    def stops(self, row: int, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Search new tokens and a short overlap for stop strings."""
        ticket, placed = self.tickets[row], self.placed[row]
        if ticket.given_up:
            return True
        prompt, ids = len(placed.request.prompt_ids), [*placed.request.prompt_ids, *ticket.token_ids]
        searched, placed.searched = placed.searched, len(ids)
        return contains(tokenizer, ids, placed.request.stop, prompt, searched)

    def must_free(self, finished: bool) -> bool:
        return finished or (self.waiting and len(self.live) < self.rows)

    def collect(self, row: int, token_ids: list[int], counts: Counts, error: UserError | None = None) -> None:
        placed, ticket = self.placed.pop(row), self.tickets.pop(row)
        request = placed.request
        if ticket.given_up:
            ticket.outcome = GivenUpError()
        elif error is not None:
            ticket.outcome = error
        else:
            ends = () if request.ignore_eos else self.checkpoint.end_ids
            ids = token_ids[len(request.prompt_ids) :]
            generation = finished(self.checkpoint.tokenizer, ids, counts, ends, request)
            assert generation.commits is not None
            offered = counts.offered[: len(generation.commits)]
            ticket.outcome = Ended(generation, offered, request.options)
        self.observer.left(ticket)

    def fail(self, error: BaseException) -> bool:
        """Let all requests in rows fail. Return whether there were any."""
        failed = [*self.tickets.values(), *self._taken.values()]
        for ticket in failed:
            ticket.outcome = error
            self.observer.left(ticket)
        return bool(failed)


@torch.inference_mode()
def serve(make: Callable[[], Batch], queue: Queue, observer: Observer) -> None:
    """Decode the requests of the queue until it is closed and empty.

    An error costs the requests in rows; the others continue in a new batch of `make`. An error without requests is
    raised, and one after which the GPU can no longer compute.
    """
    while True:
        batch = make()
        run = LiveRun(batch, queue, observer)
        try:
            batch.open(run)
            batch.decode(run, Clock())
            return
        except Exception as error:
            if not run.fail(error) or loses_device(error):
                raise
            error.__traceback__ = None  # it holds the tensors of the failed step
        del batch, run
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # raises if the GPU can no longer compute, whatever the error was
            torch.cuda.empty_cache()

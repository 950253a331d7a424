"""A live batch in a thread of its own, and someone who watches it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from mtbench.decoding.live import Ended, Queue, Ticket, serve
from mtbench.decoding.loop import Batch
from mtbench.decoding.output import Generation
from mtbench.decoding.request import Request

WAIT_S = 60.0


class Watcher:
    """Notes what the live batch tells it."""

    def __init__(self) -> None:
        self.forwards = self.tokens = 0
        self.ended = threading.Semaphore(0)
        self.on_step: Callable[[], None] = lambda: None

    def joined(self, ticket: Ticket) -> None: ...

    def stepped(self, rows: int) -> None:
        self.forwards += 1
        self.on_step()

    def grew(self, grown: Sequence[tuple[Ticket, int]]) -> None:
        self.tokens += sum(new for _, new in grown)

    def left(self, ticket: Ticket) -> None:
        self.ended.release()

    def wait(self, count: int) -> None:
        """Wait until so many requests have left."""
        for _ in range(count):
            assert self.ended.acquire(timeout=WAIT_S)


@contextmanager
def live(make: Callable[[], Batch]) -> Iterator[tuple[Queue, Watcher]]:
    """Decode what is put into the queue until the block ends."""
    queue, watcher = Queue(), Watcher()
    thread = threading.Thread(target=serve, args=(make, queue, watcher), daemon=True)
    thread.start()
    yield queue, watcher
    queue.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def live_generations(make: Callable[[], Batch], requests: Sequence[Request]) -> list[Generation]:
    """Return the answers to requests that arrive one after the other. What was told meanwhile is their beginning."""
    tickets = [Ticket(request) for request in requests]
    with live(make) as (queue, watcher):
        for ticket in tickets:
            queue.put(ticket)
        watcher.wait(len(tickets))
    generations = [generation_of(ticket) for ticket in tickets]
    assert all(t.token_ids[: len(g.token_ids)] == g.token_ids for t, g in zip(tickets, generations, strict=True))
    return generations


def live_answers(make: Callable[[], Batch], requests: Sequence[Request]) -> list[list[int]]:
    return [generation.token_ids for generation in live_generations(make, requests)]


def generation_of(ticket: Ticket) -> Generation:
    assert isinstance(ticket.outcome, Ended), ticket.outcome
    return ticket.outcome.generation

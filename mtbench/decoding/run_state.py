"""The host's state during one run of a batch: the request in each row, and the answers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from mtbench.decoding.host_sync import AsyncCopy, Counts, HostSnapshot
from mtbench.decoding.output import Generation, finish, first_of
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.models.loading import Checkpoint
from mtbench.models.token_text import exact_text

READ_EVERY = 8  # steps between two searches of the text for stop strings
Reads = Literal["all", "recent"] | None  # of the tokens: all, those that a few steps decided, or none


class CollectedRow(NamedTuple):
    """The content of a row when it was collected."""

    token_ids: list[int]
    counts: Counts
    first_step: int  # steps of the batch before the request's first


@dataclass(slots=True)
class Placed:
    """A request in a row."""

    number: int
    request: Request
    first_step: int  # steps before the request's first
    searched: int  # tokens already searched for stop strings


class RunState:
    """One run of a batch, as the host sees it: the source of requests, the row of each, and its answer.

    `WorkloadRun` decodes a list of requests; `mtbench.decoding.live.LiveRun` those that arrive meanwhile.
    """

    goes_on = False  # whether requests may come when none waits
    most_new_tokens: int  # of a request
    sets_options: bool  # whether requests may have options of their own
    snapshot: HostSnapshot  # the latest read; `Batch.begin` reads the first

    def __init__(self) -> None:
        self.copies: deque[AsyncCopy] = deque()  # snapshots not read yet
        self.live: set[int] = set()  # rows that decode
        self.placed: dict[int, Placed] = {}  # by row, until the answer is collected
        self.steps = 0  # made so far
        self.preparation_s = 0.0  # time to capture steps as graphs

    @property
    def waiting(self) -> bool:
        """Whether a request waits for a row."""
        raise NotImplementedError

    def wait(self) -> bool:
        """Wait for a request when no row is live. Return False if none will come."""
        return False

    def take(self, rows: int) -> list[tuple[int, Request]]:
        """Return the next requests with their numbers, for at most so many free rows."""
        raise NotImplementedError

    def place(self, row: int, number: int, request: Request) -> None:
        """Note that a request now decodes in this row."""
        self.live.add(row)
        self.placed[row] = Placed(number, request, self.steps, len(request.prompt_ids))

    def may_end(self, commits: int) -> bool:
        """Return whether every live row may reach its budget in steps in flight, of at most `commits` tokens each."""
        in_flight = len(self.copies) * commits
        return all(self.snapshot.known[row] + in_flight >= self.placed[row].request.slots for row in self.live)

    def count_step(self, positions: int, draft_forwards: int) -> None:
        """Count the positions that a step fed per row, and its forwards of draft models."""
        self.steps += 1

    def reads(self) -> Reads:
        """Return which tokens the host reads after this step."""
        return None

    def progress(self) -> None:
        """Take note of the latest snapshot."""

    def stops(self, row: int, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether the host ends the request in a live row: one that no end token and no budget has ended."""
        raise NotImplementedError

    def must_free(self, finished: bool) -> bool:
        """Return whether to collect finished rows and to fill free ones now. `finished`: some rows just finished."""
        raise NotImplementedError

    def collect(self, row: int, token_ids: list[int], counts: Counts, error: UserError | None = None) -> None:
        """Keep a row's answer, or the `error` that ended it. `token_ids` begin with the prompt."""
        raise NotImplementedError


class WorkloadRun(RunState):
    """The run of a list of requests. It keeps all answers, and the work of every step."""

    def __init__(self, requests: Sequence[Request]) -> None:
        super().__init__()
        self.requests = requests
        self.most_new_tokens = max(request.max_new_tokens for request in requests)
        self.sets_options = any(request.options for request in requests)
        self.stops_early = any(request.stop for request in requests)
        self.queue = deque(enumerate(requests))
        self.answers: dict[int, CollectedRow] = {}  # by request
        self.positions_fed = [0]  # per row; entry n: sum of the first n steps
        self.draft_forwards = [0]  # entry n: sum of the first n steps

    @property
    def waiting(self) -> bool:
        return bool(self.queue)

    def take(self, rows: int) -> list[tuple[int, Request]]:
        return [self.queue.popleft() for _ in range(min(rows, len(self.queue)))]

    def count_step(self, positions: int, draft_forwards: int) -> None:
        super().count_step(positions, draft_forwards)
        self.positions_fed.append(self.positions_fed[-1] + positions)
        self.draft_forwards.append(self.draft_forwards[-1] + draft_forwards)

    def reads(self) -> Reads:
        return "all" if self.steps % READ_EVERY == 0 and self.stops_early else None

    def must_free(self, finished: bool) -> bool:
        return finished and self.waiting

    def stops(self, row: int, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Search the row's text for stop strings, but only new tokens and a short overlap."""
        if self.snapshot.tokens is None:
            return False
        placed, known = self.placed[row], self.snapshot.known[row]
        searched, placed.searched = placed.searched, known
        prompt, stop = len(placed.request.prompt_ids), placed.request.stop
        return contains(tokenizer, self.snapshot.tokens[row][:known], stop, prompt, searched)

    def collect(self, row: int, token_ids: list[int], counts: Counts, error: UserError | None = None) -> None:
        if error is not None:
            raise error
        placed = self.placed.pop(row)
        prompt = len(placed.request.prompt_ids)
        self.answers[placed.number] = CollectedRow(token_ids[prompt:], counts, placed.first_step)

    def generations(self, checkpoint: Checkpoint) -> list[Generation]:
        """Return each request's answer, cut at its stop strings. Its counts end with its last kept token."""
        generations = []
        for number, request in enumerate(self.requests):
            ids, counts, first_step = self.answers[number]
            ends = () if request.ignore_eos else checkpoint.end_ids
            generation = finished(checkpoint.tokenizer, ids, counts, ends, request)
            end = first_step + len(generation.commits or ())
            fed = self.positions_fed[end] - self.positions_fed[first_step]
            drafts = self.draft_forwards[end] - self.draft_forwards[first_step]
            generations.append(replace(generation, positions_fed=fed, draft_forwards=drafts))
        return generations


def contains(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], stop: Sequence[str], prompt: int, searched: int
) -> bool:
    """Return whether a stop string is in the text behind the `prompt` ids, and goes on behind the `searched` ids."""
    if not stop:
        return False
    begin = max(prompt, searched - max(len(s.encode()) for s in stop))  # a token is at least a byte
    return first_of(exact_text(tokenizer, ids[begin:], ids[:begin]), stop) is not None


def finished(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], counts: Counts, ends: Sequence[int], request: Request
) -> Generation:
    """Return an answer, cut at its stop strings, with its counts; those of the batch's work are None."""
    generation = finish(tokenizer, ids, ends, request.stop, request.prompt_ids)
    commits = _cut(counts.commits, len(generation.token_ids))
    return replace(
        generation,
        commits=commits,
        drafted=sum(counts.offered[: len(commits)]),
        surplus=counts.accepted[len(commits) - 1] - commits[-1],
    )


def _cut(counts: Sequence[int], tokens: int) -> list[int]:
    """Return the commits by forward, up to the forward that completes this number of tokens."""
    commits = []
    for count in counts:
        commits.append(min(count, tokens))
        tokens -= commits[-1]
        if not tokens:
            break
    return commits

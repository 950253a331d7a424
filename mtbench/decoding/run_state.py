"""What the host stores during one run of a batch: the request in each row, and the answers."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from mtbench.decoding.commit_log import Counts
from mtbench.decoding.host_sync import AsyncCopy, HostSnapshot
from mtbench.decoding.output import Generation, finish, text_of
from mtbench.decoding.request import Request, Workload
from mtbench.models.loading import Checkpoint


class Answer(NamedTuple):
    """The content of a row when it was collected."""

    token_ids: list[int]
    counts: Counts
    first_step: int  # steps of the batch before the request's first


@dataclass(slots=True)
class RunState:
    """One run of a batch, as the host sees it. `snapshot`: the latest read; `Batch.begin` reads the first."""

    workload: Workload
    snapshot: HostSnapshot = field(init=False)
    copies: deque[AsyncCopy] = field(default_factory=deque)  # snapshots not read yet
    queue: deque[int] = field(init=False)  # requests that wait for a row
    live: set[int] = field(default_factory=set)  # rows that decode
    request_in: dict[int, int] = field(default_factory=dict)  # row -> its request, until it is collected
    first_step: dict[int, int] = field(default_factory=dict)  # row -> steps before its request's first
    searched: dict[int, int] = field(default_factory=dict)  # row -> tokens already searched for stop strings
    answers: dict[int, Answer] = field(default_factory=dict)  # by request
    positions_fed: list[int] = field(default_factory=lambda: [0])  # per row; entry n: sum of the first n steps
    draft_forwards: list[int] = field(default_factory=lambda: [0])  # entry n: sum of the first n steps
    preparation_s: float = 0.0  # time to capture steps as graphs

    def __post_init__(self) -> None:
        self.queue = deque(range(len(self.requests)))

    @property
    def requests(self) -> Sequence[Request]:
        return self.workload.requests

    @property
    def steps(self) -> int:
        """Steps made so far."""
        return len(self.positions_fed) - 1

    def may_end(self, commits: int) -> bool:
        """Return whether every live row may reach its budget in steps in flight, of at most `commits` tokens each."""
        in_flight = len(self.copies) * commits
        return all(self.snapshot.known[row] + in_flight >= self._longest(row) for row in self.live)

    def _longest(self, row: int) -> int:
        """Return the most tokens that the row's request can have, with its prompt."""
        request = self.requests[self.request_in[row]]
        return len(request.prompt_ids) + request.max_new_tokens

    def place(self, rows: Sequence[int], taken: Sequence[int]) -> None:
        """Note that the requests `taken` now decode in these rows."""
        self.live |= set(rows)
        for row, request in zip(rows, taken, strict=True):
            self.request_in[row] = request
            self.first_step[row] = self.steps
            self.searched[row] = len(self.requests[request].prompt_ids)

    def count_step(self, positions: int, draft_forwards: int) -> None:
        """Count the positions that a step fed per row, and its forwards of draft models."""
        self.positions_fed.append(self.positions_fed[-1] + positions)
        self.draft_forwards.append(self.draft_forwards[-1] + draft_forwards)

    def search_stop(self, row: int, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether the row's text contains a stop string. Search only new tokens and a short overlap."""
        assert self.snapshot.tokens is not None
        request, known = self.requests[self.request_in[row]], self.snapshot.known[row]
        overlap = max((len(s.encode()) for s in request.stop), default=0)  # a token is at least a byte
        begin = max(len(request.prompt_ids), self.searched[row] - overlap)
        self.searched[row] = known
        if not request.stop:
            return False
        tail = text_of(tokenizer, self.snapshot.tokens[row][begin:known])
        return any(s in tail for s in request.stop)

    def collect(self, row: int, token_ids: list[int], counts: Counts) -> None:
        """Keep a row's answer. `token_ids` begin with the prompt."""
        request = self.request_in.pop(row)
        prompt = len(self.requests[request].prompt_ids)
        self.answers[request] = Answer(token_ids[prompt:], counts, self.first_step.pop(row))

    def generations(self, checkpoint: Checkpoint) -> list[Generation]:
        """Return each request's answer, cut at its stop strings. Its counts end with its last kept token."""
        generations = []
        for number, request in enumerate(self.requests):
            ids, counts, first_step = self.answers[number]
            if self.workload.fixed_length:
                ids, text, reason = finish(checkpoint.tokenizer, ids, (), ())
            else:
                ids, text, reason = finish(checkpoint.tokenizer, ids, checkpoint.end_ids, request.stop)
            commits = _cut(counts.commits, len(ids))
            end = first_step + len(commits)
            generations.append(
                Generation(
                    token_ids=ids,
                    text=text,
                    commits=commits,
                    positions_fed=self.positions_fed[end] - self.positions_fed[first_step],
                    draft_forwards=self.draft_forwards[end] - self.draft_forwards[first_step],
                    drafted=sum(counts.offered[: len(commits)]),
                    finish_reason=reason,
                    surplus=counts.accepted[len(commits) - 1] - commits[-1],
                )
            )
        return generations


def _cut(counts: Sequence[int], tokens: int) -> list[int]:
    """Return the commits by forward, up to the forward that completes this number of tokens."""
    commits = []
    for count in counts:
        commits.append(min(count, tokens))
        tokens -= commits[-1]
        if not tokens:
            break
    return commits

"""The decode loop: one for every method. It owns tokens, caches, stopping, counting and timing.

    while not all requests are served:
        guess → one forward over pending tokens and guesses → accept → cut, write, move the cursors

A step has a fixed shape and never waits for the host: acceptance, end-token cut and cursor moves are tensor
operations on tensors that keep their place, so that a step can be captured once and replayed. Between steps the host
looks: on a CPU, where looking is free and every position costs, at once, and it feeds no more than needed; on a GPU
some steps late. What came after a stop is cut from tokens, text and counts.

Requests sit in rows. Where there are more requests than rows, a finished row is refilled from the queue. A method of
several widths is as many variants, which share rows and state: each step is by one of them.

R = rows, P = pending positions, G = guesses, N = most tokens one forward commits, S = slots.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mtbench.decoding.adaptive_width import Widths
from mtbench.decoding.host_sync import Answer, AsyncCopy, HostSnapshot, Requests, Shape
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.method_checks import check_commit, check_proposal
from mtbench.decoding.output import Generation, Timing, finish, text_of
from mtbench.errors import UserError
from mtbench.hardware.timer import Stopwatch
from mtbench.models import sampling
from mtbench.models.attention import AttentionMetadata, causal

PREFILL_POSITIONS = 2048  # fed at once over all rows; with its least width per row it bounds mask and scores
PREFILL_WIDTH = 64
READ_EVERY = 8  # steps between two readings of the text for stop strings
ALIGNED = 16  # slots: kernels read the mask in words where its rows have a round length
LATE = 2  # steps a GPU's host looks late: it always has the next ones queued, and overshoots by no more than these
CHECKED = 8  # steps of which the host reads what a method hands over: it would cost time in all of them


class NoProgressError(RuntimeError):
    """A method went on without committing; it costs its own cells."""


BatchFactory = Callable[[Method, ModelRunners, int, int], "Batch"]


@torch.inference_mode()
def decode(
    method: Method,
    runners: ModelRunners,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    rows: int | None = None,
    stop: Sequence[Sequence[str]] | None = None,
    fixed_length: bool = False,
    room: int = 0,
    temperature: float = 0.0,
    seeds: Sequence[int] | None = None,
    make: "BatchFactory | None" = None,
) -> tuple[list[Generation], Timing]:
    """Continue each prompt by at most `max_new_tokens` tokens (one number, or one per prompt).

    All at once, or in `rows` rows that are refilled; up to an end token or one of the prompt's stop strings, unless
    `fixed_length`. `room`: positions a row shall have at least (so that many calls share a shape). With a `temperature`
    tokens are sampled; what comes out is a function of the prompt and its seed (by default its number). `make` gives
    the batch: an engine's. Raises Stuck if the method stops committing.
    """
    budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    stop, seeds = stop or [()] * len(prompts), seeds or range(len(prompts))
    requests = Requests(prompts, budgets, stop, fixed_length, seeds, temperature)
    _check_fit(method, runners, requests)
    slots = max(room, requests.slots)
    return (make or Batch)(method, runners, min(rows or len(prompts), len(prompts)), slots).run(requests)


def _check_fit(method: Method, runners: ModelRunners, requests: Requests) -> None:
    shortest = min(map(len, requests.prompts))
    block = method.variants[-1].block
    if shortest < block:
        raise UserError(
            f"{method.name} needs prompts of at least one block, here {block} tokens, and one has {shortest}; "
            "lengthen it, or decode it by another method. See `mtbench ls methods`."
        )
    for role, runner in runners.items():
        if requests.slots > runner.checkpoint.max_positions:
            longest = max(map(len, requests.prompts))
            raise UserError(
                f"a prompt of {longest} tokens and {max(requests.budgets)} new ones do not fit the context of "
                f"the {role!r} checkpoint ({runner.checkpoint.max_positions}); lower `--max-new-tokens`."
            )


def _patience(tokens: int) -> int:
    """Forwards that deciding so many tokens may take."""
    return 2 * tokens + 8


class Batch:
    """R rows in which requests are decoded. Every tensor that a step reads or writes keeps its place."""

    one_launch = False  # is a step one launch, so that its span on a GPU is work and not waiting for the host

    def __init__(
        self, method: Method, runners: ModelRunners, rows: int, positions: int, *, tight: bool | None = None
    ) -> None:
        """`tight`: look between any two steps and feed no more than needed; by default on a CPU only."""
        self.runners, self.target = runners, runners.target
        self.device = device = self.target.device
        self.variants = method.variants
        self.windows = [variant.window().to(device) for variant in self.variants]
        self.method, self.window = self.variants[-1], self.windows[-1]  # the widest one's state serves all
        most = [w.pending for w in self.windows]
        self.pending = None if None in most else max(filter(None, most))
        self.tight = (device.type == "cpu" if tight is None else tight) or self.pending is None
        self.slots = -(-(positions + max(self.window.guesses, self.window.commits)) // ALIGNED) * ALIGNED
        self.arange = torch.arange(self.slots, device=device)

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = Rows(
            tokens=zeros(rows, self.slots),
            request=zeros(rows),
            prompt_len=zeros(rows),
            known=zeros(rows),
            base=zeros(rows),
            cached=zeros(rows),
            limit=zeros(rows),
            done=zeros(rows, dtype=torch.bool),
            seed=zeros(rows),
        )
        self.state: State = {}
        self.ends = zeros(self.target.checkpoint.vocabulary, dtype=torch.bool)
        self.forwards = zeros(rows)  # of the request in each row
        # By forward, of the request in each row. A row may wait, done, for as long again as the slowest takes.
        self.commits = zeros(rows, 2 * (_patience(self.slots) + LATE))
        self.offered = torch.zeros_like(self.commits)  # likewise: what could have been committed beyond the first
        self.accepted = torch.zeros_like(self.commits)  # likewise: what was, before it was cut at the end token
        self.widths = Widths(self.windows, None if self.tight else self.pending, rows, device)
        self.own = zeros(rows)  # the variant that each row was seen to want
        self.heads = False  # does the method compute anything beside its models

    def run(self, requests: Requests) -> tuple[list[Generation], Timing]:
        """Serve the requests, row by row as they come free."""
        clock = Stopwatch(self.device)
        counted = self._calls() - self._forwards()
        began = clock.now()
        look = self.begin(requests)
        prefilled = clock.now()
        prefill_s, model_s = prefilled - began, -self._host_s()
        draft_s, beside_s = -self._draft_s(), -self._beside_s()
        steps, patience = 0, _patience(max(requests.budgets) + self.method.block - 1)
        while self.live:
            if steps > patience and steps - min(self.began[row] for row in self.live) > patience:
                raise NoProgressError(f"{self.method.name} made {steps} forwards for {max(requests.budgets)} tokens")
            clock.mark()
            shape, drafts = self.shape(look), self._draft_forwards()
            self.advance(shape)
            clock.mark()
            steps += 1
            self.fed.append(self.fed[-1] + shape.pending + self.windows[shape.variant].guesses)
            self.drafts.append(self.drafts[-1] + self._draft_forwards() - drafts)
            due = steps % READ_EVERY == 0 and any(requests.stop) and not requests.fixed_length
            self.seen.append(self._read(tokens=due))
            if len(self.seen) <= (0 if self.tight else LATE):
                continue
            look = self._look(self.seen.popleft())
            finished = self._finished(look)
            self.live -= set(finished)
            if finished and self.queue:
                pause, inside, inside_draft = clock.now(), self._host_s(), self._draft_s()
                also = self._finished(self._look(self._read()))  # the device has caught up: see who else is done
                self.live -= set(also)
                finished = sorted([*finished, *also])
                self._collect(finished)
                self._refill(finished)
                self.seen.clear()
                look = self._look(self._read())
                prefill_s += clock.now() - pause
                model_s -= self._host_s() - inside
                draft_s -= self._draft_s() - inside_draft
        ended = clock.now()
        model_s += self._host_s()
        draft_s += self._draft_s()
        beside_s += self._beside_s()
        self.heads |= beside_s > 0
        laps = clock.laps()
        self._collect(sorted(self.begun))
        generations = self._generations()
        first = min(next(i for i, n in enumerate(g.commits or [1], start=1) if n) for g in generations[: self.width])
        spans = [laps[0], *(wait + run for wait, run in zip(laps[1::2], laps[2::2], strict=True))]
        row_forwards = sum(g.forwards or 0 for g in generations)
        return generations, Timing(
            rows=self.width,
            items=len(generations),
            prompt_tokens=sum(map(len, requests.prompts)),
            tokens=sum(len(g.token_ids) for g in generations),
            row_forwards=row_forwards,
            batch_forwards=steps,
            wall_s=ended - began,
            prefill_s=prefill_s,
            decode_s=ended - began - prefill_s,
            device_s=model_s if not clock.cuda else sum(laps[0::2]) if self.one_launch and not self.tight else None,
            ttft_s=prefilled - began + sum(spans[:first]),
            step_s=spans,
            draft_s=None if clock.cuda and len(self.runners) > 1 else draft_s,
            head_s=None if clock.cuda and self.heads else beside_s,
            preparation_s=self.preparation_s,
            kv_bytes=sum(runner.cache.bytes_per_slot for runner in self.runners.values())
            * (self.width * (requests.slots + self.window.guesses)),
            miscounted=self._calls() - self._forwards() - counted,
        )

    def begin(self, requests: Requests) -> HostSnapshot:
        """Put the first requests into the rows."""
        self._reset(requests)
        self._refill(list(range(self.width)))
        return self._look(self._read())

    def shape(self, look: HostSnapshot) -> Shape:
        """The next step's: the variant that any live row wants; tight, the least that serves every live row."""
        variant = max(look.wanted[row] for row in self.live)
        if self.widths.many:
            self.own.copy_(torch.tensor(look.wanted))
        if not self.tight:
            assert self.pending is not None
            return Shape(variant, self.pending, self.slots)
        pending = max(look.base[row] - look.cached[row] for row in self.live)
        return Shape(variant, pending, max(look.base) + self.windows[variant].guesses)

    def advance(self, shape: Shape) -> None:
        """Execute one step."""
        self.step(shape, look=self.tight and len(self.fed) <= CHECKED)

    def step(self, shape: Shape, *, look: bool = False) -> None:
        """One forward. No host synchronisation, unless it is to `look` at what the method hands over."""
        method, window = self.variants[shape.variant], self.windows[shape.variant]
        self.runners.view, self.runners.tight = shape.view, self.tight
        guess = method.propose(self.state, self.rows, self.runners)
        size = self.target.checkpoint.vocabulary
        check_proposal(guess, method, window, self.width, size, look=look)
        ids, metadata = self._feed(guess, window, shape)
        judged = slice(shape.pending - 1, None)
        out = self.target.forward(ids, metadata, guess.shape[1] + 1, hidden=window.hidden)
        judgement = TargetOutput(self.rows, guess, metadata.positions[:, judged] + 1, *out)
        commit = method.accept(self.state, self.rows, judgement)
        check_commit(commit, method, window, self.width, size, look=look)
        self._commit(commit, window)

    def _feed(self, guess: Tensor, window: Window, shape: Shape) -> tuple[Tensor, AttentionMetadata]:
        """P pending tokens, right-aligned before `base` (a short row repeats its first), then G guesses."""
        rows, guesses, (_, pending, view) = self.rows, guess.shape[1], shape
        base = rows.base[:, None]
        slots = torch.maximum(base + (self.arange[:pending] - pending), rows.cached[:, None])
        ids = rows.tokens.gather(1, slots)
        positions = slots
        if guesses:
            places = base + self.arange[:guesses]
            ids = torch.cat((ids, guess), 1)
            positions = torch.cat((slots, places if window.offset is None else base + window.offset), 1)
            slots = torch.cat((slots, places), 1)
        full = self.tight and not guesses and self.width == 1
        return ids, AttentionMetadata(slots, positions, rows.base, view, full, self.method.visible, window.sees)

    def _commit(self, commit: Commit, window: Window) -> None:
        """Cut at end token and budget, write the tokens, move the cursors."""
        rows, method = self.rows, self.method
        offered = torch.full_like(rows.known, window.commits - 1) if commit.offered is None else commit.offered
        most, offered = commit.count, offered * (commit.count > 0)
        if self.widths.many and method.claims == "lossy":  # a wider neighbour's window must not change what a row says
            own = self.widths.commits[self.own].long()
            most, offered = torch.minimum(most, own), torch.minimum(offered, own - 1)
        self.widths.update(most, offered)
        left = rows.limit - rows.known
        count, ended = sampling.keep(commit.tokens, most, left, self.ends)
        # What is written beyond the kept tokens lies beyond `known` and is overwritten before anyone reads it.
        rows.tokens.scatter_(1, rows.known[:, None] + self.arange[: commit.tokens.shape[1]], commit.tokens)
        if commit.path is not None:
            depth = self.arange[: commit.path.shape[1]]
            self.target.cache.move(rows.base[:, None] + commit.path, rows.base[:, None] + depth)
        final_guesses = rows.base + commit.kept
        rows.known.add_(count)
        torch.where(ended, rows.known, rows.limit, out=rows.limit)
        torch.ge(rows.known, rows.limit, out=rows.done)
        rows.base.copy_(method.base(self.state, rows))
        final = torch.minimum(method.final(self.state, rows), rows.base - 1)
        torch.minimum(final_guesses, final, out=rows.cached)
        self.commits.scatter_(1, self.forwards[:, None], count[:, None])
        self.offered.scatter_(1, self.forwards[:, None], offered[:, None])
        self.accepted.scatter_(1, self.forwards[:, None], torch.minimum(most, left)[:, None])
        self.forwards.add_(1)

    @property
    def width(self) -> int:
        """R."""
        return len(self.rows.done)

    def _reset(self, requests: Requests) -> None:
        self.requests, self.queue = requests, deque(range(len(requests.prompts)))
        self.preparation_s = 0.0
        self.live: set[int] = set()  # rows that decode
        self.begun: dict[int, int] = {}  # row -> request in it
        self.began: dict[int, int] = {}  # row -> steps made before it
        self.answers: dict[int, Answer] = {}  # by request
        self.seen: deque[AsyncCopy] = deque()
        self.fed = [0]  # positions fed, up to each forward
        self.drafts = [0]  # forwards of other lanes, up to each forward
        self.said: dict[int, int] = {}  # row -> tokens searched for stop strings
        self.rows = replace(self.rows, temperature=requests.temperature)
        self.ends.zero_()
        if not requests.fixed_length:
            self.ends[list(self.target.checkpoint.end_ids)] = True
        for runner in self.runners.values():
            runner.reserve(self.width, self.slots)
        self.widths.set_costs(self.target, self.runners)

    def _refill(self, free: list[int]) -> None:
        """Put the next requests into free rows (ascending): start the method's state, cache what is final."""
        free = free[: len(self.queue)]
        taken = [self.queue.popleft() for _ in free]
        prompts = [self.requests.prompts[request] for request in taken]
        lengths = [len(prompt) for prompt in prompts]
        rows, method, at = self.rows, self.method, torch.tensor(free, device=self.device)
        tokens = torch.zeros(len(free), self.slots, dtype=torch.long)
        for row, prompt in zip(tokens, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        limits = [n + self.requests.budgets[request] for n, request in zip(lengths, taken, strict=True)]
        rows.tokens[at] = tokens.to(self.device)
        for cursor, values in (
            (rows.request, taken),
            (rows.prompt_len, lengths),
            (rows.known, lengths),
            (rows.base, lengths),
            (rows.limit, limits),
            (rows.seed, [self.requests.seeds[request] for request in taken]),
        ):
            cursor[at] = torch.tensor(values, device=self.device)
        for fresh in (rows.cached, rows.done, self.forwards):
            fresh[at] = 0
        self.widths.begin(at)
        for name, start in method.start(rows, self.runners).items():
            self.state.setdefault(name, start.clone())[at] = start[at]
        rows.base[at] = method.base(self.state, rows)[at]
        final = torch.minimum(method.final(self.state, rows), rows.base - 1)[at]
        rows.cached[at] = final // method.block * method.block  # a block is fed whole
        self._prefill(at)
        step = len(self.fed) - 1
        self.live |= set(free)
        self.begun |= zip(free, taken, strict=True)
        self.began |= dict.fromkeys(free, step)
        self.said |= zip(free, lengths, strict=True)

    def _prefill(self, at: Tensor) -> None:
        """Feed what may be cached of the rows `at`, right-aligned, in chunks; to other lanes all but the last token."""
        rows = self.rows
        for runner in self.runners.values():
            if runner is self.target:
                cached, block, visible = rows.cached[at], self.method.block, self.method.visible
            else:
                cached, block, visible = rows.known[at] - 1, 1, causal
            length = int(cached.max())
            slots = (cached[:, None] + self.arange[:length] - length).clamp(min=0)  # short rows repeat slot 0
            width = max(PREFILL_WIDTH, PREFILL_POSITIONS // len(at))
            width = -(-width // block) * block
            for begin in range(0, length, width):
                chunk = slots[:, begin : begin + width]
                some = None if len(at) == self.width else at
                metadata = AttentionMetadata(
                    chunk, chunk, rows.base[at], min(begin + width, length), visible=visible, rows=some
                )
                runner.forward(rows.tokens[at].gather(1, chunk), metadata, judged=1)

    def _finished(self, look: HostSnapshot) -> list[int]:
        """Live rows that are done, by end token or budget as the step saw, or by a stop string found here."""
        if look.tokens is not None:
            for row in self.live:
                if not look.done[row] and self._says_stop(row, look):
                    self.rows.limit[row] = self.rows.known[row]
                    look.done[row] = True
        return sorted(row for row in self.live if look.done[row])

    def _says_stop(self, row: int, look: HostSnapshot) -> bool:
        """Has it said a stop string? Reads only what is new, and a little before it."""
        assert look.tokens is not None
        request, known = self.begun[row], look.known[row]
        strings = self.requests.stop[request]
        overlap = max((len(s.encode()) for s in strings), default=0)  # a token is at least a byte
        begin = max(len(self.requests.prompts[request]), self.said[row] - overlap)
        self.said[row] = known
        tail = text_of(self.target.checkpoint.tokenizer, look.tokens[row][begin:known]) if strings else ""
        return any(s in tail for s in strings)

    def _collect(self, finished: list[int]) -> None:
        """Take what was said in some rows."""
        at = torch.tensor(finished, device=self.device)
        rows, logged = self.rows, slice(len(self.fed) - 1)
        tokens, known = rows.tokens[at].tolist(), rows.known[at].tolist()
        logs = torch.stack([log[at, logged] for log in (self.commits, self.offered, self.accepted)], 1).tolist()
        for row, ids, until, (counts, possible, taken) in zip(finished, tokens, known, logs, strict=True):
            request = self.begun.pop(row)
            prompt = len(self.requests.prompts[request])
            self.answers[request] = Answer(ids[prompt:until], counts, possible, taken, self.began.pop(row))

    def _generations(self) -> list[Generation]:
        """Every request's answer, cut at its stop strings; counts end with its last kept token."""
        checkpoint, requests = self.target.checkpoint, self.requests
        end_ids = () if requests.fixed_length else checkpoint.end_ids
        generations = []
        for request in range(len(requests.prompts)):
            ids, counts, offered, accepted, began = self.answers[request]
            stop = () if requests.fixed_length else requests.stop[request]
            ids, text, reason = finish(checkpoint.tokenizer, ids, end_ids, stop)
            commits, left = [], len(ids)
            for count in counts:
                commits.append(min(count, left))
                left -= commits[-1]
                if not left:
                    break
            generations.append(
                Generation(
                    token_ids=ids,
                    text=text,
                    commits=commits,
                    positions_fed=self.fed[began + len(commits)] - self.fed[began],
                    draft_forwards=self.drafts[began + len(commits)] - self.drafts[began],
                    drafted=sum(offered[: len(commits)]),
                    finish_reason=reason,
                    surplus=accepted[len(commits) - 1] - commits[-1],
                )
            )
        return generations

    def _read(self, *, tokens: bool = False) -> AsyncCopy:
        """Begin to read the cursors, and the tokens if asked for."""
        rows = self.rows
        cursors = torch.stack((rows.base, rows.cached, rows.known, rows.done.long(), self.widths.best()))
        return AsyncCopy(cursors, rows.tokens if tokens else None, wait=self.tight)

    def _look(self, seen: AsyncCopy) -> HostSnapshot:
        [base, cached, known, done, wanted], tokens = seen.get()
        return HostSnapshot(base, cached, known, done, wanted, tokens)

    def _forwards(self) -> int:
        return sum(runner.forwards for runner in self.runners.values())

    def _draft_forwards(self) -> int:
        return self._forwards() - self.target.forwards

    def _host_s(self) -> float:
        return sum(runner.host_s for runner in self.runners.values())

    def _draft_s(self) -> float:
        return self._host_s() - self.target.host_s

    def _beside_s(self) -> float:
        return sum(runner.heads_s for runner in self.runners.values())

    def _calls(self) -> int:
        """Forwards that the models themselves have seen."""
        return sum(calls.n for calls in {runner.checkpoint.calls for runner in self.runners.values()})

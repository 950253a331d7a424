"""The decode loop: one for every method. It owns tokens, caches, stopping, counting and timing.

    while a row decodes:
        propose → one forward over pending tokens and guesses → accept → cut, write, move the cursors
        read which rows are done → refill the rows of finished requests

A step has a fixed shape and never waits for the host: acceptance, the cut at end tokens and cursor moves are tensor
operations on tensors that keep their memory address, so that a step can be captured once and replayed. The host reads
the cursors between steps. On a CPU it reads them at once and feeds only the positions needed. On a GPU it reads them
some steps later, so that launches are always queued; where every row may have reached its budget, it waits for the
latest. Tokens after a stop are cut from answer, text and counts.

Each request has a row. If there are more requests than rows, a finished row is refilled from the queue. Where requests
come from, a list or the clients of a server (live.py), is known to `RunState` alone. A method with several
widths has one variant per width; the variants share rows and state, and each step uses one of them.

R = rows, P = pending positions, G = guesses, N = most tokens one forward commits, S = slots.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtbench.decoding.adaptive_width import Widths
from mtbench.decoding.batch_clock import BatchClock, Clock
from mtbench.decoding.host_sync import AsyncCopy, CommitLog, Shape
from mtbench.decoding.method import Commit, Method, ModelRunners, Rows, State, TargetOutput, Window
from mtbench.decoding.method_checks import check_commit, check_proposal
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.prefill import feed_chunk, prefill, refuse_unfit, width_of
from mtbench.decoding.request import Request, in_batch
from mtbench.decoding.run_state import Reads, RunState, WorkloadRun
from mtbench.decoding.step import feed, move_cursors, write
from mtbench.decoding.trees import Guesses
from mtbench.errors import NotNumbersError
from mtbench.models.attention import ALIGNED, AttentionMetadata
from mtbench.models.runner import ModelRunner
from mtbench.options.classes import per_request
from mtbench.options.common import heat
from mtbench.sampling import GREEDY, Filters, Sampling

READ_LAG = 2  # steps by which a GPU's host lags: launches stay queued; at most so many steps are surplus
CHECKED = 8  # first steps in which the values that a method returns are checked; checking every step would cost time


class NoProgressError(RuntimeError):
    """A method makes forwards and commits nothing; its cell fails."""


BatchFactory = Callable[[Method, ModelRunners, int, int], "Batch"]


@torch.inference_mode()
def decode(
    method: Method,
    runners: ModelRunners,
    requests: Sequence[Request],
    *,
    rows: int | None = None,
    ignore_eos: bool = False,
    room: int = 0,
    sampling: Sampling = GREEDY,
    make: "BatchFactory | None" = None,
) -> tuple[list[Generation], Timing]:
    """Continue each request's prompt up to its budget, an end token or one of its stop strings.

    All are decoded at once, or in `rows` rows that are refilled. `ignore_eos`: only the budget ends an answer.
    `room`: minimum positions per row, so that several calls share a shape. `sampling`: what requests do not set
    themselves; prompt and seed determine sampled tokens. `make`: the engine's function that builds the batch. Raises
    UserError for a prompt that does not fit, NoProgressError if the method stops committing.
    """
    requests = in_batch(requests, sampling=sampling, ignore_eos=ignore_eos)
    slots = max(room, *(request.slots for request in requests))
    refuse_unfit(method, runners, requests, slots)
    width = min(rows or len(requests), len(requests))
    return (make or Batch)(method, runners, width, slots).run(requests)


def _patience(tokens: int) -> int:
    """Return how many forwards may pass at most until this number of tokens is decided."""
    return 2 * tokens + 8


class Batch:
    """R rows in which requests are decoded. Every tensor that a step reads or writes keeps its memory address."""

    one_launch = False  # whether a step is one launch, so that its span on a GPU contains no gaps

    def __init__(
        self, method: Method, runners: ModelRunners, rows: int, positions: int, *, tight: bool | None = None
    ) -> None:
        """`tight`: read the cursors after every step and feed only the positions needed; default: on a CPU."""
        self.runners, self.target = runners, runners.target
        self.device = device = self.target.device
        self.variants = method.variants
        self.windows = [variant.window().to(device) for variant in self.variants]
        self.method, self.window = self.variants[-1], self.windows[-1]  # all variants use the state of the widest
        bounds = [window.pending for window in self.windows]
        self.pending = None if None in bounds else max(filter(None, bounds))
        if tight is None:
            tight = device.type == "cpu"
        self.tight = tight or self.pending is None
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
            endless=zeros(rows, dtype=torch.bool),
        )
        self.temperatures = zeros(rows, dtype=torch.double)  # the rows have them while one is above 0
        self.filters = Filters(zeros(rows), zeros(rows, dtype=torch.double), zeros(rows, dtype=torch.double))
        self.faulty = zeros(rows, dtype=torch.bool)  # rows that ended because logits are not numbers
        self.options = {name: zeros(rows, dtype=torch.double) for name in per_request(method)}
        self.state: State = {}
        self.ends = zeros(self.target.checkpoint.vocabulary, dtype=torch.bool)  # which ids are end tokens
        self.ends[list(self.target.checkpoint.end_ids)] = True
        # A finished row may wait while the slowest row decodes, so a log has room for two decodes.
        self.log = CommitLog(rows, 2 * (_patience(self.slots) + READ_LAG), device)
        self.lag = 0 if self.tight else READ_LAG
        self.widths = Widths(self.windows, None if self.tight else self.pending, rows, device, self.lag)
        self.heads = False  # whether the method computed anything outside its models

    @property
    def width(self) -> int:
        """R."""
        return len(self.rows.done)

    def run(self, requests: Sequence[Request]) -> tuple[list[Generation], Timing]:
        """Decode all requests. A free row takes the next one."""
        clock = BatchClock(self.runners, one_launch=self.one_launch and not self.tight)
        run = self.begin(requests)
        clock.end_prefill()
        self.decode(run, clock)
        clock.stop()
        self._collect(run, sorted(run.placed))
        generations = run.generations(self.target.checkpoint)
        self.heads |= clock.timed_heads
        slots = max(request.slots for request in requests) + self.window.guesses
        kv_bytes = self.bytes_per_slot * self.width * slots
        return generations, clock.timing(run, generations, rows=self.width, kv_bytes=kv_bytes, heads=self.heads)

    def begin(self, requests: Sequence[Request]) -> WorkloadRun:
        """Put the first requests into the rows."""
        run = WorkloadRun(requests)
        self.open(run)
        return run

    def open(self, run: RunState) -> None:
        """Begin a run. Rows without a request rest: they are done."""
        self.reset(run)
        if run.goes_on:
            self.prepare()
        self._refill(run, list(range(self.width)))
        self.park([row for row in range(self.width) if row not in run.live])
        run.snapshot = self._read().get()

    def prepare(self) -> None:
        """Prepare what the first request of each kind needs: nothing here."""

    def decode(self, run: RunState, clock: Clock) -> None:
        """Decode until no row is live and no request comes."""
        patience = _patience(run.most_new_tokens + self.method.block - 1)
        while run.live or run.wait():
            finished = False
            if run.live:
                self._check_progress(run, patience)
                self._step(run, clock)
                finished = self._read_late(run)
            if run.must_free(finished):
                clock.pause()
                self._replace(run)
                clock.resume()

    def _step(self, run: RunState, clock: Clock) -> None:
        shape, draft_forwards = self.shape(run), self._draft_forwards()
        clock.mark()
        self.advance(run, shape)
        clock.mark()
        positions = shape.pending + self.windows[shape.variant].guesses
        run.count_step(positions, self._draft_forwards() - draft_forwards)
        run.copies.append(self._read(run.reads()))

    def _read_late(self, run: RunState) -> bool:
        """Read the cursors of the steps that are due. Return whether a row finished that a request may take."""
        while run.live and len(run.copies) > (0 if run.may_end(self.window.commits) else self.lag):
            run.snapshot = run.copies.popleft().get()
            run.progress()
            if run.must_free(self._take_finished(run)):
                return True
        return False

    def shape(self, run: RunState) -> Shape:
        """Return the next step's shape: the widest variant that suits a live row; if tight, only positions needed."""
        snapshot, variant = run.snapshot, 0
        if self.widths.many:
            choices = snapshot.widths[self.lag - len(run.copies)]  # the device uses the same: `Widths.own`
            variant = max(choices[row] for row in run.live)
        if not self.tight:
            assert self.pending is not None
            drawn, filtered = self.rows.temperature is not None, self.rows.filters is not None
            return Shape(variant, self.pending, self.slots, drawn, filtered)
        pending = max(snapshot.base[row] - snapshot.cached[row] for row in run.live)
        return Shape(variant, pending, max(snapshot.base) + self.windows[variant].guesses)

    def advance(self, run: RunState, shape: Shape) -> None:
        """Execute one step."""
        self.step(shape, check_values=self.tight and run.steps < CHECKED)

    def step(self, shape: Shape, *, check_values: bool = False) -> None:
        """Run one forward. `check_values`: check the values that the method returns, which waits for the device."""
        self.runners.view, self.runners.tight = shape.view, self.tight
        self.runners.commits = self.window.commits
        method, window = self.variants[shape.variant], self.windows[shape.variant]
        proposed = method.propose(self.state, self.rows, self.runners)
        check_proposal(proposed, method, window, self.width, self.target.checkpoint.vocabulary, values=check_values)
        ids, metadata = self.feed(proposed, shape)
        guess = ids[:, shape.pending :]
        out = self.target.forward(ids, metadata, guess.shape[1] + 1)
        position = metadata.positions[:, shape.pending - 1 :] + 1
        one_pass = self.rows.choose_in_one_pass(out.logits, position) if out.logits.is_cuda else None
        output = TargetOutput(self.rows, guess, position, out.logits, one_pass, metadata.sees)
        commit = method.accept(self.state, self.rows, output)
        check_commit(commit, method, window, self.width, self.target.checkpoint.vocabulary, values=check_values)
        if moved := self.commit(commit, output, window):
            self.target.cache.move(*moved)

    def feed(self, proposed: Tensor | Guesses, shape: Shape) -> tuple[Tensor, AttentionMetadata]:
        """Return the ids of a step's forward, (R, P + G), and their metadata."""
        rows, window = self.rows, self.windows[shape.variant]
        if isinstance(proposed, Guesses):
            window = replace(window, sees=proposed.sees, offset=proposed.offset)
            proposed = proposed.ids
        places = guess = proposed
        if guess.shape[1]:
            places = self.method.places(self.state, rows, rows.base[:, None] + self.arange[: guess.shape[1]])
        ids, metadata = feed(rows, guess, places, window, shape, self.method.block, self.target.sliding_windows)
        if self.tight and not window.guesses and self.width == 1:
            metadata = replace(metadata, view_is_full=True)
        return ids, metadata

    def commit(self, commit: Commit, output: TargetOutput, window: Window) -> tuple[Tensor, ...]:
        """Commit what a forward decided and move the cursors. Return slots of the cache to copy from and to, (R, D).

        A row ends before a token whose logits are not numbers, if nothing else ends it before.
        """
        if self.widths.many:
            commit = self._within_width(commit, window)
        rows, own, sound = self.rows, self.method.own_cursors, output.sound(commit, self.method.block)
        fault = sound < commit.count.clamp(min=1)  # in a block a forward may decide tokens and commit none
        commit = replace(commit, count=torch.minimum(commit.count, sound))
        moved = write(rows, commit, window, self.ends, self.log, self.method.block, own_cursors=own)
        self.faulty.logical_or_(fault.logical_and_(~rows.done))
        rows.done.logical_or_(fault)
        torch.where(fault, rows.known, rows.limit, out=rows.limit)
        if own:
            base, final = self.method.base(self.state, self.rows), self.method.final(self.state, self.rows)
            move_cursors(self.rows, commit, base, final)
        return moved

    def _within_width(self, commit: Commit, window: Window) -> Commit:
        """Count what each row accepted, for its next width. Return the commit, if lossy cut to the row's own width.

        A neighbour's wider window must not change a row's tokens.
        """
        offered = torch.full_like(self.rows.known, window.commits - 1) if commit.offered is None else commit.offered
        accepted, offered = commit.count, offered * (commit.count > 0)
        if self.method.claims == "lossy" or self.rows.options:
            own = self.widths.commits[self.widths.own].long()
            accepted, offered = torch.minimum(accepted, own), torch.minimum(offered, own - 1)
        self.widths.update(accepted, offered if commit.stopped is None else offered + commit.stopped)
        return replace(commit, count=accepted, offered=offered)

    def _check_progress(self, run: RunState, patience: int) -> None:
        """Raise NoProgressError if a live row has taken more steps than its budget allows."""
        if run.steps > patience and run.steps - min(run.placed[row].first_step for row in run.live) > patience:
            raise NoProgressError(f"{self.method.name} made {run.steps} forwards for {run.most_new_tokens} tokens")

    def reset(self, run: RunState) -> None:
        """Prepare the tensors and caches that all runs share for the next run."""
        self.rows = replace(self.rows, options=self.options if run.sets_options else {})
        for runner in self.runners.values():
            taps = self.method.taps(self.runners) if runner is self.target else ()
            runner.reserve(self.width, self.slots + self.window.room * (runner is not self.target), taps)
        self.widths.set_costs(self.target, self.runners)

    def _replace(self, run: RunState) -> None:
        """Collect and refill finished rows. First read the cursors again, for rows that finished since."""
        if run.live:
            run.snapshot = self._read(run.reads()).get()
            run.progress()
            self._take_finished(run)
        self._collect(run, sorted(row for row in run.placed if row not in run.live))
        self._refill(run, [row for row in range(self.width) if row not in run.live])
        if run.goes_on and self.tight:  # the longest row decides how many slots are in view
            self.park([row for row in range(self.width) if row not in run.live])
        run.copies.clear()
        run.snapshot = self._read().get()

    def _refill(self, run: RunState, free: list[int]) -> None:
        """Put the next requests into free rows (ascending)."""
        taken = run.take(len(free))
        free = free[: len(taken)]
        for row, (number, request) in zip(free, taken, strict=True):
            run.place(row, number, request)
        if taken:
            self.start(taken, free)
        live = [run.placed[row].request.sampling for row in run.live]
        self.draw(any(each.temperature for each in live), any(each.filters for each in live))

    def draw(self, drawn: bool, filtered: bool) -> None:
        """Let the rows have temperatures if one is `drawn`, and filters if one of these is `filtered`."""
        filters = self.filters if filtered else None
        self.rows = replace(self.rows, temperature=self.temperatures if drawn else None, filters=filters)

    def start(self, taken: Sequence[tuple[int, Request]], rows_taken: list[int]) -> None:
        """Write requests, with their numbers, into rows: start the method's state, cache final tokens."""
        rows, method, at = self.rows, self.method, torch.tensor(rows_taken, device=self.device)
        self._write(taken, at)
        rows.cached[at] = 0
        rows.done[at] = 0
        self.faulty[at] = False
        self.log.begin(at)
        self.widths.begin(at)
        for name, start in method.start(rows, self.runners).items():
            self.state.setdefault(name, start.clone())[at] = start[at]
        rows.base[at] = method.base(self.state, rows)[at]
        final = torch.minimum(method.final(self.state, rows), rows.base - 1)[at]
        rows.cached[at] = final // method.block * method.block  # a block is fed whole
        prefill(rows, self.runners, method, at, self.feed_parts)

    def feed_parts(self, runner: ModelRunner, parts: Tensor, block: int) -> None:
        """Feed a chunk of prompts; see `prefill`."""
        view, placed = -(-int(parts[2].max()) // ALIGNED) * ALIGNED, parts.to(self.device)
        feed_chunk(runner, self.rows.tokens[placed[0]], placed, width_of(parts), view, block)

    def park(self, resting: list[int]) -> None:
        """Let rows without a request rest: done, and as short as a row can be."""
        if resting:
            nothing = Request(prompt_ids=[0] * self.method.block, max_new_tokens=0)
            self.start([(0, nothing)] * len(resting), resting)
            self.rows.done[resting] = True

    def _write(self, taken: Sequence[tuple[int, Request]], at: Tensor) -> None:
        """Write requests, with their numbers, and their cursors into the rows `at`."""
        rows, requests = self.rows, [request for _, request in taken]
        settings = [request.sampling for request in requests]
        lengths = [len(request.prompt_ids) for request in requests]
        tokens = torch.zeros(len(requests), self.slots, dtype=torch.long)
        for row, request in zip(tokens, requests, strict=True):
            row[: len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        rows.tokens[at] = tokens.to(self.device)
        values: list[tuple[Tensor, list[Any]]] = [
            (rows.request, [number for number, _ in taken]),
            (rows.prompt_len, lengths),
            (rows.known, lengths),
            (rows.base, lengths),
            (rows.limit, [request.slots for request in requests]),
            (rows.seed, [request.seed for request in requests]),
            (rows.endless, [request.ignore_eos for request in requests]),
            (self.temperatures, [heat(each.temperature) for each in settings]),
            (self.filters.top_k, [each.top_k for each in settings]),
            (self.filters.top_p, [each.top_p for each in settings]),
            (self.filters.min_p, [each.min_p for each in settings]),
        ]
        for name, tensor in rows.options.items():
            default = getattr(self.method, name)
            values.append((tensor, [request.options.get(name, default) for request in requests]))
        for tensor, of_requests in values:
            tensor[at] = torch.tensor(of_requests, dtype=tensor.dtype, device=self.device)

    def _take_finished(self, run: RunState) -> bool:
        """Remove finished rows from the live ones: `done` on the device, or ended by the host. Return if there are."""
        snapshot, tokenizer = run.snapshot, self.target.checkpoint.tokenizer
        for row in run.live:
            if not snapshot.done[row] and run.stops(row, tokenizer):
                self.rows.limit[row] = self.rows.known[row]
                snapshot.done[row] = True
        finished = {row for row in run.live if snapshot.done[row]}
        run.live -= finished
        return bool(finished)

    def _collect(self, run: RunState, finished: list[int]) -> None:
        if not finished:
            return
        at = torch.tensor(finished, device=self.device)
        tokens, known = self.rows.tokens[at].tolist(), self.rows.known[at].tolist()
        logs = self.log.read(at, max(run.steps - run.placed[row].first_step for row in finished))
        faulty = [row for row, fault in zip(finished, self.faulty[at].tolist(), strict=True) if fault]
        for runner in self.runners.values() if faulty else ():
            runner.cache.clear(faulty if run.goes_on else range(self.width))
        for row, ids, until, counts in zip(finished, tokens, known, logs, strict=True):
            error, request = None, run.placed[row].request
            if row in faulty:
                place = f"token {until - len(request.prompt_ids) + 1}" + f" of item {request.item}" * (not run.goes_on)
                error = NotNumbersError(f"the target's logits at {place}", self.target.model.dtype)
            run.collect(row, ids[:until], counts, error)

    def _read(self, reads: Reads = None) -> AsyncCopy:
        """Start to read the cursors and the tokens of `reads`: all, or the last ones, which the steps since decided."""
        rows = self.rows
        tokens = rows.tokens if reads == "all" else None
        if reads == "recent":
            last = self.window.commits * (self.lag + 1)
            tokens = rows.tokens.gather(1, (rows.known[:, None] - last + self.arange[:last]).clamp(min=0))
        widths = self.widths.choices if self.widths.many else ()
        cursors = torch.stack((rows.base, rows.cached, rows.known, rows.done.long(), *widths))
        return AsyncCopy(cursors, tokens, wait=self.tight)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in all caches."""
        return sum(runner.cache.bytes_per_slot for runner in self.runners.values())

    def _draft_forwards(self) -> int:
        return sum(runner.forwards for runner in self.runners.values()) - self.target.forwards

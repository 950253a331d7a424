"""The decode loop: one for every method. It owns tokens, caches, stopping, counting and timing.

    while not all rows are done:
        guess → one forward over pending tokens and guesses → accept → cut, write, move the cursors

A step has a fixed shape and never waits for the host: acceptance, end-token cut and cursor moves are tensor
operations. Between steps the host may look (on a CPU, where looking is free and every position costs, it does so
each time and feeds no more than needed; on a GPU some steps late). What came after a stop is cut from tokens,
text and counts.

R = rows, P = pending positions, G = guesses, N = most tokens one forward commits, S = slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mtbench import rules
from mtbench.errors import UserError
from mtbench.lane import Feed
from mtbench.method import Commit, Judged, Lanes, Method, Rows
from mtbench.stopwatch import Stopwatch

PREFILL_CHUNK = 256  # positions: bounds the mask and the scores, (R, group · chunk, S)
LOOK_EVERY = 8  # steps between two looks at the device from a GPU's host, and between two looks for stop strings

FinishReason = Literal["end", "stop", "length"]


class Stuck(RuntimeError):
    """A method went on without committing; it costs its own cells."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One row's answer and what it cost. Counts end with the forward that committed the last kept token."""

    token_ids: list[int]  # with the end token, or the token that completes a stop string
    text: str  # cut before the end token, or before the first character of the stop string
    commits: list[int]  # tokens committed by each forward, zeros included
    positions_fed: int
    draft_forwards: int  # by lanes other than the target's
    finish_reason: FinishReason

    @property
    def forwards(self) -> int:
        return len(self.commits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One batch, from an idle device to an idle device. `step_s` has a time per forward where the host looked."""

    rows: int
    prompt_tokens: int
    tokens: int
    row_forwards: int
    batch_forwards: int
    wall_s: float
    prefill_s: float
    decode_s: float
    device_s: float
    ttft_s: float
    step_s: list[float] | None
    kv_bytes: int  # keys and values that these rows need
    miscounted: int  # forwards seen by the models' hooks less forwards counted by the lanes


class Look(NamedTuple):
    """What the host saw between two steps."""

    pending: int  # positions to feed before the guesses
    view: int  # slots to have in view
    done: bool
    committed: bool  # has any row committed yet


@torch.inference_mode()
def decode(
    method: Method,
    lanes: Lanes,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    stop: Sequence[Sequence[str]] | None = None,
    fixed_length: bool = False,
) -> tuple[list[Generation], Timing]:
    """Continue each prompt by at most `max_new_tokens` tokens, up to an end token or one of its stop strings.

    With `fixed_length` end tokens and stop strings are ignored. Raises Stuck if the method stops committing.
    """
    batch = Batch(method, lanes, prompts, max_new_tokens, fixed_length=fixed_length)
    return batch.run(stop or [()] * len(prompts))


class Batch:
    """A batch of requests being decoded."""

    def __init__(
        self,
        method: Method,
        lanes: Lanes,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        fixed_length: bool = False,
    ) -> None:
        self.method, self.lanes, self.target = method, lanes, lanes.target
        self.prompts, self.max_new_tokens = prompts, max_new_tokens
        self.stopwatch = Stopwatch(self.target.device)
        self.began = self.stopwatch.now()
        self.counted = self._calls() - self._forwards()
        self.window = method.window().to(self.target.device)
        self.tight = not self.stopwatch.cuda or self.window.pending is None  # look between any two steps
        self.rows = self._rows()
        self.ends = self._ends(fixed_length)
        self.fixed_length = fixed_length
        self.counts: list[Tensor] = []  # per forward: (R,) tokens committed
        self.read = [len(prompt) for prompt in prompts]  # tokens searched for stop strings
        self.fed = [0]  # positions fed, up to each forward
        self.drafted = [self._draft_forwards()]  # forwards of other lanes, up to each forward

    def run(self, stop: Sequence[Sequence[str]]) -> tuple[list[Generation], Timing]:
        clock, ttft_s = self.stopwatch, None
        self.prefill()
        ticks = [clock.now()]
        prefill_device_s = clock.device_s
        look = self.look()
        while not look.done:
            if len(self.counts) > 2 * self.max_new_tokens + 8:
                raise Stuck(f"{self.method.name} made {len(self.counts)} forwards for {self.max_new_tokens} tokens")
            self.step(look.pending, look.view)
            stop_due = len(self.counts) % LOOK_EVERY == 0
            if stop_due and not self.fixed_length:
                self._stop_at_strings(stop)
            if stop_due or self.tight or ttft_s is None:
                look = self.look()
                ticks.append(clock.now())
                if ttft_s is None and look.committed:
                    ttft_s = ticks[-1] - self.began
        device_s = clock.device_s - prefill_device_s
        generations = self.generations([()] * len(stop) if self.fixed_length else stop)
        return generations, Timing(
            rows=len(self.prompts),
            prompt_tokens=sum(map(len, self.prompts)),
            tokens=sum(len(g.token_ids) for g in generations),
            row_forwards=sum(g.forwards for g in generations),
            batch_forwards=len(self.counts),
            wall_s=ticks[-1] - self.began,
            prefill_s=ticks[0] - self.began,
            decode_s=ticks[-1] - ticks[0],
            device_s=device_s,
            ttft_s=ticks[-1] - self.began if ttft_s is None else ttft_s,
            step_s=None if clock.cuda else [end - begin for begin, end in pairwise(ticks)],
            kv_bytes=self.target.cache.bytes * self.rows.tokens.shape[1] // self.target.cache.slots,
            miscounted=self._calls() - self._forwards() - self.counted,
        )

    def prefill(self) -> None:
        """Start the method's state; cache what is final of every prompt, right-aligned, in chunks."""
        rows, method = self.rows, self.method
        self.state = method.start(rows, self.lanes)
        rows.base.copy_(method.base(self.state, rows))
        rows.cached.copy_(torch.minimum(method.final(self.state, rows), rows.base - 1))
        length = int(rows.cached.max())
        slots = (rows.cached[:, None] + self._arange(length) - length).clamp(min=0)  # short rows repeat slot 0
        for begin in range(0, length, PREFILL_CHUNK):
            chunk = slots[:, begin : begin + PREFILL_CHUNK]
            feed = Feed(chunk, chunk, rows.base, view=int(chunk.max()) + 1, visible=method.visible)
            with self.stopwatch.forward():
                self.target.forward(rows.tokens.gather(1, chunk), feed, judged=1)

    def look(self) -> Look:
        """Read the cursors and choose the next step's shape: on a CPU the least that serves every live row."""
        rows, window = self.rows, self.window
        base, cached, done, fresh = torch.stack(
            (rows.base, rows.cached, rows.done.long(), rows.known - rows.prompt_len)
        ).tolist()
        if self.tight or window.pending is None:
            pending = max((b - c for b, c, over in zip(base, cached, done, strict=True) if not over), default=1)
            return Look(pending, max(base) + window.guesses, all(done), any(fresh))
        return Look(window.pending, rows.tokens.shape[1], all(done), any(fresh))

    def step(self, pending: int, view: int) -> None:
        """One forward. No host synchronisation."""
        guess = self.method.guess(self.state, self.rows, self.lanes)
        ids, feed = self._feed(guess, pending, view)
        with self.stopwatch.forward():
            judged = Judged(self.target.forward(ids, feed, judged=guess.shape[1] + 1))
        self._commit(self.method.accept(self.state, self.rows, judged))
        self.fed.append(self.fed[-1] + ids.shape[1])
        self.drafted.append(self._draft_forwards())

    def _feed(self, guess: Tensor, pending: int, view: int) -> tuple[Tensor, Feed]:
        """P pending tokens, right-aligned before `base` (a short row repeats its first), then G guesses."""
        rows, window, guesses = self.rows, self.window, guess.shape[1]
        base = rows.base[:, None]
        slots = torch.maximum(base + (self._arange(pending) - pending), rows.cached[:, None])
        ids = rows.tokens.gather(1, slots)
        positions = slots
        if guesses:
            places = base + self._arange(guesses)
            ids = torch.cat((ids, guess), 1)
            positions = torch.cat((slots, places if window.offset is None else base + window.offset), 1)
            slots = torch.cat((slots, places), 1)
        full = self.tight and not guesses and len(self.prompts) == 1
        return ids, Feed(slots, positions, rows.base, view, full, self.method.visible, window.sees)

    def _commit(self, commit: Commit) -> None:
        """Cut at end token and budget, write the tokens, move the cursors."""
        rows, method = self.rows, self.method
        room = (rows.limit - rows.known) * ~rows.done
        kept = rules.keep(commit.tokens, commit.count, room, self.ends)
        count = kept.sum(1)
        # What is written beyond the kept tokens lies beyond `known` and is overwritten before anyone reads it.
        rows.tokens.scatter_(1, rows.known[:, None] + self._arange(commit.tokens.shape[1]), commit.tokens)
        if commit.path is not None:
            depth = self._arange(commit.path.shape[1])
            self.target.cache.move(rows.base[:, None] + commit.path, rows.base[:, None] + depth)
        final_guesses = rows.base + commit.kept
        rows.known.add_(count)
        rows.done.logical_or_((self.ends[commit.tokens] & kept).any(1)).logical_or_(rows.known >= rows.limit)
        rows.base.copy_(method.base(self.state, rows))
        final = torch.minimum(method.final(self.state, rows), rows.base - 1)
        rows.cached.copy_(torch.minimum(final_guesses, final))
        self.counts.append(count)

    def generations(self, stop: Sequence[Sequence[str]]) -> list[Generation]:
        """What every row said, cut at its stop strings. Waits for the device once."""
        tokens, known = self.rows.tokens.tolist(), self.rows.known.tolist()
        counts = torch.stack(self.counts, 1).tolist()
        ends = self.ends.tolist()
        return [
            self._generation(tokens[r][len(prompt) : known[r]], counts[r], stop[r], ends)
            for r, prompt in enumerate(self.prompts)
        ]

    def _generation(self, ids: list[int], counts: list[int], stop: Sequence[str], ends: list[bool]) -> Generation:
        length, text, found = self._cut_at_string(ids, stop)
        ids = ids[:length]
        reason: FinishReason = "stop" if found else "end" if ends[ids[-1]] else "length"
        commits, left = [], len(ids)
        for count in counts:
            commits.append(min(count, left))
            left -= commits[-1]
            if not left:
                break
        return Generation(
            token_ids=ids,
            text=text if found else self._text(ids[:-1] if reason == "end" else ids),
            commits=commits,
            positions_fed=self.fed[len(commits)],
            draft_forwards=self.drafted[len(commits)] - self.drafted[0],
            finish_reason=reason,
        )

    def _cut_at_string(self, ids: list[int], stop: Sequence[str]) -> tuple[int, str, bool]:
        """How many tokens there are up to the one that completes a stop string, and the text before it."""
        text = self._text(ids) if stop else ""
        if not any(s in text for s in stop):
            return len(ids), text, False
        low, high = 1, len(ids)
        while low < high:  # the shortest prefix that holds a stop string
            middle = (low + high) // 2
            if any(s in self._text(ids[:middle]) for s in stop):
                high = middle
            else:
                low = middle + 1
        text = self._text(ids[:low])  # what was said behind the stop must not decide where the text ends
        return low, text[: min(place for s in stop if (place := text.find(s)) >= 0)], True

    def _stop_at_strings(self, stop: Sequence[Sequence[str]]) -> None:
        """Mark rows done that said a stop string; read only what is new, and a little before it."""
        if not any(stop):
            return
        tokens, known, done = self.rows.tokens.tolist(), self.rows.known.tolist(), self.rows.done.tolist()
        for row, strings in enumerate(stop):
            if done[row] or not strings:
                continue
            overlap = max(len(s.encode()) for s in strings)  # a token is at least a byte
            tail = self._text(tokens[row][max(len(self.prompts[row]), self.read[row] - overlap) : known[row]])
            self.read[row] = known[row]
            if any(s in tail for s in strings):
                self.rows.done[row] = True

    def _forwards(self) -> int:
        return sum(lane.forwards for lane in self.lanes.values())

    def _draft_forwards(self) -> int:
        return self._forwards() - self.target.forwards

    def _calls(self) -> int:
        """Forwards that the models themselves have seen."""
        return sum(calls.n for calls in {lane.checkpoint.calls for lane in self.lanes.values()})

    def _text(self, ids: list[int]) -> str:
        tokenizer = self.target.checkpoint.tokenizer
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _rows(self) -> Rows:
        lengths = [len(prompt) for prompt in self.prompts]
        slots = max(lengths) + self.max_new_tokens + max(self.window.guesses, self.window.commits)
        for role, lane in self.lanes.items():
            if max(lengths) + self.max_new_tokens > lane.checkpoint.max_positions:
                raise UserError(
                    f"a prompt of {max(lengths)} tokens and {self.max_new_tokens} new ones do not fit the context of "
                    f"the {role!r} checkpoint ({lane.checkpoint.max_positions}); lower `--max-new-tokens`."
                )
            lane.reserve(len(lengths), slots)
        tokens = torch.zeros(len(lengths), slots, dtype=torch.long)
        for row, prompt in enumerate(self.prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        device = self.target.device
        prompt_len = torch.tensor(lengths, device=device)
        return Rows(
            tokens=tokens.to(device),
            prompt_len=prompt_len,
            known=prompt_len.clone(),
            base=prompt_len.clone(),
            cached=torch.zeros_like(prompt_len),
            limit=prompt_len + self.max_new_tokens,
            done=torch.zeros_like(prompt_len, dtype=torch.bool),
        )

    def _ends(self, fixed_length: bool) -> Tensor:
        ends = torch.zeros(self.target.checkpoint.vocabulary, dtype=torch.bool, device=self.target.device)
        if not fixed_length:
            ends[list(self.target.checkpoint.end_ids)] = True
        return ends

    def _arange(self, length: int) -> Tensor:
        return torch.arange(length, device=self.target.device)

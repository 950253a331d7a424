"""The progress of a run or a training: in a terminal one line that changes, elsewhere a line now and then."""

import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.markup import escape

from mtbench.document.formatting import duration
from mtbench.plan.plan import Cell

EXPECTED_EVERY_S = 10.0  # the time of judging is computed: it takes long for many answers
PLAIN_LINE_EVERY_S = 10.0  # if the output is not a terminal


class ChangingLine:
    """Shows a text until the next one."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status = console.status("")
        self.printed_at = float("-inf")

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def show(self, text: str, *, now: bool = False) -> None:
        """Show the current step. now: in any case, not only now and then."""
        if self.console.is_terminal:
            self.status.update(escape(text))
        elif now or time.monotonic() - self.printed_at > PLAIN_LINE_EVERY_S:
            self.printed_at = time.monotonic()
            self.note(text)

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class RunProgress(ChangingLine):
    """Shows batch i/n, time left, cell, tokens/s and tokens per forward.

    It implements `mtbench.measure.block_writer.Progress`.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.cells = self.work = self.done = 0
        self.first_at, self.until = 0.0, float("inf")
        self.expected_at, self.expected_s = float("-inf"), 0.0  # time of judging, and when it was computed

    def begin(self, cells: int, work: int, until: float, judging_s: Callable[[float], float] = lambda _: 0.0) -> None:
        """Start to count batches: `work` of them, or fewer if `time.monotonic()` reaches `until` before.

        judging_s: the expected time of judging the stored answers and a share of those to come.
        """
        self.cells, self.work, self.until, self.judging_s, self.done = cells, work, until, judging_s, 0

    def skip(self, work: int) -> None:
        """Expect so many batches fewer: a cell has left."""
        self.work -= work

    def decoded(self, cell: Cell, index: int, rows: int, timing: Mapping[str, Any] | None) -> None:
        """Show that a batch of `cell`, the index-th cell of the run, is stored."""
        self.done += 1
        speed = ""
        if timing is not None:
            speed = f"{timing['tokens'] / timing['wall_s']:,.0f} tokens/s"
            if timing["row_forwards"]:
                speed += f", {timing['tokens'] / timing['row_forwards']:.2f} tokens/forward"
        where = f"cell {index}/{self.cells} {cell.arm} b{cell.batch_size}"
        if cell.batching != "static":
            where += f" {cell.batching}"
        now = time.monotonic()
        if self.done == 1:
            self.first_at = now  # loading and warm-up come before
        left = self._left(now) if 1 < self.done < self.work else ""
        line = f"{self.done}/{self.work} batches{left and ', '}{left} | {where} | {speed}"
        self.show(line, now=self.done == self.work)

    def _left(self, now: float) -> str:
        if now - self.expected_at > EXPECTED_EVERY_S:
            self.expected_at, self.expected_s = now, self.judging_s(1.0)
        left_s = self.expected_s + (now - self.first_at) / (self.done - 1) * (self.work - self.done)
        budget_s = max(0.0, self.until - now)
        return f"{duration(left_s)} left" if left_s < budget_s else f"{duration(budget_s)} left (budget)"


class TrainingProgress(ChangingLine):
    """Shows step n/m of a training, the loss and its parts, tokens/s and time left, estimated from this process only.

    It implements `mtbench.training.trainer.Progress`.
    """

    steps = done = 0

    def begin(self, steps: int, done: int) -> None:
        """Start the progress of `steps` steps, `done` of them by an earlier process."""
        self.steps, self.done = steps, done
        self.started_at = time.monotonic()
        if done:
            self.note(f"continuing from step {done:d}/{steps:d}")
        self.__enter__()

    def step(self, step: int, losses: Mapping[str, float], tokens_per_s: float) -> None:
        """Show the figures of one step; without a terminal, each in a line."""
        pace_s = (time.monotonic() - self.started_at) / (step - self.done)
        figures = " ".join(f"{name} {value:#.4g}" for name, value in losses.items())
        figures += f" {tokens_per_s:,.0f} tokens/s {clock(pace_s * (self.steps - step))} left"
        tell = self.show if self.console.is_terminal else self.note
        tell(f"step {step:d}/{self.steps:d} {figures}")

    def end(self) -> None:
        """Remove the line."""
        self.status.stop()


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock(59.6), clock(4321)
    ('1:00', '1:12:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

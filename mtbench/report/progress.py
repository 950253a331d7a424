"""The progress of a run or a training, as the terminal shows it."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column

from mtbench.runs.plan import Cell
from mtbench.runs.time_estimate import duration

PLAIN_LINE_EVERY_S = 10.0  # if the output is not a terminal


class RunProgress:
    """Shows cell i/n, time left, tokens/s and tokens per forward: a bar in a terminal, else a line now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[speed]}"),
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.task = self.bar.add_task("", total=None, left="", speed="")
        self.cells = self.work = self.done = 0
        self.until = float("inf")
        self.first_at = self.printed_at = time.monotonic()

    def __enter__(self) -> "RunProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, cells: int, work: int, until: float) -> None:
        """Start to count batches: `work` of them, or fewer if `time.monotonic()` reaches `until` before."""
        self.cells, self.work, self.until = cells, work, until
        self.bar.update(self.task, total=work)

    def expect(self, work: int) -> None:
        """Show that at most so many more batches are decoded: cells have left."""
        self.work = self.done + work
        self.bar.update(self.task, total=self.work)

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
        self.bar.update(self.task, advance=1, description=escape(where), left=left, speed=speed)
        if not self.live and (now - self.printed_at > PLAIN_LINE_EVERY_S or self.done == self.work):
            self.printed_at = now
            self._print(f"{self.done}/{self.work} batches{left and ', '}{left} | {where} | {speed}")

    def _left(self, now: float) -> str:
        work_s = (now - self.first_at) / (self.done - 1) * (self.work - self.done)
        budget_s = max(0.0, self.until - now)
        return f"{duration(work_s)} left" if work_s < budget_s else f"{duration(budget_s)} left (budget)"

    def note(self, text: str) -> None:
        """Print a line that stays."""
        self._print(text)

    def show(self, text: str) -> None:
        """Show what is done before the first batch or after the last one."""
        self.bar.update(self.task, description=escape(text), left="", speed="")
        now = time.monotonic()
        if not self.live and now - self.printed_at > PLAIN_LINE_EVERY_S:
            self.printed_at = now
            self._print(text)

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class MeasuringProgress:
    """Shows which cell of how many is measured for a time estimate: a line that changes, else one now and then."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.status = console.status("")
        self.printed_at = float("-inf")

    def __enter__(self) -> "MeasuringProgress":
        if self.console.is_terminal:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.status.stop()

    def show(self, done: int, cells: int, what: str) -> None:
        text = f"time estimate: {done} of {cells} cells measured; {what}"
        if self.console.is_terminal:
            self.status.update(escape(text))
        elif time.monotonic() - self.printed_at > PLAIN_LINE_EVERY_S:
            self.printed_at = time.monotonic()
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class TrainingProgress:
    """Shows step n/m of a training, the loss and its parts, tokens/s and time left: a bar in a terminal, else lines.

    It implements `mtbench.training.trainer.Progress`. The time left is estimated from this process only.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=False)),  # only this column wraps
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.steps = self.done = 0

    def note(self, text: str) -> None:
        """Print a line that stays, such as how much of the data was dropped."""
        self._print(text)

    def begin(self, steps: int, done: int) -> None:
        """Start the progress of `steps` steps, `done` of them by an earlier process."""
        self.steps, self.done = steps, done
        self.started_at = time.monotonic()
        if done:
            self._print(f"continuing from step {done:d}/{steps:d}")
        self.task = self.bar.add_task("", total=steps, completed=done, figures="")
        self.bar.start()

    def step(self, step: int, losses: Mapping[str, float], tokens_per_s: float) -> None:
        """Show the figures of one step."""
        pace_s = (time.monotonic() - self.started_at) / (step - self.done)
        figures = " ".join(f"{name} {value:#.4g}" for name, value in losses.items())
        figures += f" {tokens_per_s:,.0f} tokens/s {clock(pace_s * (self.steps - step))} left"
        self.bar.update(self.task, completed=step, figures=escape(figures))
        if not self.live:
            self._print(f"step {step:d}/{self.steps:d} {figures}")

    def end(self) -> None:
        self.bar.stop()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds.

    >>> clock(59.6), clock(4321)
    ('1:00', '1:12:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

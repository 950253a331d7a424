"""What a terminal shows while a run or a training goes on."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from mtbench.runs.plan import Cell

PLAIN_LINE_EVERY_S = 10.0


class RunProgress:
    """Shows cell i/n, time left, tokens/s and tokens per forward; a line now and then where nobody watches live."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("batches"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[speed]}"),
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.cells = self.work = self.done = 0
        self.began = self.spoke = time.monotonic()

    def __enter__(self) -> "RunProgress":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, cells: int, work: int) -> None:
        self.cells, self.work = cells, work
        self.began = self.spoke = time.monotonic()
        self.task = self.bar.add_task("", total=work, speed="")

    def decoded(self, cell: Cell, index: int, rows: int, timing: Mapping[str, Any] | None) -> None:
        """One batch of `cell`, the index-th of the run, is on disk."""
        self.done += 1
        speed = ""
        if timing is not None:
            speed = f"{timing['tokens'] / timing['wall_s']:,.0f} tokens/s"
            if timing["row_forwards"]:
                speed += f", {timing['tokens'] / timing['row_forwards']:.2f} tokens/forward"
        where = f"cell {index}/{self.cells} {cell.arm} b{cell.batch_size}"
        where += "" if cell.batching == "static" else f" {cell.batching}"
        self.bar.update(self.task, advance=1, description=escape(where), speed=speed)
        now = time.monotonic()
        if not self.live and (now - self.spoke > PLAIN_LINE_EVERY_S or self.done == self.work):
            self.spoke = now
            left = (now - self.began) / self.done * (self.work - self.done)
            self._say(f"{self.done}/{self.work} batches, {left:.0f} s left | {where} | {speed}")

    def note(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


class TrainingProgress:
    """Shows a training's step n/m, the loss and its parts, tokens/s, time left; lines where nobody watches live.

    What `mtbench.training.trainer.Progress` asks for. Time left is at the pace since this process began.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.live = console.is_terminal
        self.bar = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[said]}", table_column=Column(no_wrap=False)),  # so only this gives way
            console=console,
            transient=True,
            disable=not self.live,
        )
        self.steps = self.done = 0

    def note(self, text: str) -> None:
        """A line to keep: what became of the data."""
        self._say(text)

    def begin(self, steps: int, done: int) -> None:
        """A training of so many steps, of which an earlier process did some."""
        self.steps, self.done = steps, done
        self.began = time.monotonic()
        if done:
            self._say(f"step {done:d}/{steps:d} was reached before; going on")
        self.task = self.bar.add_task("", total=steps, completed=done, said="")
        self.bar.start()

    def step(self, step: int, losses: Mapping[str, float], tokens_per_s: float) -> None:
        pace = (time.monotonic() - self.began) / (step - self.done)
        said = " ".join(f"{name} {value:#.4g}" for name, value in losses.items())
        said += f" {tokens_per_s:,.0f} tokens/s {clock(pace * (self.steps - step))} left"
        self.bar.update(self.task, completed=step, said=escape(said))
        if not self.live:
            self._say(f"step {step:d}/{self.steps:d} {said}")

    def end(self) -> None:
        self.bar.stop()

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(59.6), clock(4321)
    ('1:00', '1:12:01')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"

"""What a person sees in the terminal: live progress, plain lines where there is no terminal, the table at the end."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mtbench.plan import Cell, Plan

PLAIN_LINE_EVERY_S = 10.0
DEMONSTRATION = "Demonstration: small model, CPU, synthetic task: shows the mechanics"


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
            rate, per_forward = timing["tokens"] / timing["wall_s"], timing["tokens"] / timing["row_forwards"]
            speed = f"{rate:,.0f} tokens/s, {per_forward:.2f} tokens/forward"
        where = f"cell {index}/{self.cells} {cell.arm} b{cell.batch_size}"
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


def plan_table(plan: Plan) -> Table:
    """What a run would do."""
    table = Table(title="Plan")
    for column, side in (
        ("suite", "left"),
        ("arm", "left"),
        ("batch", "right"),
        ("items", "right"),
        ("blocks", "right"),
    ):
        table.add_column(column, justify="right" if side == "right" else "left")
    table.add_column("rounds", justify="right")
    for group in plan.groups:
        for name in group.cells:
            items, rounds = sum(map(len, group.blocks)), "+".join(map(str, group.rounds))
            row = (group.suite, plan.cell(name).arm, str(group.batch_size), str(items), str(len(group.blocks)), rounds)
            table.add_row(*map(escape, row))
    return table


def results_tables(results: Mapping[str, Any]) -> list[Table]:
    """One table per suite and batch size, one row per arm, intervals at 95 %."""
    tables = []
    for suite, batch_size in dict.fromkeys((c["suite"], c["batch_size"]) for c in results["cells"]):
        cells = [c for c in results["cells"] if (c["suite"], c["batch_size"]) == (suite, batch_size)]
        demonstration = any(c["demonstration"] for c in cells)
        title = f"{suite}, batch size {batch_size}, {max(c['items'] for c in cells)} items"
        table = Table(title=escape(title), caption=DEMONSTRATION if demonstration else None, title_justify="left")
        table.add_column("arm", overflow="fold")
        for heading in ("accuracy", "tokens/\nforward", "tokens/s", "speedup,\nsame checkpoint", "lossless"):
            table.add_column(heading, justify="right")
        table.add_column("mind")
        for cell in cells:
            table.add_row(*map(escape, _row(cell)))
        tables.append(table)
    return tables


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    if cell["status"] == "failed":
        return (cell["arm"], "", "", "", "", "", f"failed: {cell['error']}")
    speedup = cell["speedup"][0] if cell["speedup"] else None
    mind = [f"void: {reason}" for reason in cell["void"]] + cell["flags"]
    return (
        cell["arm"],
        accuracy_text(cell),
        ratio_text(cell["tokens_per_forward"], cell["tokens_per_forward_ci"], 2),
        ratio_text(cell["tokens_per_s"]["value"], _bounds(cell["tokens_per_s"]), 0),
        "" if speedup is None else f"{ratio_text(speedup['value'], _bounds(speedup), 2)}\n{speedup['verdict']}",
        lossless_text(cell),
        "; ".join(mind),
    )


def accuracy_text(cell: Mapping[str, Any]) -> str:
    """`71.1 % [65.3, 76.3]` and the verdict against the same checkpoint's reference."""
    accuracy = cell["accuracy"]
    if accuracy is None:
        return "–"
    text = f"{accuracy['value']:.1%} [{accuracy['ci_low']:.1%}, {accuracy['ci_high']:.1%}]"
    return f"{text}\n{cell['accuracy_vs'][0]['verdict']}" if cell["accuracy_vs"] else text


def lossless_text(cell: Mapping[str, Any]) -> str:
    """The grade, or why there is none."""
    if cell["lossless"] is not None:
        return str(cell["lossless"]["grade"])
    return "reference" if cell["claims"] == "lossless" else "lossy by design"


def ratio_text(value: float | None, ci: Sequence[float] | None, digits: int) -> str:
    """`1.79 [1.75, 1.83]`; a dash for what was not measured."""
    if value is None:
        return "–"
    text = f"{value:,.{digits}f}"
    return text if ci is None else f"{text} [{ci[0]:,.{digits}f}, {ci[1]:,.{digits}f}]"


def _bounds(ratio: Mapping[str, Any]) -> list[float] | None:
    return None if ratio["ci_low"] is None else [ratio["ci_low"], ratio["ci_high"]]

"""What a person sees in the terminal: live progress, plain lines where there is no terminal, the table at the end."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from mtbench.plan import Cell, Plan

WIDE = 100
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


def results_tables(results: Mapping[str, Any], width: int) -> list[Table]:
    """One table per suite and batch size, one row per arm; 95 % intervals and verdicts stand under the values.

    A terminal narrower than `WIDE` columns goes without the column of the deployment baseline.
    """
    tables = []
    for suite, batch_size in dict.fromkeys((c["suite"], c["batch_size"]) for c in results["cells"]):
        cells = [c for c in results["cells"] if (c["suite"], c["batch_size"]) == (suite, batch_size)]
        title = f"{suite}, batch size {batch_size}, {max(c['items'] for c in cells)} items"
        minds = {cell["cell"]: mind(cell) for cell in cells}
        notes = list(dict.fromkeys(note for said in minds.values() for note in said))
        caption = [DEMONSTRATION] * any(c["demonstration"] for c in cells)
        caption += [f"({number}) {note}" for number, note in enumerate(notes, start=1)]
        table = Table(
            title=escape(title),
            caption=escape("\n".join(caption)),
            title_justify="left",
            caption_justify="left",
            box=SIMPLE_HEAD,
            show_lines=True,
            padding=(0, 1, 0, 0),
        )
        table.add_column("arm", overflow="fold", min_width=14)
        headings = ["accuracy, %", "tokens per\nforward", "tokens/s", "speedup,\nsame model", "speedup,\ndeployed"]
        for heading in headings[: None if width >= WIDE else -1]:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("lossless", min_width=8)
        for cell in cells:
            marks = "".join(f"({notes.index(note) + 1})" for note in minds[cell["cell"]])
            *row, deployed, grade = _row(cell, marks)
            table.add_row(*map(escape, [*row, deployed, grade] if width >= WIDE else [*row, grade]))
        tables.append(table)
    return tables


def mind(cell: Mapping[str, Any]) -> list[str]:
    """What a reader must know of a cell: its failure, why it is void, its flags."""
    failed = [f"failed: {cell['error']}"] if cell["error"] else []
    partial = ["not finished: `--resume` goes on"] if cell["status"] == "partial" else []
    return failed + partial + [f"void: {reason}" for reason in cell["void"]] + list(cell["flags"])


def _row(cell: Mapping[str, Any], marks: str) -> tuple[str, ...]:
    arm, accuracy = f"{cell['arm']} {marks}".replace("@", "\n@"), cell["accuracy"]
    if cell["status"] == "failed":
        return (arm, *["–"] * 5, "failed")
    verdicts = {a["baseline"]: a["verdict"] for a in cell["accuracy_vs"]}
    speedups = {s["baseline"]: s for s in cell["speedup"]}
    same, deployed = _own_and_deployed(cell)
    return (
        arm,
        stacked(
            accuracy and f"{accuracy['value'] * 100:.1f}",
            accuracy and percent_bounds(accuracy),
            _word(verdicts.get(same)),
        ),
        stacked(number(cell["tokens_per_forward"], 2), bounds(cell["tokens_per_forward_ci"], 2)),
        stacked(number(cell["tokens_per_s"]["value"], 0)),
        *(
            stacked(number(s["value"], 2), bounds(ci_of(s), 2), _word(s["verdict"])) if s else "–"
            for s in (speedups.get(same), speedups.get(deployed))
        ),
        lossless_text(cell),
    )


def _own_and_deployed(cell: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The baselines on the same checkpoint, and on the one that would be deployed without this method."""
    baselines = [s["baseline"] for s in cell["speedup"]]
    own = next((b for b in baselines if f"@{cell['on']}/" in b), None)
    return own, next((b for b in baselines if b != own), None)


def lossless_text(cell: Mapping[str, Any]) -> str:
    """The grade, or why there is none."""
    if cell["lossless"] is not None:
        return str(cell["lossless"]["grade"])
    return "–" if cell["reference"] else "unchecked" if cell["claims"] == "lossless" else "lossy"


def _word(verdict: str | None) -> str | None:
    """A verdict without its reasons."""
    return None if verdict is None else verdict.partition(":")[0].partition(",")[0]


def stacked(*lines: str | None) -> str:
    """Value over interval over verdict; a dash for what was not measured."""
    return "\n".join(line for line in lines if line) or "–"


def number(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:,.{digits}f}"


def bounds(ci: Sequence[float] | None, digits: int) -> str | None:
    return None if ci is None else f"[{ci[0]:,.{digits}f}, {ci[1]:,.{digits}f}]"


def percent_bounds(accuracy: Mapping[str, Any]) -> str:
    return f"[{accuracy['ci_low'] * 100:.1f}, {accuracy['ci_high'] * 100:.1f}]"


def ci_of(ratio: Mapping[str, Any]) -> list[float] | None:
    return None if ratio["ci_low"] is None else [ratio["ci_low"], ratio["ci_high"]]

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
from mtbench.simulated import KINDS

WIDE = 100
PLAIN_LINE_EVERY_S = 10.0
DEMONSTRATION = "Demonstration: small model, CPU, synthetic task: shows the mechanics"


def reservations(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """What stands over anything made from these cells: what is simulated in them, and that they show mechanics only."""
    simulated = [c["simulated"] for c in cells if c["simulated"]]
    kinds = " and ".join(word for kind, word in KINDS.items() if any(s[kind] for s in simulated))
    said = [f"Simulated {kinds}: speed only, and not that of a trained model"] if kinds else []
    return said + [DEMONSTRATION] * any(c["demonstration"] for c in cells)


def simulation(simulated: Mapping[str, Any]) -> str:
    """What is not real about a cell."""
    weights, accept, note = simulated["weights"], simulated["accept"], simulated["note"]
    said = [f"{weights} weights" if weights else "", f"acceptance scripted by {accept}" if accept else "", note or ""]
    return "; ".join(filter(None, said))


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
            batch = f"{group.batch_size}{'' if group.batching == 'static' else f' {group.batching}'}"
            row = (group.suite, plan.cell(name).arm, batch, str(items), str(len(group.blocks)), rounds)
            table.add_row(*map(escape, row))
    return table


def results_tables(results: Mapping[str, Any], width: int) -> list[Table]:
    """One table per suite, batch size and batching, a row per arm; 95 % intervals and verdicts stand under the values.

    A terminal narrower than `WIDE` columns goes without the deployment baseline and those by another engine.
    """
    tables = []
    for place, cells in sections(results["cells"]).items():
        title = f"{place[0]}, {batches(*place[1:])}, {max(c['items'] for c in cells)} items"
        minds = {cell["cell"]: mind(cell) for cell in cells}
        notes = list(dict.fromkeys(note for said in minds.values() for note in said))
        caption = reservations(cells)
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
        headings = ["accuracy, %", "tokens per\nforward", "tokens/s", "speedup,\nsame model"]
        engines = any(s.get("includes_engine") for c in cells for s in c["speedup"])
        beside = (1 + engines) * (width >= WIDE)
        headings += ["speedup,\ndeployed", "incl.\nengine"][:beside]
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("lossless", min_width=8)
        on = {c["arm"]: c["on"] for c in cells}
        for cell in cells:
            marks = "".join(f"({notes.index(note) + 1})" for note in minds[cell["cell"]])
            *row, grade = _row(cell, marks, on)
            table.add_row(*map(escape, [*row[: len(headings) + 1], grade]))
        tables.append(table)
    return tables


def sections(cells: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int, str], list[Mapping[str, Any]]]:
    """(suite, batch size, batching) -> the cells that are compared there, each kind apart."""
    found: dict[tuple[str, int, str], list[Mapping[str, Any]]] = {}
    for cell in cells:
        found.setdefault((cell["suite"], cell["batch_size"], cell["batching"]), []).append(cell)
    return found


def batches(size: int, batching: str) -> str:
    """How a group is batched, in words."""
    return f"batch size {size}" if batching == "static" else f"batch size {size}, {batching}"


def mind(cell: Mapping[str, Any]) -> list[str]:
    """What a reader must know of a cell: its failure, why it is void, its flags."""
    failed = [f"failed: {cell['error']}"] if cell["error"] else []
    partial = ["not finished: `--resume` goes on"] if cell["status"] == "partial" else []
    return failed + partial + [f"void: {reason}" for reason in cell["void"]] + list(cell["flags"])


def _row(cell: Mapping[str, Any], marks: str, on: Mapping[str, str]) -> tuple[str, ...]:
    """Arm, accuracy, tokens per forward, tokens/s, speedups, grade. on: arm -> its role."""
    arm, accuracy = f"{cell['arm']} {marks}".replace("@", "\n@"), cell["accuracy"]
    if cell["status"] == "failed":
        return (arm, *["–"] * 6, "failed")
    verdicts = {a["baseline"]: a["verdict"] for a in cell["accuracy_vs"]}
    speedups = {s["baseline"]: s for s in cell["speedup"]}
    same, deployed = _own_and_deployed(cell, on)
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
        _including_engine(cell),
        lossless_text(cell),
    )


def _own_and_deployed(cell: Mapping[str, Any], on: Mapping[str, str]) -> tuple[str | None, str | None]:
    """The baselines on the same checkpoint, and on the one that would be deployed without this method."""
    baselines = [s["baseline"] for s in cell["speedup"] if not s.get("includes_engine")]
    own = next((b for b in baselines if on[b] == cell["on"]), None)
    return own, next((b for b in baselines if b != own), None)


def _including_engine(cell: Mapping[str, Any]) -> str:
    """Over the fastest reference by another engine, and beside it the part of the arm's own engine."""
    entry = strongest(cell)
    if entry is None:
        return "–"
    plain = entry["plain"] and number(entry["plain"]["value"], 2)
    return stacked(
        number(entry["value"], 2), bounds(ci_of(entry), 2), plain and f"plain {plain}", f"vs {entry['baseline']}"
    )


def strongest(cell: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The comparison with the fastest of the references by another engine: the least flattering one."""
    entries = [s for s in cell["speedup"] if s.get("includes_engine") and s["value"] is not None]
    return min(entries, key=lambda s: float(s["value"]), default=None)


def lossless_text(cell: Mapping[str, Any]) -> str:
    """The grade, or why there is none."""
    if cell["lossless"] is not None:
        return str(cell["lossless"]["grade"])
    return "–" if cell["reference"] or cell["simulated"] else "unchecked" if cell["claims"] == "lossless" else "lossy"


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

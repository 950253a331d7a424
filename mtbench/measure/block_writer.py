"""Store what the cells of a group decode, and keep what later blocks of them need.

Workers share a writer: one writes at a time.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from mtbench.document.formatting import counted, few
from mtbench.measure.workers import Done, Failed, WorkerSession
from mtbench.plan.formats import Elimination, FailureLine, GenerationLine
from mtbench.plan.lines import generation_line, timing_line
from mtbench.plan.plan import Cell, Group, Plan, SuitePlan
from mtbench.plan.run import Run
from mtbench.records import dump


class Progress(Protocol):
    """Receives the progress of a run and shows it (mtbench/report/progress.py)."""

    def begin(self, cells: int, work: int, until: float, judging_s: Callable[[float], float] = ...) -> None: ...
    def skip(self, work: int) -> None: ...
    def decoded(self, cell: Cell, index: int, rows: int, timing: Mapping[str, Any] | None) -> None: ...
    def note(self, text: str) -> None: ...
    def show(self, text: str) -> None: ...


class BlockWriter:
    """Writes a group's lines. `failed`: the cells of all groups that failed, which it adds to."""

    def __init__(self, run: Run, plan: Plan, group: Group, failed: set[str], progress: Progress) -> None:
        self.run, self.plan, self.group, self.failed, self.progress = run, plan, group, failed, progress
        self.suite: SuitePlan = plan.suite(group.suite)
        self.cells = [plan.cell(name) for name in group.cells]
        self._numbers = {cell.cell: number for number, cell in enumerate(plan.cells, start=1)}
        self._writing = threading.RLock()
        self._tokens: dict[str, dict[str, list[int]]] = {name: {} for name in group.cells}  # by cell and item
        self.answered: dict[str, dict[str, Sequence[int]]] = {name: {} for name in group.cells}  # as later turns see it
        for name in group.cells:
            for line in run.answers[name]:
                self._remember(name, line)

    def live(self, cells: Iterable[Cell] | None = None) -> list[Cell]:
        """Return those of the cells, by default of all, that decode further blocks."""
        gone = self.failed.union(line.cell for line in self.run.left)
        return [cell for cell in (self.cells if cells is None else cells) if cell.cell not in gone]

    def begun(self, cell: Cell) -> bool:
        """Return whether a block of the cell is stored."""
        return bool(self.run.timings[cell.cell])

    def store(
        self, session: WorkerSession, cell: Cell, round_: int, block: int, place: int, outcome: Done | Failed
    ) -> None:
        """Store a decoded block, its answers in the first round. `place`: of the cell in the block's order, from 0."""
        with self._writing:
            if isinstance(outcome, Failed):
                self.progress.decoded(cell, self._numbers[cell.cell], 0, None)
                return
            items = [self.suite.items[number] for number in self.group.blocks[block]]
            identical = None
            if round_ == 1:
                self._store_answers(cell, block, outcome)
            else:
                first = self._tokens[cell.cell]
                rows = zip(items, outcome.generations, strict=True)
                identical = sum(first[item.item] == generation.token_ids for item, generation in rows)
            line = timing_line(session.session, round_, block, place, outcome.timing, outcome.conditions, identical)
            self.run.add_timing(cell.cell, line)
            self.progress.decoded(cell, self._numbers[cell.cell], len(items), dump(line))

    def _store_answers(self, cell: Cell, block: int, outcome: Done) -> None:
        lines = []
        for number, generation in zip(self.group.blocks[block], outcome.generations, strict=True):
            item, prompt = self.suite.items[number], self.suite.prompt(number, self.answered[cell.cell])
            public = self.suite.withheld is None and item.shared is None
            lines.append(generation_line(item.item, prompt, generation, block, public=public))
        self.run.add_answers(cell.cell, lines)
        for line in lines:
            self._remember(cell.cell, line)

    def _remember(self, cell: str, line: GenerationLine) -> None:
        self._tokens[cell][line.item] = line.token_ids
        self.answered[cell][line.item] = line.context

    def store_preparation(self, session: WorkerSession, cell: Cell, seconds: float, **more: Any) -> None:
        """Store how long a session prepared a cell before its first timed block."""
        line = {"session": session.session, "cell": cell.cell, "preparation_s": seconds}
        line |= {name: value for name, value in more.items() if value}
        with self._writing:
            self.run.directory.append("preparation.jsonl", [line])

    def fail(self, cell: Cell, failed: Failed) -> None:
        """Store that a cell failed: it decodes no further block."""
        with self._writing:
            if cell.cell in self.failed:
                return
            line = FailureLine(cell=cell.cell, error=failed.error)
            self.run.add_failures([line.changed(again=True) if failed.again else line])
            self.failed.add(cell.cell)
            later = "; `--resume` tries it again" if failed.again else ""
            self.progress.note(f"{cell.cell} failed: {failed.error}{later}")

    def let_leave(self, hook: Callable[[Sequence[str]], Sequence[Elimination]] | None) -> None:
        """Let the cells leave the race that the hook names."""
        if hook is not None:
            with self._writing:
                self._leave(hook(self.group.cells))

    def leave_out(self, cells: Sequence[Cell], reason: str) -> None:
        """Let cells leave before they begin, after the blocks that plain decoding has."""
        ended = max(len(self.run.timings[cell.cell]) for cell in self.cells)
        gone = partial(Elimination, block=ended, lost=False, reason=reason, rival=None, unraced=True)
        with self._writing:
            self._leave([gone(cell=cell.cell) for cell in self.live(cells)])

    def _leave(self, lines: Sequence[Elimination]) -> None:
        self.run.add_left(lines)
        arms = defaultdict[str, list[str]](list)
        to_come = sum(self.group.rounds) - max(len(self.run.timings[cell.cell]) for cell in self.cells)
        for line in lines:
            self.progress.skip(to_come)
            when = "left out" if line.unraced else f"out after {counted(len(self.run.timings[line.cell]), 'block')}"
            arms[f"{when}: {line.reason}"].append(self.plan.cell(line.cell).arm)
        for why, names in arms.items():
            self.progress.note(f"{few(names)} at batch size {self.group.batch_size}: {why}")

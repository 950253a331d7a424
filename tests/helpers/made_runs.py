"""Run directories written by hand: two arms on a made-up suite, of which a test says the answers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from made_records import generation_line, plan_cell, timing_line
from stages import read_stored

from mtbench.plan.directory import RunDirectory
from mtbench.plan.plan import Cell, Group, Item, Plan, RunRequest, SuitePlan
from mtbench.records import dump
from mtbench.results.aggregate import Stored

AR, MARS = "arithmetic.ar.ar.graph.b2", "arithmetic.ar.mars.graph.b2"  # the cells: `ar` on two checkpoints
TASK = {"name": "arithmetic", "version": "1"}


@dataclass
class Answer:
    """An answer to one item. commits: tokens of each forward; None: an engine hides them."""

    tokens: list[int]
    commits: list[int] | None
    score: float | None = 1.0
    reading: Mapping[str, Any] = field(default_factory=dict)  # in readings.json


@dataclass
class MadeRun:
    """What a run directory is to hold. answers: cell -> one answer per item; None: the item is not answered."""

    answers: Mapping[str, Sequence[Answer | None]]
    prompts: Sequence[list[int]] = ()
    blocks: Sequence[list[int]] = ()
    follows: Mapping[int, int] = field(default_factory=dict)
    task: Mapping[str, Any] = field(default_factory=lambda: TASK)
    metric: str | None = "exact_match"
    withheld: str | None = None
    wall_s: float = 1.0
    session: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    request: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)  # of an outside engine, in every timing line
    length: str = "natural"
    baseline: str | None = None  # arm that all others are compared with

    def plan(self) -> Plan:
        count = max(map(len, self.answers.values()))
        prompts = self.prompts or [[1, 2 + n % 30] for n in range(count)]
        items = [
            Item(item=f"arithmetic/{n}/0", prompt_ids=ids, stop=[], follows=self.follows.get(n))
            for n, ids in enumerate(prompts)
        ]
        suite = SuitePlan(
            suite="arithmetic",
            family="tiny",
            task=dict(self.task),
            metric=self.metric,
            max_new_tokens=64,
            flags=[],
            items=items,
            withheld=self.withheld,
        )
        blocks = [*self.blocks] or [[n for n in (first, first + 1) if n < count] for first in range(0, count, 2)]
        group = Group(
            suite="arithmetic",
            batch_size=2,
            blocks=blocks,
            rounds=[len(blocks)],
            cells=list(self.answers),
            batching="static",
        )
        request = RunRequest(**self.request)
        return Plan(
            schema_version=1,
            request=request,
            suites=[suite],
            cells=[_cell(name, self.length, self.baseline) for name in self.answers],
            groups=[group],
        )

    def write(self, path: Path) -> Path:
        """Write the run directory; return its path."""
        plan, run = self.plan(), RunDirectory.create(path)
        session = {"device": "cpu", "dtype": "float32", "processor": "made up", "packages": {"torch": "2.13.0"}}
        environment = {"command": ["mtbench", "run"], "sessions": [session | dict(self.session)]}
        run.write_json("environment.json", environment)
        run.write_json("plan.json", dump(plan))
        scores: dict[str, dict[str, float]] = {}
        for cell, answers in self.answers.items():
            if cell in self.failures:
                run.append("failures.jsonl", [{"cell": cell, "error": self.failures[cell]}])
                continue
            for block, numbers in enumerate(plan.groups[0].blocks):
                run.append(f"generations/{cell}.jsonl", self._lines(plan, block, answers))
                tokens = sum(len(a.tokens) for a in map(answers.__getitem__, numbers) if a is not None)
                timing = timing_line(
                    block=block,
                    rows=len(numbers),
                    items=len(numbers),
                    tokens=tokens,
                    wall_s=self.wall_s,
                    **self.counters,
                )
                run.append(f"timings/{cell}.jsonl", [dump(timing)])
            of_items = {f"arithmetic/{n}/0": a.score for n, a in enumerate(answers) if a is not None}
            scores[cell] = {item: score for item, score in of_items.items() if score is not None}
        if self.metric:
            run.write_json("scores.json", scores)
        read = {
            cell: {f"arithmetic/{n}/0": dict(a.reading) for n, a in enumerate(answers) if a is not None and a.reading}
            for cell, answers in self.answers.items()
        }
        if any(read.values()):
            run.write_json("readings.json", read)
        return path

    def _lines(self, plan: Plan, block: int, answers: Sequence[Answer | None]) -> list[dict[str, Any]]:
        """Return the answers of a block. The prompt of a later turn contains the answer before it."""
        said = {f"arithmetic/{n}/0": answer.tokens for n, answer in enumerate(answers) if answer is not None}
        lines = []
        for number in plan.groups[0].blocks[block]:
            answer, item = answers[number], plan.suites[0].items[number]
            if answer is None:
                continue
            prompt = plan.suites[0].prompt(number, said)
            line = generation_line(
                item=item.item,
                prompt_ids=None if self.withheld else prompt,
                prompt_tokens=len(prompt),
                token_ids=answer.tokens,
                forwards=None if answer.commits is None else len(answer.commits),
                commits=answer.commits,
                block=block,
            )
            lines.append(dump(line))
        return lines

    def read(self, path: Path) -> Stored:
        """Write the run directory and read it."""
        return read_stored(RunDirectory.open(self.write(path)))


def _cell(name: str, length: str, baseline: str | None) -> Cell:
    role = name.split(".")[2]
    arm, checkpoints = f"ar@{role}/graph", {role: f"embedded:tiny/{role}"}
    over = [] if baseline in (None, arm) else [baseline]
    return plan_cell(cell=name, arm=arm, on=role, checkpoints=checkpoints, batch_size=2, length=length, baselines=over)


def answer(tokens: str, forwards: int | None = None, score: float | None = 1.0) -> Answer:
    """The answer with a token per letter, in so many forwards; by default one per token."""
    ids = [ord(letter) for letter in tokens]
    if forwards is None:
        return Answer(ids, [1] * len(ids), score)
    return Answer(ids, [len(ids) - forwards + 1] + [1] * (forwards - 1), score)


def hidden(tokens: str, score: float | None = 1.0) -> Answer:
    """The same of an engine that hides its forwards."""
    return Answer([ord(letter) for letter in tokens], None, score)


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

"""An open run: its plan and its stored lines, read and checked once.

A command opens its directory once and hands this to its stages. A stage's new lines are added here, too, so that the
next stage, and every look of a race, has it without reading the files again.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mtbench.errors import UserError
from mtbench.plan.checks import read_plan, read_race
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Elimination, Environment, FailureLine, GenerationLine, Race, SessionRecord, TimingLine
from mtbench.plan.plan import Group, Plan
from mtbench.records import APPEND_ONLY, dump


@dataclass
class Run:
    """The plan, the environment and the lines of a run. Lines are in the order of their files, by cell."""

    directory: RunDirectory
    plan: Plan  # as it is stored: without the prompts of private suites
    environment: Environment
    race: Race | None  # None: no cell leaves
    failures: list[FailureLine]
    left: list[Elimination]
    answers: dict[str, list[GenerationLine]]
    timings: dict[str, list[TimingLine]]

    @classmethod
    def open(cls, directory: RunDirectory, plan: Plan | None = None) -> "Run":
        """Read a run, with its stored plan if that is read already.

        Raises UserError for a faulty file, and for a line that is not in the plan.
        """
        plan, environment = plan or read_plan(directory), directory.read("environment.json", Environment)
        names = [cell.cell for cell in plan.cells]
        run = cls(
            directory=directory,
            plan=plan,
            environment=environment,
            race=read_race(directory, plan),
            failures=directory.read_lines("failures.jsonl", FailureLine),
            left=directory.read_lines("eliminated.jsonl", Elimination),
            answers={name: directory.read_lines(f"generations/{name}.jsonl", GenerationLine) for name in names},
            timings={name: directory.read_lines(f"timings/{name}.jsonl", TimingLine) for name in names},
        )
        run._refuse_unplanned()
        return run

    @classmethod
    @contextmanager
    def locked(cls, directory: RunDirectory) -> Iterator["Run"]:
        """Open a run, and keep other commands away from it. Raises UserError if another process has it."""
        with directory.locked():
            yield cls.open(directory)

    def _refuse_unplanned(self) -> None:
        for group in self.plan.groups:
            planned = self._planned_answers(group)
            for cell in group.cells:
                for line in self.answers[cell]:
                    if (line.block, line.item) not in planned:
                        unplanned = f"the plan has no {line.item!r:.60} in block {line.block}"
                        raise self._fault("generations", cell, unplanned)
                for timing in self.timings[cell]:
                    if timing.block >= len(group.blocks):
                        raise self._fault("timings", cell, f"the plan has no block {timing.block}")

    def refuse_unanswered(self) -> None:
        """Raise UserError for a timed block without all its answers: the run cannot be resumed."""
        for group in self.plan.groups:
            planned = self._planned_answers(group)
            for cell in group.cells:
                answered = {(line.block, line.item) for line in self.answers[cell]}
                timed = {line.block for line in self.timings[cell]}
                for block, item in sorted(planned - answered):
                    if block in timed:
                        missing = f"block {block} was timed, and its answer to {item!r:.60} is missing"
                        raise self._fault("generations", cell, missing)

    def _planned_answers(self, group: Group) -> set[tuple[int, str]]:
        items = self.plan.suite(group.suite).items
        return {(block, items[n].item) for block, numbers in enumerate(group.blocks) for n in numbers}

    def _fault(self, folder: str, cell: str, finding: str) -> UserError:
        return UserError(f"{self.directory.path / folder / cell}.jsonl: {finding}; {APPEND_ONLY}")

    @property
    def sessions(self) -> list[SessionRecord]:
        return self.environment.sessions

    def write_environment(self, environment: Environment) -> None:
        self.environment = environment
        self.directory.write_json("environment.json", dump(environment))

    def add_answers(self, cell: str, lines: Sequence[GenerationLine]) -> None:
        self.directory.append(f"generations/{cell}.jsonl", map(dump, lines))
        self.answers[cell] += lines

    def add_timing(self, cell: str, line: TimingLine) -> None:
        self.directory.append(f"timings/{cell}.jsonl", [dump(line)])
        self.timings[cell].append(line)

    def keep_blocks(self, cell: str, kept: Container[tuple[int, int]]) -> None:
        """Delete the lines of a cell that are not of these (round, block)."""
        self.timings[cell] = [line for line in self.timings[cell] if (line.round, line.block) in kept]
        before, self.answers[cell] = self.answers[cell], [of for of in self.answers[cell] if (1, of.block) in kept]
        if len(self.answers[cell]) < len(before):  # other answers may come, which are judged anew
            (self.directory.path / "lossless" / f"{cell}.json").unlink(missing_ok=True)
        self.directory.keep_lines(f"timings/{cell}.jsonl", self.timings[cell])
        self.directory.keep_lines(f"generations/{cell}.jsonl", self.answers[cell])

    def add_failures(self, lines: Sequence[FailureLine]) -> None:
        self.directory.append("failures.jsonl", map(dump, lines))
        self.failures += lines

    def keep_failures(self, lines: Sequence[FailureLine]) -> None:
        """Replace the stored failures by these; a torn line goes, too."""
        self.failures = [*lines]
        self.directory.keep_lines("failures.jsonl", lines)

    def keep_left(self, lines: Sequence[Elimination]) -> None:
        """Replace the cells that have left by these."""
        self.left = [*lines]
        self.directory.keep_lines("eliminated.jsonl", lines)

    def add_left(self, lines: Sequence[Elimination]) -> None:
        self.directory.append("eliminated.jsonl", map(dump, lines))
        self.left += lines

"""An open run: its plan and its stored lines, read once.

A command opens its directory once and hands this to its stages. A stage's new lines are added here, too, so that the
next stage, and every look of a race, has it without reading the files again.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mtbench.plan.checks import read_plan, read_race
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import (
    Elimination,
    Environment,
    FailureLine,
    GenerationLine,
    Race,
    SessionRecord,
    TimingLine,
)
from mtbench.plan.plan import Plan
from mtbench.records import dump


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

        Raises UserError for a faulty file.
        """
        plan, environment = plan or read_plan(directory), directory.read("environment.json", Environment)
        names = [cell.cell for cell in plan.cells]
        return cls(
            directory=directory,
            plan=plan,
            environment=environment,
            race=read_race(directory),
            failures=directory.read_lines("failures.jsonl", FailureLine),
            left=directory.read_lines("eliminated.jsonl", Elimination),
            answers={name: directory.read_lines(f"generations/{name}.jsonl", GenerationLine) for name in names},
            timings={name: directory.read_lines(f"timings/{name}.jsonl", TimingLine) for name in names},
        )

    @classmethod
    @contextmanager
    def locked(cls, directory: RunDirectory) -> Iterator["Run"]:
        """Open a run, and keep other commands away from it. Raises UserError if another process has it."""
        with directory.locked():
            yield cls.open(directory)

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
        self.answers[cell] = [line for line in self.answers[cell] if (1, line.block) in kept]
        self.directory.keep_lines(f"timings/{cell}.jsonl", self.timings[cell])
        self.directory.keep_lines(f"generations/{cell}.jsonl", self.answers[cell])

    def add_failures(self, lines: Sequence[FailureLine]) -> None:
        self.directory.append("failures.jsonl", map(dump, lines))
        self.failures += lines

    def keep_failures(self, lines: Sequence[FailureLine]) -> None:
        """Replace the stored failures by these; a torn line goes, too."""
        self.failures = [*lines]
        self.directory.keep_lines("failures.jsonl", lines)

    def add_left(self, lines: Sequence[Elimination]) -> None:
        self.directory.append("eliminated.jsonl", map(dump, lines))
        self.left += lines

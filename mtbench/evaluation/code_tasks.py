"""lm-eval's tasks whose answers are programs: its prompts and filters, our sandbox in place of its metric.

Those tasks fetch `code_eval` from the hub as soon as they are imported, and it runs what a model wrote in a subprocess
of ours. A stand-in takes its place that only writes down what it is given; then all programs are run together, each
confined by itself (mtbench/evaluation/sandbox.py).
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar
from unittest.mock import patch

from mtbench.errors import UserError
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.sandbox import run_all, unavailable
from mtbench.evaluation.suite import Source

METRIC = "code_eval"


class Notes:
    """What lm-eval takes for its metric. A program's score is its number here; what is called so is replaced later."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], None]:
        (test,), ((program,),), (_,) = references, predictions, k
        self.programs.append(f"{program}\n{test}")
        return {"pass@1": len(self.programs) - 1.0}, None


NOTES = Notes()  # one for all, as lm-eval imports a task's module once and keeps what it found then


class ProgramSuite(HarnessSuite):
    """A suite of tasks scored by `code_eval`, one answer to each question."""

    metric = "pass@1"
    begins: ClassVar[str | None] = None  # what is put in the model's mouth; None: as lm-eval has it

    def __init__(self, rest: str, source: Source) -> None:
        super().__init__(rest, source)
        self.task = {**self.task, "sandbox": not source.unsandboxed}
        if self.begins is not None:
            self.task = {**self.task, "answer_begins": self.begins}

    def _load(self, named: Mapping[str, str], source: Source) -> dict[str, Any]:
        if not source.unsandboxed and (reason := unavailable()):
            raise UserError(f"suite {self.name!r}: {reason}.")
        self._unsandboxed = source.unsandboxed
        evaluate = import_module("evaluate")  # lm-eval's, and imported with it
        load = evaluate.load

        def ours(path: str, *args: Any, **kwargs: Any) -> Any:
            return NOTES if path == METRIC else load(path, *args, **kwargs)

        with patch.object(evaluate, "load", ours):
            return super()._load(named, source)

    def _settle(self, task: Any) -> None:
        super()._settle(task)
        if self.begins is not None:
            task.set_config("gen_prefix", self.begins)

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        """1 for a program that runs to the end of its tests."""
        NOTES.programs.clear()
        numbers = super().score(answers)
        outcomes = run_all(NOTES.programs, unsandboxed=self._unsandboxed)
        return {item: float(outcomes[int(number)].passed) for item, number in numbers.items()}

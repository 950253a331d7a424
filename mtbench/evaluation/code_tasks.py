"""lm-eval's tasks whose answers are programs: lm-eval's prompts and filters, scored in mtbench's sandbox.

These tasks load the metric `code_eval` from the hub at import, and that metric runs the model's code unconfined in a
subprocess. A stand-in replaces the metric: it only records the programs. Then the sandbox (sandbox.py) runs all of
them, each on its own. As with the metric, the check runs in the program's own process, so a program can forge a pass:
SECURITY.md says how.
"""

import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar
from unittest.mock import patch

from mtbench.errors import UserError
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.sandbox import run_all, unavailable
from mtbench.evaluation.suite import Source

METRIC = "code_eval"
FENCED = re.compile(r"```[^\n]*\n(.*?)(?:\n```|$)", re.DOTALL)  # the last fence may be missing: cut by the budget


def first_block(text: str) -> str:
    """Return the first block between code fences; a text without a fence is code as a whole.

    >>> first_block("So:\\n```python\\nx = 1\\n```\\nIt is 1.")
    'x = 1'
    """
    found = FENCED.search(text)
    return found[1] if found else text


class ProgramRecorder:
    """Stand-in for lm-eval's metric. It records each program and returns the program's index in place of a score."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    def compute(
        self, references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
    ) -> tuple[dict[str, float], None]:
        (test,), ((program,),), (_,) = references, predictions, k
        self.programs.append(f"{program}\n{test}")
        return {"pass@1": len(self.programs) - 1.0}, None


RECORDER = ProgramRecorder()  # one for all suites: lm-eval imports a task's module once and keeps the metric it loaded


class ProgramSuite(HarnessSuite):
    """A suite of tasks that lm-eval scores by `code_eval`, with one answer to each question."""

    metric = "pass@1"
    answer_prefix: ClassVar[str | None] = None  # the answer begins with this text; None: as lm-eval's task has it

    def __init__(self, variant: str, source: Source) -> None:
        super().__init__(variant, source)
        self.task = {**self.task, "sandbox": not source.unsandboxed}
        if self.answer_prefix is not None:
            self.task = {**self.task, "answer_begins": self.answer_prefix}

    def _load_tasks(self, selected: Mapping[str, str], source: Source) -> dict[str, Any]:
        if not source.unsandboxed and (reason := unavailable()):
            raise UserError(f"suite {self.name!r}: {reason}.")
        self._unsandboxed = source.unsandboxed
        evaluate = import_module("evaluate")  # a dependency of lm-eval
        load_metric = evaluate.load

        def load(path: str, *args: Any, **kwargs: Any) -> Any:
            return RECORDER if path == METRIC else load_metric(path, *args, **kwargs)

        with patch.object(evaluate, "load", load):
            return super()._load_tasks(selected, source)

    def _configure(self, task: Any) -> None:
        super()._configure(task)
        if self.answer_prefix is not None:
            task.set_config("gen_prefix", self.answer_prefix)

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        """Score 1 for a program that runs to the end of its tests, else 0."""
        RECORDER.programs.clear()
        program_indices = super().score(answers)
        outcomes = run_all(RECORDER.programs, unsandboxed=self._unsandboxed)
        return {item: float(outcomes[int(index)].passed) for item, index in program_indices.items()}

"""lm-eval's tasks whose answers are programs: lm-eval's prompts and filters, scored in mtbench's sandbox.

These tasks load the metric `code_eval` from the hub at import, and that metric runs the model's code unconfined in a
subprocess. A stand-in replaces the metric, and the sandbox (sandbox.py) runs all programs, each on its own. As with the
metric, the check runs in the program's own process, so a program can forge a pass: SECURITY.md says how.
"""

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import suppress
from importlib import import_module
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

from mtbench.errors import UserError
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.sandbox import run_all, unavailable
from mtbench.evaluation.suite import Reading, Source

METRIC = "code_eval"
STAND_IN = SimpleNamespace(compute=lambda **_: ({"pass@1": 0.0}, None))
MARK = re.compile(r"^[ \t]*(?:```|~~~)[^\n:(]*(?:\n|\Z)|```+|\[/?(?:BEGIN|DONE|PYTHON)\]", re.MULTILINE)
MOST_MARKS = 1000  # the last ones count
SPANNED = 5  # a block goes on behind at most four marks, which are then in its strings


def program(text: str, names: Set[str], before: str = "") -> str | None:
    """Return the last block of a text that is a program and defines one of the names, else the last that is a program.

    Blocks lie between code fences, [BEGIN] and [DONE], but for those in a string of the program. A block may also go on
    with the code `before`. None: no block is a program.

    >>> program("So:\\n```python\\nx = 1\\n```\\nIt is 1.", {"x"})
    'x = 1\\n'
    """
    found = None
    for block in filter(str.strip, _blocks(text)):
        tree = _parsed(block)
        if tree is None:
            defines = bool(before) and _parsed(before + block) is not None
        elif all(isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call) for node in tree.body):
            continue  # words
        else:
            defines = not names.isdisjoint(getattr(node, "name", "") for node in tree.body)
            found = found or block
        if defines:
            return block
    return found


def _blocks(text: str) -> Iterator[str]:
    """Yield what may be a program, the blocks that begin last first, of these the shortest first."""
    marks = list(MARK.finditer(text))[-MOST_MARKS:]
    begins = [0, *(mark.end() for mark in marks)]
    ends = [*(mark.start() for mark in marks), len(text)]
    for place in reversed(range(len(begins))):
        indented = place > 0 and marks[place - 1][0][0] in " \t"
        for end in ends[place : place + SPANNED]:
            block = text[begins[place] : end]
            yield dedent(block) if indented else block


def _parsed(code: str) -> ast.Module | None:
    with warnings.catch_warnings(action="ignore"), suppress(SyntaxError, ValueError, MemoryError, RecursionError):
        return ast.parse(code)
    return None


class ProgramSuite(HarnessSuite):
    """A suite of tasks that lm-eval scores by `code_eval`, with one answer to each question."""

    metric = "pass@1"
    nothing = "no program that parses"
    choose: Callable[[Mapping[str, Any], str], str | None]  # the program of an answer to a row of the data
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
            return STAND_IN if path == METRIC else load_metric(path, *args, **kwargs)

        with patch.object(evaluate, "load", load):
            return super()._load_tasks(selected, source)

    def _configure(self, task: Any) -> None:
        super()._configure(task)
        if self.answer_prefix is not None:
            task.set_config("gen_prefix", self.answer_prefix)

    def read(self, answers: Mapping[str, str]) -> dict[str, Reading]:
        """Score 1 for a program that runs to the end of its tests, else 0. Equal programs run once."""
        cases = self._score_answers(answers)
        runs: dict[str, tuple[str | None, str | None]] = {}  # item -> the programs by lm-eval's rule and by value
        for item, case in cases.items():
            chosen = self.choose(case.question, case.text)
            by_value = None if chosen is None else f"{chosen}\n{case.reference}"
            rule = None if case.found is None else f"{case.found[0]}\n{case.reference}"
            runs[item] = by_value if self.own_rule else rule, by_value
        programs = list(dict.fromkeys(one for both in runs.values() for one in both if one is not None))
        outcomes = run_all(programs, unsandboxed=self._unsandboxed)
        passed = dict(zip([None, *programs], [False, *(ran.passed for ran in outcomes)], strict=True))
        readings = {}
        for item, (rule, by_value) in runs.items():
            score = None if rule is None else float(passed[rule])
            found = by_value if rule is not None and _parsed(rule) else ""
            readings[item] = self._reading(cases[item]._replace(found=found or "", score=score), passed[by_value])
        return readings

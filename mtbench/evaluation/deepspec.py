"""The evaluation sets of DeepSpec: the questions of a data set, their order, their wording.

Paper: "DSpark", arXiv 2607.05147, Table 1. Code: github.com/deepseek-ai/DeepSpec (MIT), deepspec/eval/base_evaluator.py
(`run_dataset`) and eval_datasets/convert_eval_datasets_to_jsonl.py. Its evaluator shuffles the rows of a data set with
a fixed seed and takes the first 500 (MBPP: 256). It uses the first turn only, as one user turn of the chat. The words
around a question are part of the protocol, so the suites repeat them exactly.

DeepSpec publishes the questions as JSON lines, `{"turns": ["…"]}`. A suite reads this file or the data set's own rows.
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from mtbench.evaluation.multi_turn import Question, QuestionSuite
from mtbench.evaluation.suite import Source

SEED = 980406  # default of --seed in DeepSpec's eval.py
REVISION = "afdfa7c9382a3341a3e6f17756dd816da79f132c"
BUDGET = 2048  # default of --max-new-tokens in DeepSpec's eval.py
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def draw(rows: int, count: int) -> list[int]:
    """Return the rows that DeepSpec's evaluator takes of a data set, in its order.

    >>> draw(3, 500)
    [0, 1, 2]
    >>> draw(1319, 500)[:3] == draw(1319, 2000)[:3]
    False
    """
    order = list(range(rows))
    if rows > count:
        random.Random(SEED).shuffle(order)
    return order[:count]


def url(file: str) -> str:
    """Return the address of a file of DeepSpec's questions."""
    return f"https://raw.githubusercontent.com/deepseek-ai/DeepSpec/{REVISION}/eval_datasets/{file}"


class DrawnQuestions(QuestionSuite):
    """Questions with one turn and without categories, drawn as DeepSpec does. They are not scored."""

    max_new_tokens = BUDGET
    max_turns = 1
    count: ClassVar[int] = 500  # questions to draw

    def __init__(self, variant: str, source: Source) -> None:
        super().__init__(variant, source)
        self.task = {**self.task, "drawn_from": self._total}

    def wording(self, row: Mapping[str, Any]) -> str:
        """Return the prompt for a row of the data set itself. Raise KeyError if it has other columns."""
        raise NotImplementedError

    def _rows(self) -> Iterator[tuple[str, Any]]:
        rows = list(super()._rows())
        self._total = len(rows)
        for number in draw(len(rows), self.count):
            place, row = rows[number]
            yield place, (number, row)

    def _parse_question(self, row: Any) -> Question:
        number, content = row
        turns = content["turns"] if "turns" in content else [self.wording(content)]
        return Question("", "", str(number), self._checked_turns(turns))

    def _item(self, question: Question, turn: int) -> str:
        return f"{self.name}/{question.id}/{turn}"

    def _questions_by_subtask(self) -> list[list[Question]]:
        return [self._questions]

"""MBPP: 500 small Python functions, requested with their tests, after three examples.

Paper: "Program Synthesis with Large Language Models", Austin et al., arXiv 2108.07732. Data: the test split of
google-research-datasets/mbpp (CC BY 4.0). Task: lm-eval's `mbpp_instruct`, 3-shot, each example a turn of the chat. The
answer begins in a code fence; the score runs its last block that has the tested function, then the row's set-up code
and tests, in a sandbox. lm-eval's own filter takes the first word of the code, such as `def`, for the name of a
language and loses it (its issue 3447).

    mtbench run --suite mbpp
    mtbench run --suite mbpp --offline --data-dir DIR   # DIR/mbpp/test.jsonl, or .gz

The sandbox needs bubblewrap (`apt install bubblewrap`), see mtbench/evaluation/sandbox.py.
"""

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from mtbench.evaluation.code_tasks import ProgramSuite, program
from mtbench.evaluation.registry import SUITES


def chosen(question: Mapping[str, Any], text: str) -> str | None:
    """Return the program of an answer, and what its tests need."""
    tested = re.findall(r"\b([A-Za-z_]\w*)\(", "\n".join(question["test_list"]))
    found = program(text, {*tested})
    return None if found is None else f"{found}\n{question.get('test_setup_code') or ''}"


@SUITES.register("mbpp")
class Mbpp(ProgramSuite):
    tasks: ClassVar = {"mbpp_instruct": {"test": "mbpp/test.jsonl"}}
    folder = "mbpp"
    num_fewshot = 3
    filter = "extract_code"
    own_rule = True
    choose = staticmethod(chosen)
    metric = "pass_at_1"
    max_new_tokens = 256

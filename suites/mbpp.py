"""MBPP: 500 small Python functions, requested with their tests, after three examples.

Paper: "Program Synthesis with Large Language Models", Austin et al., arXiv 2108.07732. Data: the test split of
google-research-datasets/mbpp (CC BY 4.0). Task: lm-eval's `mbpp_instruct`, 3-shot, each example a turn of the chat. The
answer begins in a code fence; the score runs the code up to the next fence, then the tests, in a sandbox. lm-eval's own
filter takes the first word of the code, such as `def`, for the name of a language and loses it (its issue 3447).

    mtbench run --suite mbpp
    mtbench run --suite mbpp --offline --data-dir DIR   # DIR/mbpp/test.jsonl, or .gz

The sandbox needs bubblewrap (`apt install bubblewrap`), see mtbench/evaluation/sandbox.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mtbench.evaluation.code_tasks import ProgramSuite, first_block
from mtbench.evaluation.registry import SUITES


def programs(answers: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the program of each answer, which may open a fence of its own. A filter of lm-eval."""
    fenced = [[text if text.lstrip().startswith("```") else f"```\n{text}" for text in of_doc] for of_doc in answers]
    return [[first_block(text) for text in of_doc] for of_doc in fenced]


@SUITES.register("mbpp")
class Mbpp(ProgramSuite):
    tasks: ClassVar = {"mbpp_instruct": {"test": "mbpp/test.jsonl"}}
    folder = "mbpp"
    config: ClassVar = {"filter_list": [{"name": "program", "filter": [{"function": "custom", "filter_fn": programs}]}]}
    num_fewshot = 3
    filter = "program"
    metric = "pass_at_1"
    max_new_tokens = 256

"""HumanEval in DeepSpec's setting: a chat request with the beginning of a function, answered freely, 2048 tokens.

Paper: "DSpark", arXiv 2607.05147, Table 1 (mtbench/evaluation/deepspec.py). Task: lm-eval's `humaneval_instruct` at
0-shot; unlike there, nothing of the answer is given. DeepSpec does not score answers. The score runs the beginning of
the function, which holds imports and helpers, then the last block of the answer that has the function, then the tests.

    mtbench run --suite humaneval-deepspec --family deepspec-qwen3-4b
    mtbench run --suite humaneval-deepspec --offline --data-dir DIR   # DIR/humaneval/HumanEval.jsonl, or .gz

The sandbox needs bubblewrap (`apt install bubblewrap`), see mtbench/evaluation/sandbox.py.
"""

from typing import ClassVar

from mtbench.evaluation import deepspec
from mtbench.evaluation.code_tasks import ProgramSuite
from mtbench.evaluation.registry import SUITES

from .humaneval import completed


@SUITES.register("humaneval-deepspec")
class HumanEvalDeepSpec(ProgramSuite):
    tasks: ClassVar = {"humaneval_instruct": {"test": "humaneval/HumanEval.jsonl"}}
    folder = "humaneval"
    config: ClassVar = {
        "doc_to_text": "Write a solution to the following problem and make sure that it passes the tests:\n"
        "```python\n{{prompt}}\n```",
    }
    num_fewshot = 0
    answer_prefix = ""
    stop = ()
    filter = "create_test"
    own_rule = True
    choose = staticmethod(completed)
    max_new_tokens = deepspec.BUDGET

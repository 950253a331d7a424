"""HumanEval: 164 Python functions to complete from signature and docstring, right if they pass the authors' tests.

Paper: "Evaluating Large Language Models Trained on Code", Chen et al., arXiv 2107.03374. Data: openai/openai_humaneval
(MIT). Task: lm-eval's `humaneval`, 0-shot: the text of the function so far, without a chat template, to be gone on with
up to the next definition at the margin, or 1024 tokens. Score: pass@1 of the one answer, run in a sandbox.

    mtbench run --suite humaneval
    mtbench run --suite humaneval --offline --data-dir DIR   # DIR/humaneval/HumanEval.jsonl, or .gz

It needs bubblewrap (`apt install bubblewrap`), see mtbench/evaluation/sandbox.py.
"""

from typing import ClassVar

from mtbench.evaluation.code_tasks import ProgramSuite
from mtbench.evaluation.registry import SUITES


@SUITES.register("humaneval")
class HumanEval(ProgramSuite):
    tasks: ClassVar = {"humaneval": {"test": "humaneval/HumanEval.jsonl"}}
    folder = "humaneval"
    chat_template = False
    num_fewshot = 0
    filter = "create_test"
    max_new_tokens = 1024

"""HumanEval: 164 Python functions to complete from signature and docstring, scored by the authors' tests.

Paper: "Evaluating Large Language Models Trained on Code", Chen et al., arXiv 2107.03374. Data: openai/openai_humaneval
(MIT). Task: lm-eval's `humaneval`, 0-shot: the prompt is the beginning of the function, without a chat template. The
answer ends at the next line that starts at the margin, or after 1024 tokens. Score: pass@1 with one answer to each
question, run in a sandbox.

    mtbench run --suite humaneval
    mtbench run --suite humaneval --offline --data-dir DIR   # DIR/humaneval/HumanEval.jsonl, or .gz

The sandbox needs bubblewrap (`apt install bubblewrap`), see mtbench/evaluation/sandbox.py.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from mtbench.evaluation.code_tasks import ProgramSuite, program
from mtbench.evaluation.registry import SUITES


def completed(question: Mapping[str, Any], text: str) -> str | None:
    """Return the program of an answer that goes on with the beginning of a function or has the function itself."""
    before = question["prompt"].rstrip("\n") + "\n"
    block = program(text, {question["entry_point"]}, before)
    return None if block is None else before + block


@SUITES.register("humaneval")
class HumanEval(ProgramSuite):
    tasks: ClassVar = {"humaneval": {"test": "humaneval/HumanEval.jsonl"}}
    folder = "humaneval"
    chat_template = False
    num_fewshot = 0
    filter = "create_test"
    choose = staticmethod(completed)
    max_new_tokens = 1024

"""HumanEval in the MARS paper's setting: a chat request, the answer's first lines given, 256 tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `humaneval_instruct`, 0-shot with the chat template, as in the authors' fork of lm-eval: the answer
begins with "Here is the completed function:" and an open code fence. (In lm-eval's own task, the beginning of the
function follows the fence.) The score runs the beginning of the function, followed by the answer up to the next fence.
Models write the whole function again, so `def` cannot be a stop string as in `humaneval`; the closing fence is.

    mtbench run --suite humaneval-paper --family qwen2.5-7b

The sandbox needs bubblewrap (`apt install bubblewrap`), see mtbench/evaluation/sandbox.py.
"""

from typing import ClassVar

from mtbench.evaluation.code_tasks import ProgramSuite
from mtbench.evaluation.registry import SUITES

from .humaneval import completed


@SUITES.register("humaneval-paper")
class HumanEvalPaper(ProgramSuite):
    tasks: ClassVar = {"humaneval_instruct": {"test": "humaneval/HumanEval.jsonl"}}
    folder = "humaneval"
    num_fewshot = 0
    answer_prefix = "Here is the completed function:\n```python"
    stop = ("```",)
    filter = "create_test"
    choose = staticmethod(completed)
    max_new_tokens = 256

"""HumanEval as the MARS paper asks it: a request in the chat, the answer begun up to its code fence, 256 tokens.

Paper: "MARS: Enabling Autoregressive Models Multi-Token Generation", Jin et al., arXiv 2604.07023, section 4.1.
Task: lm-eval's `humaneval_instruct`, 0-shot with the chat template, as the authors' fork of lm-eval has it: the answer
begins "Here is the completed function:" and an open fence (lm-eval's own repeats the beginning of the function behind
it), and what is run is that beginning followed by what the model wrote before the next fence. Models write the whole
function anew there, so `def` cannot end the answer as in `humaneval`: the fence does, behind which nothing counts.

    mtbench run --suite humaneval-paper --family qwen2.5-7b

It needs bubblewrap (`apt install bubblewrap`), see mtbench/evaluation/sandbox.py.
"""

from typing import ClassVar

from mtbench.evaluation.code_tasks import ProgramSuite
from mtbench.evaluation.registry import SUITES


@SUITES.register("humaneval-paper")
class HumanEvalPaper(ProgramSuite):
    tasks: ClassVar = {"humaneval_instruct": {"test": "humaneval/HumanEval.jsonl"}}
    folder = "humaneval"
    num_fewshot = 0
    begins = "Here is the completed function:\n```python"
    stop = ("```",)
    filter = "create_test"
    max_new_tokens = 256

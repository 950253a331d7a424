"""MMLU-Pro: 12,032 questions of 14 subjects with up to ten choices each and five few-shot examples.

Paper: "MMLU-Pro: A More Robust and Challenging Multi-Task Language Understanding Benchmark", Wang et al., arXiv
2406.01574. Data: TIGER-Lab/MMLU-Pro (MIT).
Task: lm-eval's `mmlu_pro`: a system turn that requests "the answer is (X)", then five examples of the subject with
their reasoning, each a turn of the chat; up to 2,048 new tokens. The filter reads the first letter behind "answer is",
also that of a word; by value, the choice that is stated last counts. The score is the mean over all questions.

    mtbench run --suite mmlu-pro --limit 20              # of each subject
    mtbench run --suite mmlu-pro --subtask law
    mtbench run --suite mmlu-pro --offline --data-dir DIR
    # DIR/mmlu_pro/test-00000-of-00001.parquet and DIR/mmlu_pro/validation-00000-of-00001.parquet
"""

from typing import ClassVar

from mtbench.evaluation.by_value import same_letters
from mtbench.evaluation.lm_eval import HarnessSuite
from mtbench.evaluation.registry import SUITES

SUBJECTS = (
    *("biology", "business", "chemistry", "computer_science", "economics", "engineering", "health"),
    *("history", "law", "math", "other", "philosophy", "physics", "psychology"),
)
FILES = {split: f"mmlu_pro/{split}-00000-of-00001.parquet" for split in ("test", "validation")}


@SUITES.register("mmlu-pro")
class MmluPro(HarnessSuite):
    subtasks = SUBJECTS
    tasks: ClassVar = {f"mmlu_pro_{subject}": FILES for subject in SUBJECTS}
    group = "mmlu_pro"
    folder = "mmlu_pro"
    num_fewshot = 5
    filter = "custom-extract"
    nothing = 'no letter behind "answer is"'
    same_values = staticmethod(same_letters)
    metric = "exact_match"
    max_new_tokens = 2048

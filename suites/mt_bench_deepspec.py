"""MT-Bench in DeepSpec's setting: the first turn of each of the 80 questions, 2048 tokens. Speed and acceptance only.

Paper: "DSpark", arXiv 2607.05147, Table 1 (mtbench/evaluation/deepspec.py). The questions are those of the suite
`mt-bench`, from the same file. DeepSpec takes them from HuggingFaceH4/mt_bench_prompts, where one of the 80 has
another word (question 121: "reprompt" in place of "returns").

    mtbench run --suite mt-bench-deepspec --family deepspec-qwen3-4b --temperature 1
    mtbench run --suite mt-bench-deepspec --offline --data-dir DIR   # DIR/mt_bench/question.jsonl
"""

from mtbench.evaluation import deepspec
from mtbench.evaluation.registry import SUITES

from .mt_bench import MTBench


@SUITES.register("mt-bench-deepspec")
class MTBenchDeepSpec(MTBench):
    max_new_tokens = deepspec.BUDGET
    max_turns = 1

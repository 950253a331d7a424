"""Spec-Bench: 480 questions of six kinds, 80 each, for speculative decoding. Speed and agreement only.

Paper: "Unlocking Efficiency in Large Language Model Inference: A Comprehensive Survey of Speculative Decoding", Xia et
al., arXiv 2401.07851. Data: github.com/hemingkx/Spec-Bench (Apache-2.0; the questions are drawn from MT-bench, WMT14
DE-EN, CNN/DailyMail, Natural Questions, GSM8K and DPR, whose own terms apply).

    mtbench run --suite spec-bench                              # downloaded once from its authors, then cached
    mtbench run --suite spec-bench --offline --data-dir DIR     # DIR/spec_bench/question.jsonl

As in the original: greedy decoding, up to 1024 new tokens, and MT-bench's eight subjects are one kind. Unlike the
original: only the first turn, in the checkpoint's chat template (`--suite mt-bench` has MT-bench's second turns).
"""

from mtbench.evaluation.multi_turn import QuestionSuite
from mtbench.evaluation.registry import SUITES

SUBJECTS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@SUITES.register("spec-bench")
class SpecBench(QuestionSuite):
    max_new_tokens = 1024
    subtasks = ("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag")

    title = "Spec-Bench"
    files = ("spec_bench/question.jsonl",)
    origin = "data/spec_bench/question.jsonl of github.com/hemingkx/Spec-Bench"
    url = (
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
        "/data/spec_bench/question.jsonl"
    )
    sha256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"
    subtask_of = dict.fromkeys(SUBJECTS, "mt_bench")
    max_turns = 1

"""MT-Bench: 80 questions in eight categories, each with a second turn that follows the answer. Speed only.

Paper: "Judging LLM-as-a-Judge with MT-Bench and Chatbot Arena", Zheng et al., arXiv 2306.05685. Data:
github.com/lm-sys/FastChat (Apache-2.0).

    mtbench run --suite mt-bench                              # downloaded once from its authors, then cached
    mtbench run --suite mt-bench --offline --data-dir DIR     # DIR/mt_bench/question.jsonl

The original MT-Bench lets GPT-4 grade the answers. mtbench does not grade them: it measures speed, and acceptance by
category. The original samples at temperatures from 0 to 0.7 by category; mtbench decodes greedily by default, up to
MT-Bench's 1024 new tokens; `--temperature` changes that. A second turn follows the arm's own answer to the first turn,
so arms with different answers read different prompts there.
"""

from mtbench.evaluation.multi_turn import QuestionSuite
from mtbench.evaluation.registry import SUITES


@SUITES.register("mt-bench")
class MTBench(QuestionSuite):
    max_new_tokens = 1024
    subtasks = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")

    title = "MT-Bench"
    files = ("mt_bench/question.jsonl", "mt_bench/mt_bench__question.jsonl")
    origin = "fastchat/llm_judge/data/mt_bench/question.jsonl of github.com/lm-sys/FastChat"
    url = (
        "https://raw.githubusercontent.com/lm-sys/FastChat/0e6d3e4beaab66f4d3f93db72541a4abab8af28d"
        "/fastchat/llm_judge/data/mt_bench/question.jsonl"
    )
    sha256 = "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7"

"""SPEED-Bench: NVIDIA's prompts for speculative decoding, eleven categories of 80, or lengths from 1k to 32k tokens.

Paper: "SPEED-Bench", NVIDIA, arXiv 2604.09557. Data: huggingface.co/datasets/nvidia/SPEED-Bench, under the NVIDIA
Evaluation Dataset License; read it first. The published files hold placeholders: NVIDIA's own script assembles the
prompts from fifteen other data sets, each with its own terms. So mtbench neither ships nor downloads the data.
To make the files:

    git clone https://github.com/NVIDIA/Model-Optimizer && cd Model-Optimizer/examples/specdec_bench
    pip install -r requirements_speed.txt
    python prepare_data.py --config qualitative --output_dir DIR/speed_bench

    mtbench run --suite speed-bench --data-dir DIR                  # DIR/speed_bench/speed/qualitative/test.parquet
    mtbench run --suite speed-bench:throughput_8k --data-dir DIR    # DIR/speed_bench/speed/throughput_8k/test.parquet

As in the original, all turns of a question are used, with up to 4096 new tokens each. Layout, columns (question_id,
category, turns and more) and the placeholder are those of the script at 12d434e and of the data set's card. The
categories of the throughput splits (512 prompts for each length) are those in NVIDIA's aiperf. Tested only on made-up
rows with these columns, not on the real files.
"""

from typing import Any

from mtbench.errors import UserError, unknown
from mtbench.evaluation.multi_turn import Question, QuestionSuite
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source

CATEGORIES = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag"),
    *("reasoning", "roleplay", "stem", "summarization", "writing"),
)
ENTROPIES = ("low_entropy", "mixed", "high_entropy")
SPLITS = {"qualitative": CATEGORIES, **{f"throughput_{n}k": ENTROPIES for n in (1, 2, 8, 16, 32)}}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # start of a turn that the script has not assembled


@SUITES.register("speed-bench")
class SpeedBench(QuestionSuite):
    max_new_tokens = 4096
    subtasks = (*CATEGORIES, *ENTROPIES)

    title = "SPEED-Bench"

    def __init__(self, variant: str, source: Source) -> None:
        split = variant or "qualitative"
        if split not in SPLITS:
            raise unknown("split of speed-bench", split, SPLITS, "mtbench ls suites")
        for subtask in source.subtasks:
            if subtask not in SPLITS[split]:
                raise UserError(
                    f"--subtask {subtask!r} is not in speed-bench:{split}, which has {', '.join(SPLITS[split])}."
                )
        self.files = (f"speed_bench/speed/{split}/test.parquet",)
        self.origin = (
            f"made by `prepare_data.py --config {split} --output_dir DIR/speed_bench` in examples/specdec_bench of "
            "github.com/NVIDIA/Model-Optimizer"
        )
        self._categories = SPLITS[split]
        self._load(source)
        self.task = {**self.task, "split": split, "licence": "NVIDIA Evaluation Dataset License"}

    def _parse_question(self, row: Any) -> Question:
        question = super()._parse_question(row)
        if question.subtask not in self._categories:
            raise ValueError(f"category {question.subtask!r} is not in this split: {', '.join(self._categories)}")
        if any(turn.startswith(PLACEHOLDER) for turn in question.turns):
            raise ValueError(f"a placeholder; the file must be {self.origin}")
        return question

"""SPEED-Bench: NVIDIA's prompts for speculative decoding, eleven categories of 80, or lengths from 1k to 32k tokens.

Paper: "SPEED-Bench", NVIDIA, arXiv 2604.09557. Data: huggingface.co/datasets/nvidia/SPEED-Bench, under the NVIDIA
Evaluation Dataset License: read it first. What is published holds placeholders; NVIDIA's own script puts the prompts
together from fifteen other data sets with terms of their own. So nothing of it is shipped or fetched here. Make it:

    git clone https://github.com/NVIDIA/Model-Optimizer && cd Model-Optimizer/examples/specdec_bench
    pip install -r requirements_speed.txt
    python prepare_data.py --config qualitative --output_dir DIR/speed_bench

    mtbench run --suite speed-bench --data-dir DIR                  # DIR/speed_bench/speed/qualitative/test.parquet
    mtbench run --suite speed-bench:throughput_8k --data-dir DIR    # DIR/speed_bench/speed/throughput_8k/test.parquet

As there, all turns of a question are asked, up to 4096 new tokens each. Layout, columns (question_id, category, turns
and more) and the placeholder are those of the script at 12d434e and of the data set's card; the categories of the
throughput splits (512 prompts each per length) are those NVIDIA's aiperf names. No real file was at hand: tested on
made-up rows of these columns.
"""

from collections.abc import Iterator
from typing import Any

from mtbench.errors import UserError, first_line, unknown
from mtbench.evaluation.multi_turn import Question, QuestionSuite
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source

CATEGORIES = (
    *("coding", "humanities", "math", "multilingual", "qa", "rag"),
    *("reasoning", "roleplay", "stem", "summarization", "writing"),
)
ENTROPIES = ("low_entropy", "mixed", "high_entropy")
SPLITS = {"qualitative": CATEGORIES, **{f"throughput_{n}k": ENTROPIES for n in (1, 2, 8, 16, 32)}}
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # how a turn begins that the script has not put together


@SUITES.register("speed-bench")
class SpeedBench(QuestionSuite):
    max_new_tokens = 4096
    subtasks = (*CATEGORIES, *ENTROPIES)

    title = "SPEED-Bench"

    def __init__(self, rest: str, source: Source) -> None:
        split = rest or "qualitative"
        if split not in SPLITS:
            raise unknown("split of speed-bench", split, SPLITS, "mtbench ls suites")
        if strange := [name for name in source.subtasks if name not in SPLITS[split]]:
            raise UserError(
                f"--subtask {strange[0]!r} is none of speed-bench:{split}, which has {', '.join(SPLITS[split])}."
            )
        self.files = (f"speed_bench/speed/{split}/test.parquet",)
        self.origin = (
            f"made by `prepare_data.py --config {split} --output_dir DIR/speed_bench` in examples/specdec_bench of "
            "github.com/NVIDIA/Model-Optimizer"
        )
        self._split = SPLITS[split]
        self._read(source)
        self.task = {**self.task, "split": split, "licence": "NVIDIA Evaluation Dataset License"}

    def _rows(self) -> Iterator[tuple[str, Any]]:
        from pyarrow import ArrowException, BufferReader, parquet

        try:
            rows = parquet.read_table(BufferReader(self._data)).to_pylist()
        except (OSError, ArrowException) as error:
            raise UserError(f"suite {self.name!r}: {self.files[0]} cannot be read ({first_line(error)})") from None
        yield from ((f"row {number}", row) for number, row in enumerate(rows, start=1))

    def _question(self, where: str, entry: Any) -> Question:
        question = super()._question(where, entry)
        if question.subtask not in self._split:
            raise self._wrong(where, f"category {question.subtask!r} is none of the split's: {', '.join(self._split)}")
        if any(turn.startswith(PLACEHOLDER) for turn in question.turns):
            raise self._wrong(where, f"the script has not put it together: {self.origin}")
        return question

"""Alpaca: 500 of the 52,002 instructions that Alpaca was trained with. Speed and acceptance only.

Paper: "Stanford Alpaca", Taori et al., github.com/tatsu-lab/stanford_alpaca. Data: tatsu-lab/alpaca (CC BY-NC 4.0).
The 500 are those that DeepSpec draws, in its words (mtbench/evaluation/deepspec.py). Nothing is scored: AlpacaEval,
which is another set of questions, needs a judge.

    mtbench run --suite alpaca                              # downloaded once from DeepSpec, then cached
    mtbench run --suite alpaca --offline --data-dir DIR     # DIR/alpaca/alpaca.jsonl
"""

from collections.abc import Mapping
from typing import Any

from mtbench.evaluation import deepspec
from mtbench.evaluation.registry import SUITES


@SUITES.register("alpaca")
class Alpaca(deepspec.DrawnQuestions):
    title = "Alpaca"
    files = ("alpaca/alpaca.jsonl",)
    origin = "eval_datasets/alpaca.jsonl of github.com/deepseek-ai/DeepSpec, or rows of tatsu-lab/alpaca"
    url = deepspec.url("alpaca.jsonl")
    git_blob = "81f256ec4fb87bca3e7c88722592b4a6539b64e5"

    def wording(self, row: Mapping[str, Any]) -> str:
        instruction, given = row["instruction"], row["input"]
        return f"{instruction}\n\nInput:\n{given}" if given else instruction

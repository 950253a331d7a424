"""Reference answers of real data: every suite scores them 1, and other answers 0.

Needs MTBENCH_DATA_DIR, a folder with the real data (gsm8k/, bbh/, mmlu_pro/). These tests read the references from the
files themselves, so only the item id connects an item with its reference.
"""

import json
import os
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from made_up import chat
from pyarrow import parquet

from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Source, Suite

REAL = Path(os.environ.get("MTBENCH_DATA_DIR") or "/nowhere")
METRIC_AND_FILTER = {  # as in `task`
    "gsm8k": ("exact_match", "strict-match"),
    "gsm8k-paper": ("exact_match", "flexible-extract"),
    "bbh": ("exact_match", "get-answer"),
    "bbh-paper": ("exact_match", "get-answer"),
    "mmlu-pro": ("exact_match", "custom-extract"),
    "mmlu-pro-paper": ("exact_match", "custom-extract"),
}
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(not (REAL / "bbh").is_dir(), reason="MTBENCH_DATA_DIR names no folder with real data"),
]


@cache
def opened(name: str) -> Suite:
    suite: Suite = SUITES[name]("", Source(data_dir=REAL, offline=True))
    return suite


@cache
def references(kind: str) -> dict[str, list[str]]:
    """Return subtask -> reference answers in the order of the file."""
    if kind == "gsm8k":
        lines = (REAL / "gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
        return {"": [json.loads(line)["answer"] for line in lines]}
    if kind == "bbh":
        files = sorted((REAL / "bbh/bbh").glob("*.json"))
        rows = {file.stem: json.loads(file.read_text(encoding="utf-8"))["examples"] for file in files}
        return {subtask: [f"So the answer is {row['target']}." for row in rows[subtask]] for subtask in rows}
    answers: dict[str, list[str]] = {}
    file = REAL / "mmlu_pro/test-00000-of-00001.parquet"
    for row in parquet.read_table(file, columns=["category", "answer"]).to_pylist():
        answers.setdefault(row["category"].replace(" ", "_"), []).append(f"The answer is ({row['answer']}).")
    return answers


def reference_answers(suite: str, items: list[str]) -> dict[str, str]:
    """Return item -> its reference answer."""
    kind = suite.removesuffix("-paper")
    answers = {}
    for item in items:
        subtask, doc, _ = item.split("/")
        of_subtask = references(kind)["" if kind == "gsm8k" else subtask]
        answers[item] = of_subtask[int(doc)]
    return answers


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        *[(name, 3) for name in ("gsm8k", "gsm8k-paper", "bbh", "mmlu-pro")],
        *[pytest.param(name, None, marks=pytest.mark.slow) for name in METRIC_AND_FILTER],
    ],
)
def test_references_of_every_subtask_score_one(name: str, limit: int | None) -> None:
    """By the metric and filter that the result names; another answer scores 0."""
    suite = opened(name)
    items = [prompt.item for prompt in suite.prompts(chat, limit)]
    right = reference_answers(name, items)
    wrong = dict.fromkeys(items, "I do not know.")
    counted = Counter(item.split("/")[0] for item in items)

    assert set(counted) == set(suite.subtasks or (suite.task["name"],))
    assert limit or sorted(counted.values()) == sorted(map(len, references(name.removesuffix("-paper")).values()))
    assert (suite.task["metric"], suite.task["filter"]) == METRIC_AND_FILTER[name]
    assert set(suite.score(right).values()) == {1.0}
    assert set(suite.score(wrong).values()) == {0.0}

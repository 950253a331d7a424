"""Reference answers replayed through the suites: all are right, everything else is wrong.

Read where MTBENCH_DATA_DIR names a folder with the real data (gsm8k/, bbh/, mmlu_pro/). The references come straight
from the files, so that an item and its reference meet by the item's id alone.
"""

import json
import os
import time
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from pyarrow import parquet

from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Suite

REAL = Path(os.environ.get("MTBENCH_DATA_DIR") or "/nowhere")
COUNT = {"gsm8k": 1_319, "bbh": 6_511, "mmlu-pro": 12_032}
TIME_S = {"gsm8k": 20, "bbh": 60, "mmlu-pro": 60}  # for planning, and for scoring
READ = {  # metric and filter, as `task` names them
    "gsm8k": ("exact_match", "strict-match"),
    "gsm8k-paper": ("exact_match", "flexible-extract"),
    "bbh": ("exact_match", "get-answer"),
    "bbh-paper": ("exact_match", "get-answer"),
    "mmlu-pro": ("exact_match", "custom-extract"),
    "mmlu-pro-paper": ("exact_match", "custom-extract"),
}
HANDFUL = 3  # of each subtask

pytestmark = pytest.mark.skipif(not (REAL / "bbh").is_dir(), reason="MTBENCH_DATA_DIR names no folder with real data")


def chat(messages: Messages) -> str:
    return "".join(f"<{turn['role']}>{turn['content']}</>" for turn in messages) + "<assistant>"


@cache
def opened(name: str) -> Suite:
    suite: Suite = SUITES[name]("", Source(data_dir=REAL, offline=True))
    return suite


@cache
def references(kind: str) -> dict[str, list[str]]:
    """Subtask -> its right answers, in the order of the file."""
    if kind == "gsm8k":
        lines = (REAL / "gsm8k/test.jsonl").read_text(encoding="utf-8").splitlines()
        return {"": [json.loads(line)["answer"] for line in lines]}
    if kind == "bbh":
        files = sorted((REAL / "bbh/bbh").glob("*.json"))
        rows = {file.stem: json.loads(file.read_text(encoding="utf-8"))["examples"] for file in files}
        return {subtask: [f"So the answer is {row['target']}." for row in rows[subtask]] for subtask in rows}
    found: dict[str, list[str]] = {}
    for row in parquet.read_table(REAL / "mmlu_pro/test-00000-of-00001.parquet").to_pylist():
        found.setdefault(row["category"].replace(" ", "_"), []).append(f"The answer is ({row['answer']}).")
    return found


def replies(suite: str, items: list[str], ahead: int = 0) -> dict[str, str]:
    """item -> its right answer, or that of the question so many ahead."""
    kind = suite.removesuffix("-paper")
    answers = {}
    for item in items:
        subtask, doc, _ = item.split("/")
        of_subtask = references(kind)["" if kind == "gsm8k" else subtask]
        answers[item] = of_subtask[(int(doc) + ahead) % len(of_subtask)]
    return answers


@pytest.mark.parametrize("name", ["gsm8k", "gsm8k-paper", "bbh", "mmlu-pro"])
def test_some_references_of_every_subtask_are_right(name: str) -> None:
    """Each question's own reference scores 1 by the metric and filter that the result names; any other answer 0."""
    suite = opened(name)
    items = [prompt.item for prompt in suite.prompts(chat, HANDFUL)]
    right = replies(name, items)
    another = {item: text for item, text in replies(name, items, ahead=1).items() if text != right[item]}

    assert {item.split("/")[0] for item in items} == set(suite.subtasks or (suite.task["name"],))
    assert (suite.task["metric"], suite.task["filter"]) == READ[name]
    assert set(suite.score(right).values()) == {1.0}
    assert set(suite.score(another).values()) == {0.0}
    assert set(suite.score(dict.fromkeys(items, "")).values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ)
def test_all_references_are_right(name: str) -> None:
    """Every question of every subtask, planned and scored within the time that is promised on two cores."""
    kind = name.removesuffix("-paper")
    opened.cache_clear()
    began = time.perf_counter()
    suite = opened(name)
    items = [prompt.item for prompt in suite.prompts(chat, None)]
    planned = time.perf_counter()
    scores = suite.score(replies(name, items))
    scored = time.perf_counter()

    assert len(scores) == COUNT[kind]
    assert set(scores.values()) == {1.0}
    if suite.subtasks:
        counted = Counter(item.split("/")[0] for item in scores)
        assert counted == {subtask: len(answers) for subtask, answers in references(kind).items()}
    assert set(suite.score(dict.fromkeys(items, "I do not know.")).values()) == {0.0}
    assert planned - began < TIME_S[kind]
    assert scored - planned < TIME_S[kind]

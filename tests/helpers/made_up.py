"""Made-up data for every suite that reads files, with the real columns and paths; right answers; a chat template."""

import gzip
import importlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import parquet

from mtbench.evaluation.suite import Messages, Prompt

bfcl: Any = importlib.import_module("mtbench.suites.bfcl")
bbh: Any = importlib.import_module("mtbench.suites.bbh")
mmlu_pro: Any = importlib.import_module("mtbench.suites.mmlu_pro")
speed_bench: Any = importlib.import_module("mtbench.suites.speed_bench")
spec_bench: Any = importlib.import_module("mtbench.suites.spec_bench")
mt_bench: Any = importlib.import_module("mtbench.suites.mt_bench")

COUNT = 12  # of each subtask
FUNCTION = [{"name": "add", "parameters": {"type": "dict", "properties": {"x": {"type": "integer"}}}}]
Rows = list[dict[str, Any]]


def chat(messages: Messages, *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Render a conversation with a minimal chat template."""
    return "".join(f"<{turn['role']}>{turn['content']}</>" for turn in messages) + "<assistant>"


GSM8K: Rows = [
    {"question": f"Ann has {n} pens and buys {n}. How many?", "answer": f"She has {n} + {n}.\n#### {2 * n}"}
    for n in range(1, COUNT + 1)
]
BBH: Rows = [{"input": f"not {n % 2 == 0} is", "target": str(n % 2 == 1)} for n in range(COUNT)]
IFEVAL: Rows = [
    {
        "key": n,
        "prompt": f"Tell me of {n} cats, without commas.",
        "instruction_id_list": ["punctuation:no_comma"],
        "kwargs": [{}],
    }
    for n in range(COUNT)
]
HUMANEVAL: Rows = [
    {
        "task_id": f"HumanEval/{n}",
        "prompt": f'def add{n}(x: int) -> int:\n    """Add {n} to x."""\n',
        "entry_point": f"add{n}",
        "canonical_solution": f"    return x + {n}\n",
        "test": f"def check(candidate):\n    assert candidate(1) == {n + 1}\n",
    }
    for n in range(COUNT)
]
MATH500: Rows = [
    {
        "problem": f"What is half of ${2 * n}$?",
        "solution": f"Half of ${2 * n}$ is $\\boxed{{{n}}}.$",
        "answer": f"{n}",
    }
    for n in range(COUNT)
]
AIME25: Rows = [{"answer": n, "problem": f"Find ${n}$."} for n in range(COUNT)]
MBPP: Rows = [
    {
        "task_id": n,
        **dict.fromkeys(("text", "prompt"), f"Write a function to add {n}."),  # of the full and the sanitized data
        "code": f"def add(x):\n    return x + {n}",
        "test_list": [f"assert add({k}) == {n + k}" for k in range(3)],
    }
    for n in range(COUNT)
]
LIVECODEBENCH: Rows = [
    {"question_content": f"Print {n}.", "starter_code": "class Solution:" if n % 2 else "", "question_id": f"{n}_A"}
    for n in range(COUNT)
]
ALPACA: Rows = [
    {"instruction": f"Name {n} cats.", "input": "Tom" if n % 2 else "", "output": "Tom"} for n in range(COUNT)
]
ARENA_HARD: Rows = [{"uid": f"{n:x}", "category": "hard_prompt", "prompt": f"Write {n} tests."} for n in range(COUNT)]


def gpqa() -> Rows:
    """Return rows with lm-eval's columns and one more. Every answer is a number, which must be read as text."""
    rows = []
    for n in range(COUNT):
        wrong = {f"Incorrect Answer {k}": f"{n * 10 + k}" for k in (1, 2, 3)}
        rows.append(
            {"Question": f"What, then, is {n} times ten?", "Correct Answer": f"{n * 10}", **wrong, "Writer": "me"}
        )
    return rows


def mmlu_rows(count: int, validation: bool = False) -> Rows:
    """Return `count` questions of each subject, the subjects interleaved."""
    return [
        {
            "question_id": n * 100 + k,
            "question": f"Which is {n}, asks {subject}?",
            "options": [f"{n + k}" for k in range(4)],
            "answer": "A",
            "cot_content": f"A: Let's think step by step. {n} is {n}. The answer is (A)." if validation else "",
            "category": subject.replace("_", " "),
        }
        for n in range(count)
        for k, subject in enumerate(mmlu_pro.SUBJECTS)
    ]


def questions(categories: Sequence[str], turns: int) -> Rows:
    texts = [f"Why {n}?" for n in range(turns)]
    return [{"question_id": f"{c}-{n}", "category": c, "turns": texts} for n in range(COUNT) for c in categories]


def write_lines(path: Path, rows: Sequence[Any]) -> Path:
    """Write JSON lines, packed if the name ends with .gz; a row that is a text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def write_csv(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [",".join(f'"{cell}"' for cell in cells) for cells in ([*rows[0]], *([*row.values()] for row in rows))]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_parquet(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def write_all(folder: Path) -> Path:
    """Write a folder for `--data-dir` with the data of all suites; mine.jsonl is for the suite `prompts`."""
    write_lines(folder / "mine.jsonl", [{"prompt": f"Why {n}?"} for n in range(COUNT)])
    write_lines(folder / "gsm8k/train.jsonl", GSM8K[:8])
    write_lines(folder / "gsm8k/test.jsonl.gz", GSM8K)
    for kind in bbh.KINDS:
        path = folder / f"bbh/bbh/{kind}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"canary": "none", "examples": BBH}))
    for split, rows in (("test", mmlu_rows(COUNT)), ("validation", mmlu_rows(5, validation=True))):
        write_parquet(folder / f"mmlu_pro/{split}-00000-of-00001.parquet", rows)
    write_lines(folder / "ifeval/input_data.jsonl", IFEVAL)
    for subset in ("diamond", "main", "extended"):
        write_csv(folder / f"gpqa/gpqa_{subset}.csv", gpqa())
    write_lines(folder / "humaneval/HumanEval.jsonl", HUMANEVAL)
    write_lines(folder / "math500/test.jsonl", MATH500)
    write_lines(folder / "aime25/train.jsonl", AIME25)
    write_lines(folder / "mbpp/mbpp.jsonl", MBPP)
    write_lines(folder / "mbpp/test.jsonl", MBPP)
    write_lines(folder / "livecodebench/livecodebench.jsonl", LIVECODEBENCH)
    write_lines(folder / "alpaca/alpaca.jsonl", ALPACA)
    write_lines(folder / "arena_hard/question.jsonl", ARENA_HARD)
    write_lines(folder / "spec_bench/question.jsonl", questions(["stem", "writing", "qa", "rag"], 1))
    write_lines(folder / "mt_bench/question.jsonl", questions(mt_bench.MTBench.subtasks, 2))
    for task in bfcl.Bfcl.subtasks:
        rows = [{"id": f"{task}_{n}", "function": FUNCTION, "question": [[{"role": "user", "content": f"{n} + 1?"}]]}
                for n in range(COUNT)]  # fmt: skip
        write_lines(folder / f"bfcl/BFCL_v4_{task}.json", rows)
        expected = [{"id": row["id"], "ground_truth": [{"add": {"x": [n]}}]} for n, row in enumerate(rows)]
        write_lines(folder / f"bfcl/possible_answer/BFCL_v4_{task}.json", expected)
    write_parquet(folder / "speed_bench/speed/qualitative/test.parquet", questions(speed_bench.CATEGORIES, 2))
    return folder


# --- Right answers ------------------------------------------------------------------------------------------------


def _gpqa_answer(prompt: Prompt, doc: int) -> str:
    """Return an answer with the letter of the right choice in this prompt."""
    found = re.search(rf"\(([A-D])\) {doc * 10}\n", prompt.text)
    assert found
    return f"So it is ({found[1]})."


RIGHT: Mapping[str, Callable[[Prompt, int], str]] = {
    "gsm8k": lambda prompt, doc: GSM8K[doc]["answer"],
    "bbh": lambda prompt, doc: f"So the answer is {BBH[doc]['target']}.",
    "mmlu-pro": lambda prompt, doc: "The answer is (A).",
    "ifeval": lambda prompt, doc: "Cats are kind",
    "gpqa": _gpqa_answer,
    "gsm8k-deepspec": lambda prompt, doc: f"She has $\\boxed{{{2 * doc + 2}}}$ pens.",
    "math500": lambda prompt, doc: f"As $2 x = {2 * doc}$, $x$ is $\\boxed{{{doc}}}$.",
    "aime25": lambda prompt, doc: f"It is $x$, so $\\boxed{{{doc}}}$.",
}
WRONG = "Well, no"  # a wrong answer in every suite


def right(suite: str, prompts: Sequence[Prompt]) -> dict[str, str]:
    """Return item -> a right answer."""
    answer = RIGHT[suite.removesuffix("-paper")]
    return {prompt.item: answer(prompt, int(prompt.item.split("/")[1])) for prompt in prompts}


def answerable(suites: Sequence[str]) -> Iterator[str]:
    """Yield those of the suites that have right answers here."""
    return (name for name in suites if name.removesuffix("-paper") in RIGHT)

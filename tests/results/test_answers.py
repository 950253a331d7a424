"""Files of answers: what is read and refused, and the lines of jq in docs/audit.md that make them."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tool_files import RECORDED

from mtbench.errors import UserError
from mtbench.results.answers import read_answers

DOCUMENT = Path(__file__).parents[2] / "docs" / "audit.md"
CHAT = [{"role": "user", "content": "p"}]


def test_a_file_of_answers(tmp_path: Path) -> None:
    """Texts or tokens; a line without an answer is a request that failed."""
    file = tmp_path / "answers.jsonl"
    lines = [{"prompt": CHAT, "output": "5", "finish_reason": "end"}, {"prompt_ids": [1], "output": ""}, {}]
    file.write_text("\ufeff" + "".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    first, second, third = read_answers(file)
    assert (first.prompt, first.output, first.finish_reason) == (CHAT, "5", "end")
    assert (second.prompt_ids, second.output, second.failed) == ([1], "", False)
    assert third.failed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; a line has `prompt` or"),
        ('{"output": "5"}\n{"outp', "line 2: not JSON"),
        ('{"outputs": "5"}', "line 1: outputs is not known"),
        ('{"token_ids": [1]}\n{"output": "5"}', "some answers have token_ids"),
    ],
)
def test_what_is_no_file_of_answers_is_refused_in_a_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text(text)
    with pytest.raises(UserError, match=message) as raised:
        read_answers(tmp_path / "answers.jsonl")
    assert "\n" not in str(raised.value)


PARTS = [{"role": "user", "content": [{"type": "text", "text": "p"}]}]
ASKED = {"request_args": json.dumps({"body": {"messages": PARTS}}), "output": "5"}
COMPLETED = {"request_args": json.dumps({"body": {"prompt": "p"}}), "output": "6"}
RESULTS: dict[str, tuple[str, list[tuple[Any, str | None]]]] = {  # what a tool writes, and the answers in it
    "vllm.json": (json.dumps({"generated_texts": ["5", ""], "errors": ["", "503"]}), [(None, "5"), (None, None)]),
    "sglang.jsonl": (json.dumps({"generated_texts": ["5", "6"]}), [(None, "5"), (None, "6")]),
    "guidellm.json": (
        json.dumps({"benchmarks": [{"requests": {"successful": [ASKED, COMPLETED]}}]}),
        [(CHAT, "5"), ("p", "6")],
    ),
    "aiperf.jsonl": (
        (RECORDED / "aiperf.profile_export_raw.jsonl").read_text(),
        [(None, None)] * 4
        + [
            (None, "Well, she has 325 cards. First, from dropping some which makes 325-72"),
            (None, "Right, he has 163 stamps. First, by selling some this makes 163-74"),
        ],
    ),
    "lm_eval.jsonl": (
        json.dumps({"arguments": {"gen_args_0": {"arg_0": "p", "arg_1": {}}}, "resps": [["5"]]}),
        [("p", "5")],
    ),
}


@pytest.mark.skipif(shutil.which("jq") is None, reason="needs jq")
@pytest.mark.parametrize("name", RESULTS)
def test_a_line_of_jq_makes_the_file_of_another_tools_results(name: str, tmp_path: Path) -> None:
    """As docs/audit.md has it."""
    written, answers = RESULTS[name]
    (tmp_path / name).write_text(written)
    [line] = re.findall(rf"^jq .* {name}$", DOCUMENT.read_text(), re.MULTILINE)
    made = subprocess.run(line, shell=True, cwd=tmp_path, check=True, capture_output=True, text=True)
    (tmp_path / "made.jsonl").write_text(made.stdout)
    assert [(answer.prompt, answer.output) for answer in read_answers(tmp_path / "made.jsonl")] == answers

"""A teacher's answers as data: what it would say, and nothing it was cut off at."""

import json
from pathlib import Path

import pytest

from mtbench.errors import UserError
from mtbench.models.families import family
from mtbench.training.conversations import read_conversations
from mtbench.training.distillation_data import write_answers


def test_a_draft_can_learn_from_what_its_target_says(tmp_path: Path) -> None:
    """The prompts stay, the last turn is the teacher's own and mostly right; an answer cut short is left out."""
    conversations = list(read_conversations("arithmetic", 12, 7))
    out = tmp_path / "said.jsonl"
    teacher = family("tiny").checkpoint("ar")
    assert write_answers(teacher, conversations, tmp_path / "short.jsonl", max_new_tokens=1) == (0, 12)
    assert (tmp_path / "short.jsonl").read_text() == ""
    written, left_out = write_answers(teacher, conversations, out, max_new_tokens=160)
    rows = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert len(rows) == written == 12 - left_out > 0
    asked = [turns[0] for turns in conversations]
    assert [row[0] for row in rows] == [turn for turn in asked if turn in [row[0] for row in rows]]
    assert all(row[-1]["role"] == "assistant" and "The answer is" in row[-1]["content"] for row in rows)
    assert list(read_conversations(str(out), None, 0)) == rows
    with pytest.raises(UserError, match="exists already"):
        write_answers(teacher, conversations, out, max_new_tokens=160)
    assert {path.name for path in tmp_path.iterdir()} == {out.name, "short.jsonl"}

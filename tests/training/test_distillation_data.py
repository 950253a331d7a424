"""A teacher's answers as training data."""

import json
from pathlib import Path

import pytest

from mtbench.errors import UserError
from mtbench.models.families import family
from mtbench.training.conversations import read_conversations
from mtbench.training.distillation_data import write_answers


def test_a_teachers_answers_become_training_data(tmp_path: Path) -> None:
    """Prompts are unchanged, the last turn is the teacher's; an answer that reached the budget is left out."""
    conversations = list(read_conversations("arithmetic", 12, 7))
    out = tmp_path / "answers.jsonl"
    teacher = family("tiny").checkpoint("ar")
    assert write_answers(teacher, conversations, tmp_path / "short.jsonl", max_new_tokens=1) == (0, 12)
    assert (tmp_path / "short.jsonl").read_text() == ""
    written, left_out = write_answers(teacher, conversations, out, max_new_tokens=160)
    rows = [json.loads(line)["messages"] for line in out.read_text().splitlines()]
    assert len(rows) == written == 12 - left_out > 0
    questions = [turns[0] for turns in conversations]
    answered = [row[0] for row in rows]
    assert answered == [question for question in questions if question in answered]
    assert all(row[-1]["role"] == "assistant" and "The answer is" in row[-1]["content"] for row in rows)
    assert list(read_conversations(str(out), None, 0)) == rows
    with pytest.raises(UserError, match="exists already"):
        write_answers(teacher, conversations, out, max_new_tokens=160)
    assert {path.name for path in tmp_path.iterdir()} == {out.name, "short.jsonl"}

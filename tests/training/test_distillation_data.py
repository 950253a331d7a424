"""A teacher's answers as training data."""

import json
from pathlib import Path
from typing import Any

import pytest

from mtbench.decoding.loop import decode
from mtbench.errors import UserError
from mtbench.models.families import family
from mtbench.models.loading import load
from mtbench.training import distillation_data
from mtbench.training.conversations import prepare, read_conversations
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
    with pytest.raises(UserError, match="exists and is never overwritten"):
        write_answers(teacher, conversations, out, max_new_tokens=160)
    assert {path.name for path in tmp_path.iterdir()} == {out.name, "short.jsonl"}


@pytest.mark.parametrize("torn", ["", '{"messages": [{"ro'])
def test_interrupted_answers_are_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: str) -> None:
    """What is answered is kept, a torn line is not; the result is that of an undisturbed call."""
    monkeypatch.setattr(distillation_data, "CHUNK", 4)
    conversations = list(read_conversations("arithmetic", 10, 7))
    teacher, out = family("tiny").checkpoint("ar"), tmp_path / "answers.jsonl"
    counts = write_answers(teacher, conversations, tmp_path / "undisturbed.jsonl", max_new_tokens=100)
    calls = iter(range(10))

    def dies(*arguments: Any, **options: Any) -> Any:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return decode(*arguments, **options)

    monkeypatch.setattr(distillation_data, "decode", dies)
    with pytest.raises(KeyboardInterrupt):
        write_answers(teacher, conversations, out, max_new_tokens=100)
    partial = tmp_path / "answers.jsonl.partial"
    with partial.open("a") as file:
        file.write(torn)
    for other in ({"max_new_tokens": 99}, {"conversations": conversations[1:]}):
        request: dict[str, Any] = {"conversations": conversations, "max_new_tokens": 100} | other
        with pytest.raises(UserError, match="holds answers to another request; repeat its command, or remove it"):
            write_answers(teacher, request.pop("conversations"), out, **request)
    assert write_answers(teacher, conversations, out, max_new_tokens=100) == counts
    assert next(calls) == 4  # the first batch was not decoded again
    assert out.read_text() == (tmp_path / "undisturbed.jsonl").read_text()
    assert not partial.exists()


def test_answers_end_when_their_minutes_are_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the answers so far: those of the batch that was at work."""
    monkeypatch.setattr(distillation_data, "CHUNK", 4)
    conversations = list(read_conversations("arithmetic", 10, 7))
    teacher, out = family("tiny").checkpoint("ar"), tmp_path / "answers.jsonl"
    assert write_answers(teacher, conversations, out, max_new_tokens=160, minutes=1e-9)[0] <= 4
    asked = [json.loads(line)["messages"][0] for line in out.read_text().splitlines()]
    assert [turns[0] for turns in conversations[:4] if turns[0] in asked] == asked != []
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_cut_answers_are_kept_and_end_nothing(tmp_path: Path) -> None:
    """A training learns the teacher's first tokens, and no end after them; whole answers keep their end."""
    conversations = list(read_conversations("arithmetic", 12, 7))
    out, teacher = tmp_path / "answers.jsonl", family("tiny").checkpoint("ar")
    written, cut = write_answers(teacher, conversations, out, max_new_tokens=60, keep_cut=True)
    assert (written, 0 < cut < 12) == (12, True)
    checkpoint = load(teacher)
    data = prepare(str(out), None, checkpoint.tokenizer, max_length=512, seed=0)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["messages"][0] for row in rows] == [turns[0] for turns in conversations]
    for row, (ids, prompt) in zip(rows, data.examples, strict=True):
        answer = checkpoint.tokenizer.decode(ids[prompt:])
        assert answer == row["messages"][-1]["content"].strip() + ("" if row.get("cut") else "<|im_end|>\n")
        assert not row.get("cut") or len(ids) - prompt <= 60
    assert sum(row.get("cut", False) for row in rows) == cut

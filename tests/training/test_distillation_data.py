"""A teacher's answers as training data."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mtbench.decoding.engines import ENGINES
from mtbench.decoding.loop import decode
from mtbench.decoding.method import ModelRunners
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.models.families import TINY, family
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
    other_variables = {"options": {"enable_thinking": False}}
    for other in ({"max_new_tokens": 99}, {"conversations": conversations[1:]}, other_variables):
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
        assert answer == row["messages"][-1]["content"] + ("" if row.get("cut") else "<|im_end|>")
        assert not row.get("cut") or len(ids) - prompt <= 60
    assert sum(row.get("cut", False) for row in rows) == cut


THINKS = (  # the prompt opens a block; without the variable it stays open
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ 'Okay, ' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def marking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded `ar`, in whose answers ' The' is the special token [/THINK]; its template trims answers."""
    folder = tmp_path_factory.mktemp("marking") / "ar"
    shutil.copytree(TINY / "ar", folder)
    (folder / "chat_template.jinja").write_text(THINKS)
    data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, mark = data["model"], {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    number = model["vocab"].pop("\u0120The")
    model["vocab"]["[/THINK]"] = number
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    model["merges"] = [pair for pair in pairs if "\u0120The" not in (*pair, "".join(pair))]
    data["added_tokens"].append({"id": number, "content": "[/THINK]", "special": True, **mark})
    data["added_tokens"].sort(key=lambda entry: entry["id"])
    (folder / "tokenizer.json").write_text(json.dumps(data), encoding="utf-8")
    return folder


@pytest.mark.parametrize(("tokens", "variables"), [(160, {}), (60, {}), (160, {"enable_thinking": False})])
def test_a_training_learns_what_the_teacher_emitted(
    marking: Path, tmp_path: Path, tokens: int, variables: dict[str, bool]
) -> None:
    """Behind the prompt that it read: special tokens, too, words as it spelled them, and cut answers to their end."""
    conversations = list(read_conversations("arithmetic", 8, 7))
    out, teacher = tmp_path / "answers.jsonl", load(str(marking))
    write_answers(str(marking), conversations, out, max_new_tokens=tokens, keep_cut=True, options=variables)
    data = prepare(str(out), None, teacher.tokenizer, max_length=512, seed=0, options=variables)
    assert data.summary == "8 conversations: 0 dropped, 0 cut"
    engine = ENGINES["graph"]()
    runners = ModelRunners("teacher", {"teacher": engine.runner(teacher)})
    requests = [Request(prompt_ids=ids[:prompt].tolist(), max_new_tokens=tokens) for ids, prompt in data.examples]
    emitted, _ = decode(METHODS["ar"](), runners, requests, rows=8, make=engine.batch)
    assert [ids[prompt:].tolist() for ids, prompt in data.examples] == [answer.token_ids for answer in emitted]
    assert all(("Okay, " in teacher.tokenizer.decode(ids[:prompt])) == bool(variables) for ids, prompt in data.examples)
    answers = [json.loads(line)["messages"][-1]["content"] for line in out.read_text().splitlines()]
    assert any("[/THINK] answer is" in answer for answer in answers)
    assert {answer.finish_reason for answer in emitted} == ({"end"} if tokens == 160 else {"end", "length"})
    if variables:
        with pytest.raises(UserError, match=r"template variables enable_thinking=false, not with none; give the same"):
            prepare(str(out), None, teacher.tokenizer, max_length=512, seed=0)


def test_a_variable_that_the_teachers_template_does_not_read_is_refused(marking: Path, tmp_path: Path) -> None:
    """Before anything is decoded."""
    conversations = list(read_conversations("arithmetic", 1, 7))
    with pytest.raises(UserError, match="--chat-template-kwargs 'thinking': the chat template does not read it"):
        write_answers(str(marking), conversations, tmp_path / "a", max_new_tokens=8, options={"thinking": False})

"""Which tokens of an answer are thinking, by the marks that the plan found in the tokenizer."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mtbench.lineup.planner import make_plan
from mtbench.models.families import TINY
from mtbench.models.thinking import Thinking
from mtbench.plan.plan import RunRequest

OPEN, CLOSE = 8, 9
ONE, OPENED = (Thinking(opening=[OPEN], closing=[CLOSE], opened=opened) for opened in (False, True))
LONG = Thinking(opening=[1, 2, 3], closing=[1, 4], opened=False)
VOCABULARY = {"<think>": OPEN, "</think>": CLOSE, "a": 0}
HARMONY = {"<|channel|>": 1, "analysis": 2, "<|message|>": 3, "<|end|>": 4, "final": 5, "<|start|>": 6}


@pytest.mark.parametrize(
    ("marks", "answer", "thought"),
    [
        (ONE, [OPEN, CLOSE, 0, CLOSE, 0], [0]),  # closed twice
        (OPENED, [0, OPEN, 0], [0, 1, 2]),  # never closed
        (LONG, [1, 2, 3, 0, 1, 0, 1, 4, 0, 1, 2, 0], [0, 1, 2, 3, 4, 5]),
        (LONG, [1, 2], []),
    ],
)
def test_the_thinking_of_an_answer_is_between_its_marks(marks: Thinking, answer: list[int], thought: list[int]) -> None:
    """The opening tokens belong to it, the closing ones do not."""
    assert sorted(marks.places(answer)) == thought


@given(st.booleans(), st.lists(st.sampled_from([0, 1, OPEN, CLOSE]), max_size=12))
def test_the_thinking_is_that_of_the_text(opened: bool, answer: list[int]) -> None:
    """As a reader of the marks would say: a token is thinking if the last mark up to it opens."""
    marks = [(place, token) for place, token in enumerate(answer) if token in (OPEN, CLOSE)]
    expected = set()
    for place in range(len(answer)):
        last = [token for at, token in marks if at <= place][-1:]
        if last == [OPEN] or (not last and opened):
            expected.add(place)
    assert Thinking(opening=[OPEN], closing=[CLOSE], opened=opened).places(answer) == expected


@pytest.mark.parametrize(
    ("prompts", "opened"),
    [
        ([[0, OPEN, 0], [OPEN]], True),  # DeepSeek-R1's template
        ([[0, OPEN, 0, CLOSE, 0]], False),  # Qwen3's without thinking
        ([[0, OPEN], [0, 0]], False),
        ([[OPEN, *[0] * 20]], False),  # a user wrote it
    ],
)
def test_the_template_may_open_the_thinking(prompts: list[list[int]], opened: bool) -> None:
    """At the end of every prompt; what stands earlier in a prompt is no answer's."""
    found = Thinking.find(VOCABULARY, prompts)
    assert found == Thinking(opening=[OPEN], closing=[CLOSE], opened=opened)


def test_marks_of_several_tokens_and_of_none() -> None:
    """GPT-OSS marks a channel by three tokens; a half of a mark is none."""
    found = Thinking.find(HARMONY, [[6, 0]])
    assert found is not None
    answer = [1, 2, 3, 0, 4, 6, 0, 1, 5, 3, 0]
    assert found.places(answer) == {*range(7)}
    assert found.reasoning(answer) == 10
    assert Thinking.find({"<think>": 1, "<|channel|>": 2}, [[1]]) is None


def test_the_plan_holds_the_marks_of_the_checkpoint(tmp_path: Path) -> None:
    """From its tokenizer, with what its template writes; a tokenizer without marks has null."""
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1 + 1"}\n')
    request = RunRequest(suite=(f"prompts:{tmp_path}/mine.jsonl",), family="tiny", method=("ar",), max_new_tokens=4)
    assert make_plan(request).suites[0].thinking is None

    folder = Path(shutil.copytree(TINY / "ar", tmp_path / "model"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = "{{ messages[0].content }}<think>\n"
    tokenizer.save_pretrained(folder)
    found = make_plan(request.changed(family=None, model=str(folder))).suites[0].thinking
    assert found == Thinking(opening=[502], closing=[503], opened=True)

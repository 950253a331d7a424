"""DeepSpec's evaluation sets: which questions are drawn, in which words, and how answers are scored.

The questions are made up, in the columns of the data sets. The draws and words were compared with the evaluator's own
files, question by question.
"""

import random
from functools import cache
from pathlib import Path

import pytest
from made_up import ALPACA, ARENA_HARD, HUMANEVAL, LIVECODEBENCH, MBPP, chat, write_all, write_lines

from mtbench.errors import UserError
from mtbench.evaluation.deepspec import draw
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Suite

NAMES = (
    *("gsm8k-deepspec", "math500", "aime25", "humaneval-deepspec", "mbpp-deepspec"),
    *("livecodebench", "mt-bench-deepspec", "alpaca", "arena-hard"),
)
DRAWN = {  # suite -> file, rows, questions drawn
    "mbpp-deepspec": ("mbpp/mbpp.jsonl", MBPP, 256),
    "livecodebench": ("livecodebench/livecodebench.jsonl", LIVECODEBENCH, 500),
    "alpaca": ("alpaca/alpaca.jsonl", ALPACA, 500),
    "arena-hard": ("arena_hard/question.jsonl", ARENA_HARD, 500),
}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def plain(messages: Messages) -> str:
    """The template of a chat of one user turn, without marks."""
    ((role, content),) = ((turn["role"], turn["content"]) for turn in messages)
    assert role == "user"
    return str(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("data"))


@cache
def opened(name: str, folder: Path) -> Suite:
    suite: Suite = SUITES[name]("", Source(data_dir=folder, offline=True, unsandboxed=True))
    return suite


def texts(suite: Suite, limit: int | None = None) -> list[str]:
    return [prompt.text for prompt in suite.prompts(plain, limit)]


def test_the_draw_is_that_of_the_evaluator() -> None:
    """It shuffles the rows by its seed and takes the first; where there are not more it takes all, in file order."""
    rows = [f"row {n}" for n in range(1319)]
    random.Random(980406).shuffle(rows)

    assert [f"row {n}" for n in draw(1319, 500)] == rows[:500]
    assert draw(500, 500) == list(range(500))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("gsm8k-deepspec", f"Ann has 1 pens and buys 1. How many?{BOXED}", None),
        ("math500", f"What is half of $0$?{BOXED}", None),
        ("aime25", f"Find $0$.{BOXED}", None),
        (
            "humaneval-deepspec",
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            f"```python\n{HUMANEVAL[0]['prompt']}\n```",
            None,
        ),
        ("mbpp-deepspec", "Write a function to add 0.", None),
        (
            "livecodebench",
            "You are an expert Python programmer. You will be given a question (problem specification) and will "
            "generate a correct Python program that matches the specification and passes all tests. You will NOT "
            "return anything except for the program\n\n### Question:\nPrint 0.\n\n### Format: Write your code in the "
            "following format:\n```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided format with "
            "backticks)",
            "### Format: Use the following code structure:\n```python\nclass Solution:\n```\n\n### Answer:",
        ),
        ("mt-bench-deepspec", "Why 0?", None),
        ("alpaca", "Name 0 cats.", "Name 1 cats.\n\nInput:\nTom"),
        ("arena-hard", "Write 0 tests.", None),
    ],
)
def test_questions_are_asked_in_the_papers_words(name: str, first: str, second: str | None, folder: Path) -> None:
    """Exactly; as one user turn, up to 2048 tokens, without stop strings and without a part of the answer."""
    suite = opened(name, folder)
    prompts = suite.prompts(plain, 2)

    assert prompts[0].text == first
    assert second is None or second in prompts[1].text
    assert {prompt.stop for prompt in prompts} == {()}
    assert {prompt.follows for prompt in prompts} == {None}
    assert suite.max_new_tokens == 2048


@pytest.mark.parametrize("name", DRAWN)
def test_the_published_questions_are_drawn(name: str, tmp_path: Path) -> None:
    """From DeepSpec's own file, too; a limit takes the first of the draw, and ids are rows of the file."""
    file, _, count = DRAWN[name]
    write_lines(tmp_path / file, [{"turns": [f"Why {n}?", "And now?"]} for n in range(count + 9)])
    suite = opened(name, tmp_path)
    order = draw(count + 9, count)

    assert texts(suite) == [f"Why {n}?" for n in order]
    assert [prompt.item for prompt in suite.prompts(plain, 3)] == [f"{name}/{n}/0" for n in order[:3]]
    assert suite.task["drawn_from"] == count + 9


def test_gsm8k_draws_500_and_scores_each_by_its_own_answer(tmp_path: Path) -> None:
    """A limit takes the first of the draw, not of the file."""
    write_lines(tmp_path / "gsm8k/test.jsonl", [{"question": f"{n}?", "answer": f"#### {n}"} for n in range(510)])
    suite = opened("gsm8k-deepspec", tmp_path)
    order = draw(510, 500)
    prompts = suite.prompts(plain, None)

    assert [prompt.text for prompt in prompts] == [f"{n}?{BOXED}" for n in order]
    assert suite.prompts(plain, 7) == prompts[:7]
    answers = {prompt.item: f"so $\\boxed{{{n}}}$" for prompt, n in zip(prompts[:9], order, strict=False)}
    assert set(suite.score(answers).values()) == {1.0}
    assert set(suite.score(dict.fromkeys(answers, "so $\\boxed{511}$")).values()) == {0.0}


@pytest.mark.parametrize("name", DRAWN)
def test_a_row_that_is_no_question_is_named(name: str, tmp_path: Path) -> None:
    """With the file and the line, in one line."""
    file, rows, _ = DRAWN[name]
    write_lines(tmp_path / file, [rows[0], {"text": "Why?"}])
    with pytest.raises(UserError, match=rf"^suite '{name}': {file}, line 2: not a question of [^\n]*$"):
        opened(name, tmp_path)


def test_a_file_is_known_by_gits_own_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """`git hash-object` of the text is this id; another text is not the published file."""
    alpaca = SUITES["alpaca"]
    monkeypatch.setattr(alpaca, "git_blob", "3b18e512dba79e4c8300dd08aeb37f8e728b8dad")  # of "hello world\n"

    assert alpaca._is_published(alpaca.__new__(alpaca), b"hello world\n")
    assert not alpaca._is_published(alpaca.__new__(alpaca), b"hello world")


def test_mbpp_shows_the_tests(folder: Path) -> None:
    """After three examples; the answer begins in a code fence."""
    text = opened("mbpp", folder).prompts(chat, 4)[3].text

    assert text.count("<user>") == 4
    assert text.endswith("assert add(2) == 5</><assistant>\n```python\n")

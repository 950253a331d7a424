"""The suite `arithmetic`: its problems, its training and test sets, its scoring."""

import importlib
import re
from random import Random
from typing import Any

import pytest

from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Suite

arithmetic: Any = importlib.import_module("mtbench.suites.arithmetic")


def suite(variant: str = "", seed: int = 0) -> Any:
    opened: Suite = SUITES["arithmetic"](variant, Source(seed=seed))
    return opened


def plain(messages: Messages) -> str:
    return str(messages[-1]["content"])


def answer(doc: int, wording: int = 0) -> str:
    """Return a right answer to test item `doc`, in one of its wordings."""
    problem, _ = suite()._problem(doc)
    rng = Random(wording)
    text: str = arithmetic.render_answer(problem, arithmetic.draw_story(rng, problem), rng)
    return text


def test_every_wording_of_a_right_answer_scores_one() -> None:
    """Scoring recognises every answer that the suite generates."""
    answers = {f"arithmetic/{doc}/0": answer(doc, wording=doc) for doc in range(1000)}
    assert set(suite().score(answers).values()) == {1.0}


@pytest.mark.parametrize(
    ("change", "score"),
    [
        (lambda text, n: text, 1.0),
        (lambda text, n: text.replace(f"is {n}.", f"is {n + 1}."), 0.0),
        (lambda text, n: text.replace(f"is {n}.", "is"), 0.0),
        (lambda text, n: f"The answer is {n + 1}. No. {text}", 1.0),
        (lambda text, n: f"{text} No. The answer is {n + 1}.", 0.0),
        (lambda text, n: "", 0.0),
    ],
)
def test_the_last_answer_sentence_is_scored(change: Any, score: float) -> None:
    """With one, several or no sentences "The answer is N", only the last one counts."""
    right = suite()._problem(7)[0].amounts[-1]
    assert suite().score({"arithmetic/7/0": change(answer(7), right)}) == {"arithmetic/7/0": score}


def test_every_sentence_of_an_answer_is_true() -> None:
    """Every equation holds, starts from the result of the one before, and applies the problem's change."""
    for doc in range(300):
        problem, _ = suite()._problem(doc)
        equations = re.findall(r"(\d+)([-+*])(\d+)=(\d+)", answer(doc))
        amount = problem.start
        for (before, sign, number, after), change in zip(equations, problem.changes, strict=True):
            assert (int(before), (sign, int(number))) == (amount, change)
            amount = {"+": amount + change[1], "-": amount - change[1], "*": amount * change[1]}[sign]
            assert int(after) == amount
        assert answer(doc).endswith(f"The answer is {amount}.")


def test_no_problem_is_in_both_sets() -> None:
    """Training and test problems differ in numbers or operations, for all seeds."""
    rng = Random(0)
    train = {arithmetic.draw_problem(rng, for_testing=False) for _ in range(5000)}
    tested = {suite(seed=seed)._problem(doc)[0] for seed in (0, 1) for doc in range(1500)}
    assert not train & tested
    assert not any(problem.for_testing for problem in train)
    assert all(problem.for_testing for problem in tested)


def test_unseen_has_the_same_problems_in_other_phrasings() -> None:
    """The phrasings share no template with the training examples, and the answers are the same."""
    for kind, phrasings in arithmetic.SEEN.items():
        assert not set(phrasings) & set(arithmetic.UNSEEN[kind])
    seen, unseen = suite().prompts(plain, 50), suite("unseen").prompts(plain, 50)
    assert all(a.text != b.text for a, b in zip(seen, unseen, strict=True))
    assert unseen[3].item == "arithmetic-unseen/3/0"
    assert suite("unseen").score({"arithmetic-unseen/3/0": answer(3)}) == {"arithmetic-unseen/3/0": 1.0}


def test_examples_depend_on_the_seed_only() -> None:
    """A larger count starts with the same examples; another seed gives others."""
    assert list(suite().examples(50, seed=1)) == list(suite().examples(200, seed=1))[:50]
    assert list(suite().examples(5, seed=1)) != list(suite().examples(5, seed=2))


def test_sums_are_the_same_problems_in_numbers() -> None:
    """Test sums have the answers of the test stories, and training sums have their own."""
    sums = suite("sums")
    problem, _ = suite()._problem(4)
    assert sums.prompts(plain, 5)[4].text.split()[0] == str(problem.start)
    assert sums.score({"arithmetic-sums/4/0": f"The answer is {problem.amounts[-1]}."}) == {"arithmetic-sums/4/0": 1.0}
    question, answer = (turn["content"] for turn in next(sums.examples(1, seed=1)))
    start, *changes = question.split()
    assert answer.startswith(f"{start}{changes[0]}=")

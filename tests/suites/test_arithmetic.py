"""The procedural suite: its problems, its two sides, its scoring."""

import importlib
import re
from collections import Counter
from random import Random
from typing import Any

import pytest

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Messages, Source, Suite

arithmetic: Any = importlib.import_module("mtbench.suites.arithmetic")


def suite(rest: str = "", seed: int = 0) -> Any:
    made: Suite = SUITES["arithmetic"](rest, Source(seed=seed))
    return made


def plain(messages: Messages) -> str:
    return messages[-1]["content"]


def answer(doc: int, wording: int = 0) -> str:
    """A right answer to test item `doc`, in one of its wordings."""
    problem, _ = suite()._problem(doc)
    rng = Random(wording)
    text: str = arithmetic.render_answer(problem, arithmetic.draw_story(rng, problem), rng)
    return text


def test_every_wording_of_a_right_answer_scores_one() -> None:
    """Scoring reads all that the suite can write."""
    answers = {f"arithmetic/{doc}/0": answer(doc, wording=doc) for doc in range(1000)}
    assert set(suite().score(answers).values()) == {1.0}


@pytest.mark.parametrize(
    ("change", "score"),
    [
        (lambda text, n: text, 1.0),
        (lambda text, n: text.removesuffix("."), 1.0),
        (lambda text, n: text.replace(f"is {n}.", f"is {n + 1}."), 0.0),
        (lambda text, n: text.replace(f"is {n}.", f"is {n}0."), 0.0),
        (lambda text, n: text.replace(f"is {n}.", "is"), 0.0),
        (lambda text, n: text.replace("The answer is", "It is"), 0.0),
        (lambda text, n: f"The answer is {n + 1}. No. {text}", 1.0),
        (lambda text, n: f"{text} No. The answer is {n + 1}.", 0.0),
        (lambda text, n: "", 0.0),
    ],
)
def test_the_last_number_named_as_the_answer_counts(change: Any, score: float) -> None:
    """A right answer, a wrong one, none, and several: exactly the last "The answer is N" is judged."""
    right = suite()._problem(7)[0].amounts[-1]
    assert suite().score({"arithmetic/7/0": change(answer(7), right)}) == {"arithmetic/7/0": score}


def test_an_answer_is_true_sentence_by_sentence() -> None:
    """Every equation holds, starts from what the one before gave, and makes the problem's change."""
    for doc in range(300):
        problem, _ = suite()._problem(doc)
        equations = re.findall(r"(\d+)([-+*])(\d+)=(\d+)", answer(doc))
        amount = problem.start
        for (before, sign, number, after), made in zip(equations, problem.changes, strict=True):
            assert (int(before), (sign, int(number))) == (amount, made)
            amount = {"+": amount + made[1], "-": amount - made[1], "*": amount * made[1]}[sign]
            assert int(after) == amount
        assert answer(doc).endswith(f"The answer is {amount}.")


def test_no_problem_is_on_both_sides() -> None:
    """Training and testing differ in numbers or operations, whatever the seeds."""
    rng = Random(0)
    train = {arithmetic.draw_problem(rng, for_testing=False) for _ in range(20000)}
    tested = {suite(seed=seed)._problem(doc)[0] for seed in (0, 1) for doc in range(5000)}
    assert not train & tested
    assert not any(problem.for_testing for problem in train)
    assert all(problem.for_testing for problem in tested)


def test_problems_are_as_large_as_promised() -> None:
    """Two to six changes, amounts of two or three digits, and carries in plenty."""
    problems = [suite()._problem(doc)[0] for doc in range(2000)]
    assert {len(problem.changes) for problem in problems} == {2, 3, 4, 5, 6}
    assert all(10 <= amount <= 999 for problem in problems for amount in problem.amounts)
    gains = [
        before % 10 + number % 10 > 9
        for problem in problems
        for before, (sign, number) in zip(problem.amounts, problem.changes, strict=False)
        if sign == "+"
    ]
    assert 0.3 < sum(gains) / len(gains) < 0.6


def test_items_do_not_change_with_the_limit() -> None:
    """The first items are the same however many are asked for; None means 4,096."""
    prompts = suite().prompts(plain, None)
    assert len(prompts) == 4096
    assert suite().prompts(plain, 100) == prompts[:100]
    assert [prompt.item for prompt in prompts[:2]] == ["arithmetic/0/0", "arithmetic/1/0"]
    assert len({prompt.text for prompt in prompts}) == 4096


def test_unseen_asks_the_same_problems_in_other_words() -> None:
    """The held-out phrasings share no template with training, and the same numbers answer them."""
    for kind, phrasings in arithmetic.SEEN.items():
        assert not set(phrasings) & set(arithmetic.UNSEEN[kind])
    seen, unseen = suite().prompts(plain, 50), suite("unseen").prompts(plain, 50)
    assert all(a.text != b.text for a, b in zip(seen, unseen, strict=True))
    assert unseen[3].item == "arithmetic-unseen/3/0"
    assert suite("unseen").score({"arithmetic-unseen/3/0": answer(3)}) == {"arithmetic-unseen/3/0": 1.0}


def test_examples_are_stable_and_drawn_by_seed() -> None:
    """More examples begin with the same ones; another seed gives others."""
    assert list(suite().examples(50, seed=1)) == list(suite().examples(200, seed=1))[:50]
    assert list(suite().examples(5, seed=1)) != list(suite().examples(5, seed=2))


def test_sums_are_the_same_problems_in_figures() -> None:
    """The held-out sums need the answers of the held-out stories; training ones come with theirs."""
    sums = suite("sums")
    problem, _ = suite()._problem(4)
    assert sums.prompts(plain, 5)[4].text.split()[0] == str(problem.start)
    assert sums.score({"arithmetic-sums/4/0": f"The answer is {problem.amounts[-1]}."}) == {"arithmetic-sums/4/0": 1.0}
    question, answer = (turn["content"] for turn in next(sums.examples(1, seed=1)))
    start, *changes = question.split()
    assert answer.startswith(f"{start}{changes[0]}=")


def test_wordings_are_drawn_with_their_weights_whatever_the_numbers() -> None:
    """A uniform word, a comma before 45 % of them, for small and large results alike."""
    for large in (False, True):
        sentences = [
            match
            for _, reply in suite().examples(6000, seed=3)
            for match in re.finditer(r"[A-Z]\w+(,?) (by|with|after|from) [^.]*=(\d+)", reply["content"])
            if (int(match[3]) >= 200) == large
        ]
        words = Counter(match[2] for match in sentences)
        assert all(abs(count / len(sentences) - 0.25) < 0.02 for count in words.values())
        assert abs(sum(match[1] == "," for match in sentences) / len(sentences) - 0.45) < 0.02


def test_an_unknown_variant_is_refused() -> None:
    """The error names the value and the choices."""
    with pytest.raises(UserError, match="'hard'; known: arithmetic, arithmetic:unseen, arithmetic:sums"):
        suite("hard")

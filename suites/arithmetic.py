"""Arithmetic word problems made on the spot, whose answers are as sure and as unsure as a real model's.

A problem is an amount, two to six changes of it, and numbers that do not matter:

    Q: Mia has 147 shells. She finds 25 more. Mia is 31 years old. Then she loses 48 shells. How many shells are left?
    A: Okay, she has 147 shells. Now finding 25 more that makes 172. Next, losing 48 this gives 124 now. The answer is
       124.

What multi-token decoding gains depends on how sure a model is of the tokens behind the next one, so the answer mixes
words nobody can foresee (three or more wordings, equally likely), words that are likely (one wording at 0.55 to 0.92),
template words and digits. Which wording is drawn depends on neither the numbers nor the question.
Problems for training and for testing differ in their numbers or operations: a hash of both decides the side.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import cycle
from random import Random
from typing import TypeVar

from mtbench.errors import UserError
from mtbench.registry import SUITES
from mtbench.suite import Prompt, Source, Suite, Template

T = TypeVar("T")

ITEMS = 4096  # test items when no limit is given
TEST_SHARE = 8  # one problem in so many is kept for testing

NAMES = (("Mia", "she"), ("Tom", "he"), ("Ana", "she"), ("Ben", "he"), ("Eva", "she"), ("Leo", "he"))
THINGS = ("shells", "coins", "cards", "books", "stamps", "pens")
STEPS = {2: 35, 3: 30, 4: 20, 5: 10, 6: 5}  # number of changes: weight
NOISE = 0.35  # share of the questions with a number that does not matter

# Verbs of the question and what becomes of them in the answer, by the sign of the change.
VERBS = {
    "+": {"finds": "finding", "gets": "getting", "buys": "buying", "wins": "winning", "earns": "earning"},
    "-": {"loses": "losing", "sells": "selling", "gives": "giving", "drops": "dropping", "spends": "spending"},
    "*": {"doubles": "doubling"},
}

# Question phrasings. {n} name, {s} she or he, {S} the same capitalised, {a} number, {t} things, {v} verb.
SEEN = {
    "start": ("{n} has {a} {t}.", "{n} starts with {a} {t}.", "There are {a} {t} in a box of {n}."),
    "+": ("{S} {v} {a} more.", "Then {s} {v} {a} {t}.", "{n} {v} {a}."),
    "-": ("{S} {v} {a} of them.", "Then {s} {v} {a} {t}.", "{n} {v} {a}."),
    "*": ("Then {s} {v} them.", "{S} {v} what {s} has."),
    "noise": ("{n} is {a} years old.", "The box weighs {a} grams.", "It takes {a} minutes."),
    "ask": ("How many {t} are left?", "How many {t} does {n} have now?"),
}
UNSEEN = {
    "start": ("In a box {n} has {a} {t}.", "{a} {t} are what {n} starts with."),
    "+": ("It is {a} more {t} that {n} {v}.", "Now {s} {v} {a} more {t}."),
    "-": ("It is {a} of them that {n} {v}.", "Now {s} {v} {a} of the {t}."),
    "*": ("What {n} has {s} then {v}.", "Now {n} {v} the {t}."),
    "noise": ("Years old: {a}.", "In {a} minutes it is done."),
    "ask": ("What is left, how many {t}?", "Now {n} has how many {t}?"),
}

# Answer wordings and their weights. Equal weights: nobody can foresee the word. Others: how likely the first one is.
HELLO = {"Okay": 1, "Well": 1, "Sure": 1, "Right": 1}
SUBJECT = {"{s}": 75, "{n}": 25}
START = {"has": 55, "begins with": 30, "owns": 15}
THING = {" {t}": 85, "": 15}
OPEN = {"Then": 1, "Next": 1, "Now": 1, "Later": 1}
COMMA = {"": 55, ",": 45}
OBJECT = {"+": {" more": 65, "": 35}, "-": {"": 92, " of them": 8}, "*": {"": 55, " them": 45}}
THAT = {"that": 1, "this": 1, "which": 1}
MAKES = {"makes": 55, "gives": 30, "means": 15}
TAIL = {"": 75, " now": 17, " {t}": 8}

ANSWER = re.compile(r"The answer is (-?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """An amount and the changes made to it: ("+", 25), ("-", 48) or ("*", 2)."""

    start: int
    changes: tuple[tuple[str, int], ...]

    @property
    def amounts(self) -> list[int]:
        """What there is at first and after each change."""
        amounts = [self.start]
        for sign, number in self.changes:
            amounts.append(change(amounts[-1], sign, number))
        return amounts

    @property
    def for_testing(self) -> bool:
        key = f"{self.start} " + " ".join(f"{sign}{number}" for sign, number in self.changes)
        return zlib.crc32(key.encode()) % TEST_SHARE == 0


@dataclass(frozen=True, slots=True)
class Story:
    """What a problem is about: what stands for {n}, {s}, {S} and {t}, and a verb for each change."""

    words: Mapping[str, str]
    verbs: tuple[str, ...]


def change(amount: int, sign: str, number: int) -> int:
    return amount + number if sign == "+" else amount - number if sign == "-" else amount * number


def draw_problem(rng: Random, *, for_testing: bool) -> Problem:
    """A problem of one side, every amount between 10 and 999, operands of two digits and sometimes three."""
    while True:
        start = amount = rng.randint(20, 400)
        changes = []
        for _ in range(pick(rng, STEPS)):
            signs = [s for s, fits in (("+", amount < 800), ("-", amount > 40), ("*", amount < 200)) if fits]
            sign = rng.choice(signs)
            top = min(999 - amount, 99 if rng.random() < 0.8 else 300) if sign == "+" else min(amount - 10, 99)
            number = 2 if sign == "*" else rng.randint(11, top)
            changes.append((sign, number))
            amount = change(amount, sign, number)
        problem = Problem(start, tuple(changes))
        if problem.for_testing == for_testing:
            return problem


def draw_story(rng: Random, problem: Problem) -> Story:
    """Who and what it is about; a verb comes again only when all of its kind have been used."""
    name, pronoun = rng.choice(NAMES)
    words = {"n": name, "s": pronoun, "S": pronoun.capitalize(), "t": rng.choice(THINGS)}
    verbs = {sign: cycle(rng.sample(list(kind), len(kind))) for sign, kind in VERBS.items()}
    return Story(words, tuple(next(verbs[sign]) for sign, _ in problem.changes))


def render_question(problem: Problem, story: Story, phrasings: Mapping[str, tuple[str, ...]], rng: Random) -> str:
    """The problem in words, with at most one sentence whose number does not matter."""

    def say(kind: str, number: int = 0, verb: str = "") -> str:
        return rng.choice(phrasings[kind]).format(**story.words, a=number, v=verb)

    sentences = [say("start", problem.start)]
    for (sign, number), verb in zip(problem.changes, story.verbs, strict=True):
        sentences.append(say(sign, number, verb))
    if rng.random() < NOISE:
        sentences.insert(rng.randint(1, len(sentences)), say("noise", rng.randint(11, 99)))
    return " ".join([*sentences, say("ask")])


def render_answer(problem: Problem, story: Story, rng: Random) -> str:
    """The reasoning, one sentence per change, and the answer; the wording is drawn afresh for every sentence."""
    text = f"{pick(rng, HELLO)}, {pick(rng, SUBJECT)} {pick(rng, START)} {problem.start}{pick(rng, THING)}."
    for (sign, number), verb, amount in zip(problem.changes, story.verbs, problem.amounts[1:], strict=True):
        what = f"{VERBS[sign][verb]} {number}" if sign != "*" else VERBS[sign][verb]
        text += f" {pick(rng, OPEN)}{pick(rng, COMMA)} {what}{pick(rng, OBJECT[sign])}"
        text += f" {pick(rng, THAT)} {pick(rng, MAKES)} {amount}{pick(rng, TAIL)}."
    return text.format(**story.words) + f" The answer is {problem.amounts[-1]}."


def pick(rng: Random, weights: Mapping[T, int]) -> T:
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


@SUITES.register("arithmetic")
class Arithmetic(Suite):
    """`arithmetic`, or `arithmetic:unseen`: the same problems asked in phrasings that training does not show."""

    family = "tiny"
    domain = "tiny"
    max_new_tokens = 128
    metric = "exact_match"

    def __init__(self, rest: str, source: Source) -> None:
        if rest not in ("", "unseen"):
            raise UserError(
                f"arithmetic has no variant {rest!r}; known: arithmetic, arithmetic:unseen. See `mtbench ls suites`."
            )
        self.task_name = f"arithmetic-{rest}" if rest else "arithmetic"
        self.phrasings = UNSEEN if rest else SEEN
        self.seed = source.seed
        self.task = {"name": self.task_name, "num_fewshot": 0, "chat_template": True, "filter": ANSWER.pattern}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """The first `limit` test problems; there is no end of them, None means 4,096."""
        prompts = []
        for doc in range(ITEMS if limit is None else limit):
            problem, rng = self._problem(doc)
            question = render_question(problem, draw_story(rng, problem), self.phrasings, rng)
            text = template([{"role": "user", "content": question}])
            prompts.append(Prompt(item=f"{self.task_name}/{doc}/0", text=text))
        return prompts

    def score(self, answers: Mapping[str, str]) -> dict[str, float]:
        """1 where the last "The answer is N" of the text names the right number."""
        scores = {}
        for item, text in answers.items():
            problem, _ = self._problem(int(item.split("/")[1]))
            found = ANSWER.findall(text)
            scores[item] = float(bool(found) and int(found[-1]) == problem.amounts[-1])
        return scores

    def examples(self, count: int, seed: int) -> Iterator[list[dict[str, str]]]:
        """`count` conversations about training problems; the first ones do not change with `count`."""
        rng = Random(f"train/{seed}")
        for _ in range(count):
            problem = draw_problem(rng, for_testing=False)
            story = draw_story(rng, problem)
            yield [
                {"role": "user", "content": render_question(problem, story, SEEN, rng)},
                {"role": "assistant", "content": render_answer(problem, story, rng)},
            ]

    def _problem(self, doc: int) -> tuple[Problem, Random]:
        rng = Random(f"test/{self.seed}/{doc}")
        return draw_problem(rng, for_testing=True), rng

"""Generated arithmetic word problems, whose answers mix predictable and unpredictable tokens as real text does.

A problem has an amount, two to six changes to it, and irrelevant numbers:

    Q: Mia has 147 shells. First she finds 25 more. Mia is 31 years old. Second, she loses 48 shells. How many shells
       are left?
    A: Okay, she has 147 shells. First by finding more that makes 147+25=172. Second, after losing some this gives
       172-48=124 now. The answer is 124.

The speedup of multi-token decoding depends on how well a model predicts the tokens after the next one. So the answer
mixes unpredictable words (three or more equally likely wordings), likely words (one wording with probability 0.55 to
0.92), template words and digits. The wording is independent of the numbers and of the question.
Training and test problems differ in their numbers or operations: a hash of both assigns a problem to one of the sets.
"""

import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import cycle, pairwise
from random import Random
from typing import TypeVar

from mtbench.errors import UserError
from mtbench.evaluation.registry import SUITES
from mtbench.evaluation.suite import Prompt, Reading, Source, Suite, Template

T = TypeVar("T")

ITEMS = 4096  # test items without a limit; a larger limit gives more
TEST_SHARE = 8  # one problem in eight is a test problem

NAMES = (("Mia", "she"), ("Tom", "he"), ("Ana", "she"), ("Ben", "he"), ("Eva", "she"), ("Leo", "he"))
THINGS = ("shells", "coins", "cards", "books", "stamps", "pens")
STEPS = {2: 45, 3: 30, 4: 17, 5: 6, 6: 2}  # number of changes: weight
NOISE = 0.35  # share of the questions with an irrelevant number

# Verbs in the question and their form in the answer, by the sign of the change.
VERBS = {
    "+": {"finds": "finding", "gets": "getting", "buys": "buying", "wins": "winning", "earns": "earning"},
    "-": {"loses": "losing", "sells": "selling", "gives": "giving", "drops": "dropping", "spends": "spending"},
    "*": {"doubles": "doubling"},
}

ORDINALS = ("First", "Second", "Third", "Fourth", "Fifth", "Sixth")

# Question phrasings. {n} name, {s} she or he, {a} number, {t} things, {o} ordinal, {v} verb.
SEEN = {
    "start": ("{n} has {a} {t}.", "{n} starts with {a} {t}.", "There are {a} {t} in a box of {n}."),
    "+": ("{o} {s} {v} {a} more.", "{o}, {s} {v} {a} {t}.", "{o} {n} {v} {a}."),
    "-": ("{o} {s} {v} {a} of them.", "{o}, {s} {v} {a} {t}.", "{o} {n} {v} {a}."),
    "*": ("{o} {s} {v} them.", "{o}, {n} {v} what {s} has."),
    "noise": ("{n} is {a} years old.", "The box weighs {a} grams.", "It takes {a} minutes."),
    "ask": ("How many {t} are left?", "How many {t} does {n} have now?"),
}
UNSEEN = {
    "start": ("In a box {n} has {a} {t}.", "{a} {t} are what {n} starts with."),
    "+": ("{o} it is {a} more {t} that {n} {v}.", "{o} {a} more, that {s} {v}."),
    "-": ("{o} it is {a} of them that {n} {v}.", "{o} {a} of the {t}, that {s} {v}."),
    "*": ("{o} what {n} has {s} {v}.", "{o} {n} {v} the {t}."),
    "noise": ("Years old: {a}.", "In {a} minutes it is done."),
    "ask": ("What is left, how many {t}?", "Now {n} has how many {t}?"),
}

# Answer wordings and their weights. Equal weights make a word unpredictable.
HELLO = {"Okay": 1, "Well": 1, "Sure": 1, "Right": 1}
SUBJECT = {"{s}": 75, "{n}": 25}
START = {"has": 55, "begins with": 30, "owns": 15}
THING = {" {t}": 85, "": 15}
COMMA = {"": 55, ",": 45}
BY = {"by": 1, "with": 1, "after": 1, "from": 1}
OBJECT = {"+": {" more": 65, " some": 35}, "-": {" some": 92, " many": 8}, "*": {" them": 55, " all": 45}}
THAT = {"that": 1, "this": 1, "which": 1}
MAKES = {"makes": 55, "gives": 30, "means": 15}
TAIL = {"": 75, " now": 17, " {t}": 8}

ANSWER = re.compile(r"The answer is (-?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """An amount and the changes to it: ("+", 25), ("-", 48) or ("*", 2)."""

    start: int
    changes: tuple[tuple[str, int], ...]

    @property
    def amounts(self) -> list[int]:
        """The amount at the start and after each change."""
        amounts = [self.start]
        for sign, number in self.changes:
            amounts.append(apply_change(amounts[-1], sign, number))
        return amounts

    @property
    def for_testing(self) -> bool:
        """Whether this is a test problem, decided by a hash of its numbers and operations."""
        key = f"{self.start} " + " ".join(f"{sign}{number}" for sign, number in self.changes)
        return zlib.crc32(key.encode()) % TEST_SHARE == 0


@dataclass(frozen=True, slots=True)
class Story:
    """The words of a problem: the values of {n}, {s} and {t} in the phrasings, and a verb for each change."""

    words: Mapping[str, str]
    verbs: tuple[str, ...]


def apply_change(amount: int, sign: str, number: int) -> int:
    if sign == "+":
        return amount + number
    if sign == "-":
        return amount - number
    return amount * number


def draw_problem(rng: Random, *, for_testing: bool) -> Problem:
    """Return a training or a test problem. Amounts are from 10 to 999, operands have two digits, sometimes three."""
    while True:
        start = amount = rng.randint(20, 400)
        changes = []
        for _ in range(pick(rng, STEPS)):
            sign, number = _draw_change(rng, amount)
            changes.append((sign, number))
            amount = apply_change(amount, sign, number)
        problem = Problem(start, tuple(changes))
        if problem.for_testing == for_testing:
            return problem


def _draw_change(rng: Random, amount: int) -> tuple[str, int]:
    """Return sign and operand of a change that keeps the amount from 10 to 999."""
    signs = [sign for sign, fits in (("+", amount < 800), ("-", amount > 40), ("*", amount < 200)) if fits]
    sign = rng.choice(signs)
    if sign == "*":
        return sign, 2
    if sign == "-":
        return sign, rng.randint(11, min(amount - 10, 99))
    most = 99 if rng.random() < 0.8 else 300
    return sign, rng.randint(11, min(999 - amount, most))


def draw_story(rng: Random, problem: Problem) -> Story:
    """Return a random story; a verb repeats only after all verbs of its sign were used."""
    name, pronoun = rng.choice(NAMES)
    words = {"n": name, "s": pronoun, "t": rng.choice(THINGS)}
    verbs = {sign: cycle(rng.sample(list(forms), len(forms))) for sign, forms in VERBS.items()}
    return Story(words, tuple(next(verbs[sign]) for sign, _ in problem.changes))


def render_question(problem: Problem, story: Story, phrasings: Mapping[str, tuple[str, ...]], rng: Random) -> str:
    """Return the problem in words, with at most one sentence that has an irrelevant number."""

    def render(kind: str, number: int = 0, verb: str = "", ordinal: str = "") -> str:
        return rng.choice(phrasings[kind]).format(**story.words, a=number, v=verb, o=ordinal)

    sentences = [render("start", problem.start)]
    for ordinal, (sign, number), verb in zip(ORDINALS, problem.changes, story.verbs, strict=False):
        sentences.append(render(sign, number, verb, ordinal))
    if rng.random() < NOISE:
        sentences.insert(rng.randint(1, len(sentences)), render("noise", rng.randint(11, 99)))
    return " ".join([*sentences, render("ask")])


def render_answer(problem: Problem, story: Story, rng: Random) -> str:
    """Return the reasoning, one sentence for each change, and the answer; each sentence draws its own wording."""
    text = f"{pick(rng, HELLO)}, {pick(rng, SUBJECT)} {pick(rng, START)} {problem.start}{pick(rng, THING)}."
    steps = zip(ORDINALS, problem.changes, story.verbs, equations(problem), strict=False)
    for ordinal, (sign, _), verb, equation in steps:
        text += f" {ordinal}{pick(rng, COMMA)} {pick(rng, BY)} {VERBS[sign][verb]}{pick(rng, OBJECT[sign])}"
        text += f" {pick(rng, THAT)} {pick(rng, MAKES)} {equation}{pick(rng, TAIL)}."
    return text.format(**story.words) + f" The answer is {problem.amounts[-1]}."


def render_sums(problem: Problem) -> tuple[str, str]:
    """Return the problem in numbers, and its answer: "147 +25 -48", "147+25=172 172-48=124. The answer is 124."."""
    question = " ".join([str(problem.start), *(f"{sign}{number}" for sign, number in problem.changes)])
    return question, " ".join(equations(problem)) + f". The answer is {problem.amounts[-1]}."


def equations(problem: Problem) -> list[str]:
    """Return one equation for each change, such as "147+25=172"."""
    pairs = zip(problem.changes, pairwise(problem.amounts), strict=True)
    return [f"{before}{sign}{number}={after}" for (sign, number), (before, after) in pairs]


def pick(rng: Random, weights: Mapping[T, int]) -> T:
    """Return a random key, drawn with the values as weights."""
    return rng.choices(tuple(weights), tuple(weights.values()))[0]


@SUITES.register("arithmetic")
class Arithmetic(Suite):
    """`arithmetic`, and two variants with the same problems.

    `arithmetic:unseen` uses phrasings that are not in the training examples; `arithmetic:sums` uses numbers only.
    """

    family = "tiny"
    domain = "tiny"
    max_new_tokens = 160
    metric = "exact_match"

    def __init__(self, variant: str, source: Source) -> None:
        if variant not in ("", "unseen", "sums"):
            raise UserError(
                f"arithmetic has no variant {variant!r}; known: arithmetic, arithmetic:unseen, arithmetic:sums. "
                "See `mtbench ls suites`."
            )
        self.variant = variant
        self.task_name = f"arithmetic-{variant}" if variant else "arithmetic"
        self.seed = source.seed
        self.task = {"name": self.task_name, "num_fewshot": 0, "chat_template": True, "filter": ANSWER.pattern}

    def prompts(self, template: Template, limit: int | None) -> list[Prompt]:
        """Return `limit` test problems (None: 4,096); their number is not limited."""
        prompts = []
        for doc in range(ITEMS if limit is None else limit):
            problem, rng = self._problem(doc)
            question, _ = render_sums(problem)
            if self.variant != "sums":
                phrasings = UNSEEN if self.variant else SEEN
                question = render_question(problem, draw_story(rng, problem), phrasings, rng)
            text = template([{"role": "user", "content": question}])
            prompts.append(Prompt(item=f"{self.task_name}/{doc}/0", text=text))
        return prompts

    def read(self, answers: Mapping[str, str]) -> dict[str, Reading]:
        """Score 1 if the last "The answer is N" in the text has the right number, else 0."""
        readings = {}
        for item, text in answers.items():
            problem, _ = self._problem(int(item.split("/")[1]))
            numbers = ANSWER.findall(text)
            right = bool(numbers) and Decimal(numbers[-1]) == problem.amounts[-1]  # int refuses thousands of digits
            readings[item] = Reading(float(right), None if numbers else 'no "The answer is N"')
        return readings

    def examples(self, count: int | None, seed: int) -> Iterator[list[dict[str, str]]]:
        """Yield `count` conversations about training problems; a larger `count` starts with the same ones."""
        if count is None:
            raise UserError("suite 'arithmetic' generates its examples; give their number with `--examples N`")
        rng = Random(f"train/{seed}")
        for _ in range(count):
            problem = draw_problem(rng, for_testing=False)
            story = draw_story(rng, problem)
            if self.variant == "sums":
                question, answer = render_sums(problem)
            else:
                question, answer = render_question(problem, story, SEEN, rng), render_answer(problem, story, rng)
            yield [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def _problem(self, doc: int) -> tuple[Problem, Random]:
        """Return test problem `doc`, and the random generator that draws its story and wording."""
        rng = Random(f"test/{self.seed}/{doc}")
        return draw_problem(rng, for_testing=True), rng

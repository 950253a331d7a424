"""Why two answers differ: the classes of an audit in the order in which they are tested. The first that holds is named.

A test gets an item's two answers, what the judge says of them, and what is known of the pair of arms. It returns the
evidence in one sentence, or None.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from mtbench.experiments.audit.format import JudgedLine, SideJudged
from mtbench.experiments.audit.judge import ENDLESS
from mtbench.experiments.audit.sides import Said, Side

Letter = Literal["a", "b"]
AS_SAMPLED = 4.0  # standard deviations within which tokens are as likely as sampled ones


@dataclass
class Known:
    """What is known of a pair of arms. `text`: makes text of ids."""

    a: Side
    b: Side
    noise: float
    rounding: float | None
    text: Callable[[Sequence[int]], str]
    cases: "list[Case]" = field(default_factory=list)  # the differing answers

    @property
    def bound(self) -> float:
        """The largest shortfall that arithmetic explains."""
        return max(self.noise, self.rounding or 0.0)


@dataclass(frozen=True, eq=False)
class Case:
    """An item's two answers, and what the judge says of them; None: nothing was judged."""

    item: str
    a: Said
    b: Said
    judged: JudgedLine | None
    known: Known

    def said(self, letter: Letter) -> Said:
        return self.a if letter == "a" else self.b

    def side(self, letter: Letter) -> Side:
        return self.known.a if letter == "a" else self.known.b

    def of(self, letter: Letter) -> SideJudged | None:
        return None if self.judged is None else self.judged.side_a if letter == "a" else self.judged.side_b

    def far(self, letter: Letter, bound: float) -> list[int]:
        """Return the judged tokens of a side that are further from the judge's choice than `bound`, by index."""
        side = self.of(letter)
        return [] if side is None else [int(i) for i, short in side.short.items() if short > bound]

    @cached_property
    def off(self) -> list[Letter]:
        """The sides with a token that arithmetic does not explain."""
        letters: list[Letter] = ["a", "b"]
        return [letter for letter in letters if self.far(letter, self.known.bound)]

    @property
    def at_first(self) -> list[float]:
        """Shortfalls of the two tokens at the first difference."""
        tokens = () if self.judged is None else (self.judged.a, self.judged.b)
        return [token.shortfall for token in tokens if token is not None]

    @property
    def is_prefix(self) -> bool:
        """Whether one answer begins with the other."""
        shorter = min(len(self.a.tokens), len(self.b.tokens))
        return self.a.tokens[:shorter] == self.b.tokens[:shorter]


def _template(case: Case) -> str | None:
    ours, theirs = case.a.prompt, case.b.prompt
    if ours is None or theirs is None or ours == theirs:
        return None
    place = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
    shown = [repr(case.known.text(ids[max(0, place - 2) : place + 6])) for ids in (ours, theirs)]
    counts = f"{len(ours)} and {len(theirs)} prompt tokens"
    return f"prompts differ from token {place} on: A has {shown[0]}, B {shown[1]}; {counts}"


def _same(case: Case) -> str | None:
    return "the same tokens" if case.a.tokens == case.b.tokens and not _other_score(case) else None


def _other_score(case: Case) -> bool:
    return None not in (case.a.score, case.b.score) and case.a.score != case.b.score


def _metric(case: Case) -> str | None:
    if case.a.tokens != case.b.tokens or not _other_score(case):
        return None
    tasks = [side.task or {} for side in (case.known.a, case.known.b)]
    names = [name for name in {**tasks[0], **tasks[1]} if tasks[0].get(name) != tasks[1].get(name)]
    because = "; ".join(f"{name} is {tasks[0].get(name)!r} and {tasks[1].get(name)!r}" for name in names)
    return f"the same tokens, scores {case.a.score:g} and {case.b.score:g}" + (f": {because}" if because else "")


RULES = {"end": "an end token", "stop": "a stop string", "length": "the budget of tokens", None: "an unknown rule"}


def _stop(case: Case) -> str | None:
    ends = [
        f"{RULES.get(said.finish, said.finish)} ended {name} after {len(said.tokens)} tokens"
        for name, said in zip("AB", (case.a, case.b), strict=True)
    ]
    if case.is_prefix:
        return f"same tokens up to the end of the shorter: {', '.join(ends)}"
    for letter in ("a", "b"):
        side, other = case.of(letter), case.said("b" if letter == "a" else "a")
        if side is None or case.judged is None or other.finish != "end" or len(other.tokens) != case.judged.first + 1:
            continue
        if side.short and side.tried.get(ENDLESS, 1e30) <= case.known.bound:
            return f"{letter.upper()} ignores end tokens: with them left out, all its tokens are the model's choices; {', '.join(ends)}"
    return None


def _near_tie(case: Case) -> str | None:
    if case.judged is None or any(case.far(letter, case.known.noise) for letter in ("a", "b")):
        return None
    return (
        f"both tokens are within {max(case.at_first):.2g} of the largest logit, and the noise is {case.known.noise:.2g}"
    )


def _unexplained(case: Case) -> str | None:
    if case.judged is None:
        return "nothing could be judged: no side has the prompt, or one ends at once"
    sides = " and ".join(letter.upper() for letter in case.off)
    return f"{sides}: tokens up to {max(case.at_first):.3g} below the model's choice, and no test explains them"


class Class(NamedTuple):
    """A class: when it holds, what it says, and whether it is a fault."""

    test: Callable[[Case], str | None]
    says: str
    fault: bool = False


CLASSES: Mapping[str, Class] = {
    "template/tokenizer": Class(_template, "The prompts have other tokens."),
    "same": Class(_same, "The same tokens and, where both have one, the same score."),
    "metric": Class(_metric, "The same tokens, and another score."),
    "stop/budget": Class(_stop, "One answer ends earlier by another rule."),
    "near-tie": Class(_near_tie, "Both tokens are within the noise of the arithmetic."),
    "unexplained": Class(_unexplained, "No test explains the difference.", fault=True),
}


def name(case: Case) -> tuple[str, str]:
    """Return the class of a case and its evidence."""
    for known, (test, _, _) in CLASSES.items():
        if (evidence := test(case)) is not None:
            return known, evidence
    raise AssertionError("the last class holds for every case")

"""An item's two answers, the judge's figures of them, and what the wrong answers of a side have in common.

A token is off if its shortfall is more than arithmetic explains.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Literal

from mtbench.experiments.audit.explanation import Explanation, explain
from mtbench.experiments.audit.format import NOT_JUDGED, JudgedLine, SideJudged, TrialLine
from mtbench.experiments.audit.sides import Side, SideAnswer

Letter = Literal["a", "b"]
LETTERS: tuple[Letter, ...] = ("a", "b")
OTHER: Mapping[Letter, Letter] = {"a": "b", "b": "a"}
NEARLY_ALL = 0.8  # share of the answers
SEVERAL = 3  # tokens that are off from which drafts among them need no trial
EVENTS = 3  # tokens of an answer that count as off: those behind them may follow from these
CHANCE, SELDOM = 0.01, 0.1  # probabilities below which a pattern is not by chance, and is not if another one holds
MIXED = 12  # tokens that two items do not share by chance
RIGHT_BEHIND = 8  # judged tokens behind a draft that is off, which are right: it left nothing in a cache
MANY = 3  # answers from which a fault counts as one of all answers


@dataclass
class Known:
    """The data on a pair of arms. `text`: makes text of ids."""

    a: Side
    b: Side
    noise: float
    rounding: float | None
    text: Callable[[Sequence[int]], str]
    end_ids: Collection[int] = ()  # of both models; empty: they may have others
    same_weights: bool | None = None  # None: not known
    checkpoints: str = ""  # how the weights of two names differ, or why that is not known
    cases: "list[Case]" = field(default_factory=list)  # all answers
    trials: list[TrialLine] = field(default_factory=list)
    _pools: "dict[Letter, Pool]" = field(default_factory=dict)

    def side(self, letter: Letter) -> Side:
        return self.a if letter == "a" else self.b

    def pool(self, letter: Letter) -> "Pool":
        """Return the answers of a side that are off."""
        return self._pools.setdefault(letter, Pool(self, letter))

    def add(self, trials: Iterable[TrialLine]) -> None:
        """Add trials; what was derived without them is forgotten."""
        self.trials += trials
        self._pools.clear()

    @property
    def bound(self) -> float:
        """The largest shortfall that arithmetic explains."""
        return max(self.noise, self.rounding or 0.0)


@dataclass(frozen=True, eq=False)
class Case:
    """An item's two answers, and the judge's figures of them; None: nothing was judged."""

    item: str
    a: SideAnswer
    b: SideAnswer
    judged: JudgedLine | None
    known: Known

    def answer(self, letter: Letter) -> SideAnswer:
        return self.a if letter == "a" else self.b

    def side(self, letter: Letter) -> Side:
        return self.known.side(letter)

    def of(self, letter: Letter) -> SideJudged:
        return NOT_JUDGED if self.judged is None else self.judged.side_a if letter == "a" else self.judged.side_b

    def span(self, letter: Letter) -> range:
        """Return the indices of the judged tokens of a side."""
        first = 0 if self.judged is None else self.judged.first
        return range(first, first + len(self.of(letter).probabilities))

    def far(self, letter: Letter, bound: float) -> list[int]:
        """Return the judged tokens of a side that are further from the judge's choice than `bound`, by index."""
        return [int(i) for i, short in self.of(letter).short.items() if short > bound]

    def short(self, letter: Letter, index: int) -> float:
        """Return how far a side's token is from the judge's choice."""
        return self.of(letter).short.get(str(index), 0.0)

    @cached_property
    def off(self) -> list[Letter]:
        """The sides with a token that arithmetic does not explain."""
        return [letter for letter in LETTERS if self.far(letter, self.known.bound)]

    @property
    def is_prefix(self) -> bool:
        """Whether one answer begins with the other."""
        shorter = min(len(self.a.tokens), len(self.b.tokens))
        return self.a.tokens[:shorter] == self.b.tokens[:shorter]


@dataclass(frozen=True, eq=False)
class Pool:
    """The answers of one side, `letter`, that are off."""

    known: Known
    letter: Letter

    @cached_property
    def cases(self) -> list[Case]:
        return [case for case in self.known.cases if self.letter in case.off]

    @cached_property
    def far(self) -> list[tuple[Case, int]]:
        """The tokens that are off."""
        return [(case, index) for case in self.cases for index in self._far(case)]

    @property
    def tokens(self) -> int:
        """Judged tokens of all differing answers."""
        return sum(len(case.span(self.letter)) for case in self.known.cases)

    def _far(self, case: Case) -> list[int]:
        return case.far(self.letter, self.known.bound)

    @cached_property
    def drafts(self) -> str | None:
        """`first` or `last`: the token of a forward that the model itself chose, if all tokens that are off are drafts.

        None if they are not, if a side hides its forwards, or if that may be chance. What a cache holds stays there: if
        all is right again behind the only forward with such drafts, and no trial explains them, it was no cache.
        For several tokens no trial is made (`settled`).
        """
        every = [(forwards(case.answer(self.letter)), case.span(self.letter), self._far(case)) for case in self.cases]
        if self.known.side(self.letter).plain is not False or not all(steps for steps, *_ in every):
            return None
        wrong = [[step for step in steps if {*step} & {*far}] for steps, _, far in every]
        behind = sum(judged.stop - of[-1].stop for (_, judged, _), of in zip(every, wrong, strict=True))
        passes = all(len(of) == 1 for of in wrong) and behind >= RIGHT_BEHIND and self.explanation is None
        for end, place in (("last", -1), ("first", 0)):
            own = [{step[place] for step in (steps if place == 0 else steps[:-1]) if step} for steps, *_ in every]
            mine = sum(len(of & {*judged}) for of, (_, judged, _) in zip(own, every, strict=True))
            chance = (1 - mine / max(1, sum(len(judged) for _, judged, _ in every))) ** len(self.far)
            drafts = not any(of & {*far} for of, (*_, far) in zip(own, every, strict=True))
            if drafts and self.far and (chance < CHANCE or (passes and end == "last")):
                return end
        return None

    @property
    def settled(self) -> bool:
        """Whether stored data name a cause that trials cannot change: several tokens are drafts, or rows mixed up."""
        drafts = self.drafts is not None and len(self.far) >= SEVERAL
        return drafts or 2 * len(self.mixed) > len(self.cases)

    @property
    def left(self) -> bool:
        """Whether answers begin to be off late, and behind the first forward: no draft left anything before it."""
        clean = [next((step.stop for step in forwards(case.answer(self.letter))), 0) for case in self.cases]
        firsts = [self._far(case)[0] for case in self.cases]
        behind = all(first >= stop for first, stop in zip(firsts, clean, strict=True))
        return behind and self._delayed(min(firsts, default=0) * len(firsts))

    def _delayed(self, before: int) -> bool:
        """Return whether none of `before` tokens is off, and not by chance: behind the first one, many are.

        Half of the tokens before may be too certain to be off: answers begin alike.
        """
        judged = sum(len(case.span(self.letter)) for case in self.cases)
        share = (len(self.far) - len(self.cases)) / max(1, judged - len(self.cases))
        return bool((1 - share) ** (before / 2) < CHANCE)

    @cached_property
    def mixed(self) -> dict[str, str]:
        """Items whose answer goes on with the tokens of another item, which the model would not: item -> the other."""
        found = {}
        for case in self.cases:
            probabilities, first = case.of(self.letter).probabilities, case.span(self.letter).start
            for theirs in self.known.cases:
                both = (case.answer(self.letter).tokens[first:], theirs.answer(OTHER[self.letter]).tokens[first:])
                shared = min(MIXED, max(map(len, both)))
                if theirs is case or shared < MIXED // 2 or both[0][:shared] != both[1][:shared]:
                    continue
                if math.prod(probabilities[1:shared]) * len(self.known.cases) < CHANCE:
                    found[case.item] = theirs.item
        return found

    @cached_property
    def starts_at(self) -> int | None:
        """The position from which on answers are off, if nearly all that reach it are, and no others."""
        spans = [(len(case.answer(self.letter).prompt or ()), case) for case in self.known.cases]
        lengths = [(start, len(case.answer(self.letter).tokens)) for start, case in spans]
        begin = min((start + self._far(case)[0] for start, case in spans if self._far(case)), default=0)
        before = sum(min(length, max(0, begin - start)) for start, length in lengths)
        reach = [start + length > begin for start, length in lengths]
        return begin if self._only(reach) * len(reach) < SELDOM and self._delayed(before) else None

    @cached_property
    def some_rows(self) -> list[int]:
        """The rows of the batch that are off, if nearly all of their answers are, and no other row.

        Most rows of a single block may be off by chance.
        """
        rows = {row for case in self.cases if (row := case.answer(self.letter).row) is not None}
        inside = [case.answer(self.letter).row in rows for case in self.known.cases]
        few = 2 * len(rows) <= (self.known.side(self.letter).batch_size or 1)
        return sorted(rows) if self._only(inside) < (1 if few else SELDOM) else []

    @property
    def in_rows(self) -> bool:
        """Whether `some_rows` are not by chance, as tokens and as answers that are off as often in any row."""
        inside = [case.answer(self.letter).row in self.some_rows for case in self.known.cases]
        exposed, events = [0, 0], 0
        for case, there in zip(self.known.cases, inside, strict=True):
            counted = self._far(case)[:EVENTS]
            exposed[there] += counted[-1] + 1 if len(counted) == EVENTS else len(case.answer(self.letter).tokens)
            events += len(counted)
        ways = math.comb(self.known.side(self.letter).batch_size or 1, len(self.some_rows))
        tokens = (exposed[True] / max(1, sum(exposed))) ** events
        return ways * tokens < CHANCE and ways * self._only(inside) < SELDOM

    def _only(self, inside: Sequence[bool]) -> float:
        """Return the probability that answers are off by chance in these only; 1 if not nearly all of them are off."""
        here, off = sum(inside), len(self.cases)
        if not off or not NEARLY_ALL * here <= off <= here < len(inside):
            return 1.0
        return math.comb(here, off) / math.comb(len(inside), off)

    @property
    def everywhere(self) -> bool:
        """Whether no answer is right, and the first quarter of the answers has its share of the tokens that are off."""
        early = [index < len(case.answer(self.letter).tokens) / 4 for case, index in self.far]
        return len(self.cases) == len(self.known.cases) >= MANY and sum(early) >= len(early) / 4

    @property
    def trials(self) -> list[TrialLine]:
        """The trials that were made to explain this side."""
        return [line for line in self.known.trials if line.side == self.letter]

    @cached_property
    def explanation(self) -> Explanation | None:
        """The trials that explain this side; None: none does."""
        return explain(self.trials)


def forwards(answer: SideAnswer) -> list[range]:
    """Return the tokens of each forward; empty: they are not stored, or each forward gave one token."""
    commits = answer.commits or []
    steps = [range(end - size, end) for size, end in zip(commits, accumulate(commits), strict=True)]
    return steps if max(commits, default=0) > 1 else []

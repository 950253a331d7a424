"""An item's two answers, the judge's figures of them, and what the wrong answers of a side have in common.

A token is off if its shortfall is more than arithmetic explains.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from mtbench.experiments.audit.explanation import Explanation, explain, nearest
from mtbench.experiments.audit.format import JudgedLine, SideJudged, TrialLine
from mtbench.experiments.audit.sides import Side, SideAnswer

Letter = Literal["a", "b"]
LETTERS: tuple[Letter, ...] = ("a", "b")
OTHER: Mapping[Letter, Letter] = {"a": "b", "b": "a"}
SAMPLED = "tokens sampled at temperature "  # the trial that needs no other logits
FEW = 0.1  # largest share of the tokens of single faults
NEARLY_ALL = 0.8  # share of the answers
EVENTS = 3  # tokens of an answer that count as off: those behind them may follow from these
CHANCE = 0.01  # probability below which a pattern is not by chance
MIXED = 12  # tokens that two items do not share by chance


@dataclass
class Known:
    """The data on a pair of arms. `text`: makes text of ids."""

    a: Side
    b: Side
    noise: float
    rounding: float | None
    text: Callable[[Sequence[int]], str]
    checkpoints: str | None = None  # how the weights of the two differ; None: they do not, as far as is known
    why: str = "the engine"  # what `rounding` was measured on
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

    def right(self, letter: Letter) -> bool:
        """Return whether no answer of a side is off."""
        return not self.pool(letter).cases

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
        return self.known.a if letter == "a" else self.known.b

    def of(self, letter: Letter) -> SideJudged | None:
        return None if self.judged is None else self.judged.side_a if letter == "a" else self.judged.side_b

    def far(self, letter: Letter, bound: float) -> list[int]:
        """Return the judged tokens of a side that are further from the judge's choice than `bound`, by index."""
        side = self.of(letter)
        return [] if side is None else [int(i) for i, short in side.short.items() if short > bound]

    def short(self, letter: Letter, index: int) -> float:
        """Return how far a side's token is from the judge's choice."""
        side = self.of(letter)
        return 0.0 if side is None else side.short.get(str(index), 0.0)

    @cached_property
    def off(self) -> list[Letter]:
        """The sides with a token that arithmetic does not explain."""
        return [letter for letter in LETTERS if self.far(letter, self.known.bound)]

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
        return [(case, index) for case in self.cases for index in case.far(self.letter, self.known.bound)]

    @property
    def count(self) -> int:
        return len(self.far)

    @property
    def tokens(self) -> int:
        """Judged tokens of all differing answers."""
        return sum(len(side.probabilities) for case in self.known.cases if (side := case.of(self.letter)))

    @property
    def rare(self) -> bool:
        return self.count <= FEW * self.tokens

    @property
    def earliest(self) -> int:
        return min(index for _, index in self.far)

    @property
    def sampled_at(self) -> str | None:
        """The temperature at which the tokens look sampled."""
        found = self.explanation
        return None if found is None or found.chance is None else found.trials[0].removeprefix(SAMPLED)

    @cached_property
    def checked(self) -> str | None:
        """`first` or `last`: the token of a forward that the model itself chose, if all tokens that are off are drafts.

        None if they are not, if a side hides its forwards, or if that may be chance.
        """
        for end in ("last", "first"):
            places = [_places(case.answer(self.letter).commits, end) for case, _ in self.far]
            if any(own is None for own in places):
                return None
            hit = [index in (own or ()) for (_, index), own in zip(self.far, places, strict=True)]
            if not any(hit) and (end == "last" or self._chance(end) < CHANCE):
                return end
        return None

    def _chance(self, end: str) -> float:
        """Return the probability that tokens that are off by chance are all drafts."""
        own = tokens = 0
        for case in self.cases:
            answer, side = case.answer(self.letter), case.of(self.letter)
            if case.judged is not None and side is not None:
                reach = range(case.judged.first, case.judged.first + len(side.probabilities))
                own += len(set(reach) & set(_places(answer.commits, end) or ()))
                tokens += len(reach)
        return float((1 - own / max(tokens, 1)) ** self.count)

    @cached_property
    def mixed(self) -> dict[str, str]:
        """Items whose answer continues with the tokens of another item: item -> the other."""
        found = {}
        for case in self.cases:
            assert case.judged is not None
            first, tokens = case.judged.first, case.answer(self.letter).tokens
            for theirs in self.known.cases:
                if theirs is not case and _goes_on(tokens, theirs.answer(OTHER[self.letter]).tokens, first):
                    found[case.item] = theirs.item
        return found

    @cached_property
    def starts_at(self) -> int | None:
        """The position before which no answer is off, if those that reach it are off and the others end before."""
        places = [len(case.answer(self.letter).prompt or ()) + index for case, index in self.far]
        start = min(places, default=0)
        reach = [len(c.answer(self.letter).prompt or ()) + len(c.answer(self.letter).tokens) for c in self.known.cases]
        return start if self._only_in([length > start for length in reach]) else None

    @cached_property
    def rows(self) -> list[int] | None:
        """The rows of the batch that are off, if the others are not, and not by chance.

        If every token had the same chance to be off, there would be some in all rows.
        """
        rows = {case.answer(self.letter).row for case in self.cases}
        size = self.known.side(self.letter).batch_size or 1
        if None in rows or len(rows) == size or size < 2:
            return None
        inside = [case for case in self.known.cases if case.answer(self.letter).row in rows]
        if not rows or len(self.cases) < NEARLY_ALL * len(inside):
            return None
        share = sum(map(self._exposed, inside)) / sum(map(self._exposed, self.known.cases))
        events = sum(min(EVENTS, len(case.far(self.letter, self.known.bound))) for case in self.cases)
        chance = math.comb(size, len(rows)) * share**events
        return sorted(row for row in rows if row is not None) if chance < CHANCE else None

    def _exposed(self, case: Case) -> int:
        """Return the tokens of an answer up to the last one that counts as off."""
        counted = case.far(self.letter, self.known.bound)[:EVENTS]
        return counted[-1] + 1 if len(counted) == EVENTS else len(case.answer(self.letter).tokens)

    def _only_in(self, inside: Sequence[bool]) -> bool:
        """Return whether nearly all of these answers are off, no others, and not by chance."""
        here, off = sum(inside), len(self.cases)
        if off < NEARLY_ALL * here or here == len(inside) or not off:
            return False
        return len(inside) * math.comb(here, off) / math.comb(len(inside), off) < CHANCE

    @property
    def after_first_step(self) -> bool:
        """Whether tokens are off by the forwards, and none of a first forward is."""
        begun = [case.answer(self.letter).commits for case, _ in self.far]
        if any(commits is None or max(commits) < 2 for commits in begun):
            return False
        steps = [step_of(commits or [], index)[0] for (_, index), commits in zip(self.far, begun, strict=True)]
        return bool(steps) and min(steps) > 1

    @property
    def trials(self) -> list[TrialLine]:
        """The trials that were made to explain this side."""
        return [line for line in self.known.trials if line.side == self.letter]

    @cached_property
    def explanation(self) -> Explanation | None:
        """The trials that explain this side; None: none does."""
        return explain(self.trials)

    @property
    def nearest(self) -> list[TrialLine]:
        """The trials that come nearest to an explanation, the best first."""
        return nearest(self.trials)

    @property
    def best(self) -> TrialLine | None:
        """The trial that explains this side best."""
        found = self.explanation
        if found is None or found.name is None or found.chance is not None:
            return None
        return next(line for line in self.trials if line.trial == found.trials[0])


def step_of(commits: Sequence[int], index: int) -> tuple[int, int, int]:
    """Return the forward that committed a token, from 1, the token's place in it, from 0, and its tokens."""
    begin = 0
    for step, committed in enumerate(commits, start=1):
        if begin <= index < begin + committed:
            return step, index - begin, committed
        begin += committed
    return len(commits), 0, 0


def _places(commits: Sequence[int] | None, end: str) -> set[int] | None:
    """Return the tokens that are the first, or the last, of their forward. The last forward of all may be cut."""
    if commits is None or max(commits, default=0) < 2:
        return None
    found, begin = set(), 0
    for number, committed in enumerate(commits):
        if committed and (end == "first" or number < len(commits) - 1):
            found.add(begin if end == "first" else begin + committed - 1)
        begin += committed
    return found


def _goes_on(tokens: Sequence[int], others: Sequence[int], first: int) -> bool:
    """Return whether two answers are equal from `first` on, for more tokens than chance gives."""
    length = min(MIXED, max(len(tokens), len(others)) - first)
    return length >= MIXED // 2 and list(tokens[first : first + length]) == list(others[first : first + length])

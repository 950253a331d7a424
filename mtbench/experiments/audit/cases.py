"""Two arms that are compared, an item's two answers, and the judge's figures of them.

A token is off if its shortfall is more than rounding explains.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from mtbench.experiments.audit.format import NOT_JUDGED, JudgedLine, SideJudged
from mtbench.experiments.audit.sides import Side, SideAnswer
from mtbench.models.checkpoint_difference import difference

Letter = Literal["a", "b"]
LETTERS: tuple[Letter, ...] = ("a", "b")
OTHER: Mapping[Letter, Letter] = {"a": "b", "b": "a"}


@dataclass
class Arms:
    """Two arms and their answers. `noise`: the largest shortfall that rounding explains; `text`: makes text of ids."""

    a: Side
    b: Side
    noise: float
    text: Callable[[Sequence[int]], str]
    end_ids: Collection[int] = ()  # of both models; empty: they may have others
    cases: "list[Case]" = field(default_factory=list)
    _off: "dict[Letter, list[tuple[Case, int]]]" = field(default_factory=dict)

    def side(self, letter: Letter) -> Side:
        return self.a if letter == "a" else self.b

    def off(self, letter: Letter) -> "list[tuple[Case, int]]":
        """Return the tokens of a side that are off, with their answers. All cases must be there."""
        if letter not in self._off:
            self._off[letter] = [(case, index) for case in self.cases for index in case.off(letter)]
        return self._off[letter]

    def judged(self, letter: Letter) -> int:
        """Return how many tokens of a side were judged."""
        return sum(len(case.of(letter).probabilities) for case in self.cases)

    @cached_property
    def weights(self) -> tuple[bool | None, str]:
        """Whether both decoded with the same weights, and how they differ; None: it is not known, and why."""
        if self.a.model is None or self.b.model is None:
            return None, ""
        return (True, "") if self.a.model == self.b.model else difference(self.a.model, self.b.model)


@dataclass(frozen=True, eq=False)
class Case:
    """An item's two answers, and the judge's figures of them; None: nothing was judged."""

    item: str
    a: SideAnswer
    b: SideAnswer
    judged: JudgedLine | None
    arms: Arms

    def answer(self, letter: Letter) -> SideAnswer:
        return self.a if letter == "a" else self.b

    def of(self, letter: Letter) -> SideJudged:
        return NOT_JUDGED if self.judged is None else self.judged.side_a if letter == "a" else self.judged.side_b

    def span(self, letter: Letter) -> range:
        """Return the indices of the judged tokens of a side."""
        first = 0 if self.judged is None else self.judged.first
        return range(first, first + len(self.of(letter).probabilities))

    def off(self, letter: Letter) -> list[int]:
        """Return the indices of a side's tokens that are off."""
        return [int(i) for i, short in self.of(letter).short.items() if short > self.arms.noise]

    def outside(self, letter: Letter) -> list[int]:
        """Return the indices of a side's tokens that the filters of its plan remove, beyond rounding."""
        return [int(i) for i, distance in self.of(letter).outside.items() if distance > self.arms.noise]

    def short(self, letter: Letter, index: int) -> float:
        """Return the shortfall of a side's token."""
        return self.of(letter).short.get(str(index), 0.0)

    @property
    def is_prefix(self) -> bool:
        """Whether one answer begins with the other."""
        shorter = min(len(self.a.tokens), len(self.b.tokens))
        return self.a.tokens[:shorter] == self.b.tokens[:shorter]

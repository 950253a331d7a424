"""What the page and report.md are written from: sections, and the words around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mtbench.report import figures
from mtbench.report.arm_names import arm_names
from mtbench.report.figures import Drawing
from mtbench.report.phrases import batches
from mtbench.report.race import Part
from mtbench.report.table import Table
from mtbench.results.comparisons import GroupKey
from mtbench.results.format import ResultCell


class Detail(NamedTuple):
    """A table that a page shows on demand."""

    heading: str
    caption: str
    table: Table
    open: bool = False  # shown at once


@dataclass(frozen=True, slots=True)
class Section:
    """The part of the report about one suite at one batch size, with one way of batching."""

    slug: str
    suite: str
    batch_size: int
    batching: str
    facts: list[str]
    summary: list[str]
    table: Table
    remarks: list[str]
    details: list[Detail]
    gaps: list[str]
    simulated: list[str]
    for_papers: dict[str, tuple[str, Table]]  # caption and table of LaTeX, by the end of the file's name
    csv: dict[str, str]
    drawings: list[Drawing]
    note: str  # its source, and what it is not
    cells: list[ResultCell]

    @property
    def batches(self) -> str:
        return batches(self.batch_size, self.batching)

    @property
    def anchor(self) -> str:
        """The section's id in the page."""
        return self.slug.replace(".", "-")

    @property
    def key(self) -> GroupKey:
        first = self.cells[0]
        return GroupKey(first.suite, first.batch_size, first.batching)


@dataclass(frozen=True, slots=True)
class Words:
    """What the page and the Markdown say around the sections."""

    title: str
    disclaimers: list[str]
    question: str
    subject: str
    decision: str
    warnings: list[str]
    own: dict[str, str]  # what to use in each section, if the decision covers several
    race: list[Part]  # how the race went; empty for a run that is none
    environment: list[tuple[str, str]]
    method: list[tuple[str, str]]


class Naming(NamedTuple):
    """How people read an arm: its number in the tables and its words, by its id."""

    numbers: dict[str, int]
    words: dict[str, str]

    @classmethod
    def of(cls, cells: Sequence[ResultCell]) -> "Naming":
        arms = dict.fromkeys(cell.arm for cell in cells)
        return cls({arm: number for number, arm in enumerate(arms, start=1)}, arm_names(cells))


def pictured(sections: Sequence[Section]) -> Section | None:
    """Return the section whose first figure the page starts with; None if nothing is drawn.

    That is the first suite's largest batch, which has all items, among those with speedups.
    """
    of_first = [s for s in sections if s.suite == sections[0].suite and s.drawings]
    with_speedups = [s for s in of_first if s.drawings[0].name == figures.SPEEDUPS]
    return max(with_speedups or of_first, key=lambda s: (s.batch_size, s.batching == "static"), default=None)

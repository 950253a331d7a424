"""The document of an experiment, without its rendering: a title, a first sentence, sections of blocks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

from mtbench.document.formatting import NONE, Estimated, bounds, interval, number
from mtbench.statistics import DISTURBED

Tone = Literal["good", "bad", "plain"]
TONES: dict[str, Tone] = dict.fromkeys(("faster", "not worse", "exact"), "good")  # of a word; of any other plain
TONES |= dict.fromkeys(("slower", "worse", "worse than margin", "divergent"), "bad")
COMPARATIVES = ("faster", "slower", "not worse", "worse")  # verdicts that `than` may follow
KINDS = ("warned", "failed", "void", "open", "flag", "left")  # of notes, the gravest first; warned: by a warning, too
SIGNS: dict[Tone, str] = {"good": "▲", "bad": "▼", "plain": "•"}


class Verdict(NamedTuple):
    """A word on what was measured, and why. Tone and sign repeat the word for the eye."""

    word: str
    reason: str = ""
    tone: Tone = "plain"
    sign: str = SIGNS["plain"]
    short: str = ""  # in place of a long word, where there is little room

    @classmethod
    def of(cls, word: str, reason: str = "") -> "Verdict":
        """Return a verdict with the tone of its word."""
        tone = TONES.get(word, "plain")
        return cls(word, reason, tone, SIGNS[tone])

    @property
    def text(self) -> str:
        """The word and its reason."""
        return f"{self.word}: {self.reason}" if self.reason else self.word


class Bar(NamedTuple):
    """An interval, its value and the factor 1 on a common axis, each from 0 to 1."""

    low: float
    value: float
    high: float
    one: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One place of a table: a value, its interval, a verdict, and the baseline."""

    value: str = NONE  # empty: the verdict is all
    interval: str | None = None
    verdict: Verdict | None = None
    against: str | None = None  # baseline
    detail: str | None = None  # a second value that belongs to the first
    bar: Bar | None = None  # the interval, drawn

    @classmethod
    def of(cls, found: Estimated | None, scale: float = 1.0, digits: int | None = None) -> "Entry":
        """Return the entry of a value and its interval, both multiplied by `scale`; without a value that of nothing."""
        if found is None or found.value is None:
            return cls()
        return cls(number(scale * found.value, digits), interval(bounds(found), scale, digits))

    @property
    def tone(self) -> Tone:
        return (self.verdict or Verdict.of(self.value)).tone

    @property
    def words(self) -> bool:
        """Whether the value is words, which may wrap, and not a number."""
        return self.value[:1].isalpha()

    @property
    def light(self) -> bool:
        """Whether the value is not to be emphasised: it has no interval, or it cannot be trusted."""
        return self.interval is None or (self.verdict is not None and self.verdict.word == DISTURBED)

    def line(self) -> str:
        """Return the whole entry on one line."""
        value, verdict = self.value, self.verdict
        if self.interval:
            value += f" {self.interval}" if self.interval.startswith("[") else f", {self.interval}"
        if self.detail:
            value += f", {self.detail}"
        if verdict is None:
            return f"{value} (against {self.against})" if self.against else value
        if not value:
            return f"{verdict.sign} {verdict.word}"
        if not self.against:
            return f"{value}, {verdict.text}"
        if verdict.text in COMPARATIVES:
            return f"{value}, {verdict.text} than {self.against}"
        return f"{value}, {verdict.text} (against {self.against})"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm, cell or task. A row without entries has failed."""

    name: str
    entries: Sequence[Entry]
    number: int | None = None
    about: str = ""  # a second name below the first: the id of an arm
    group: str = ""  # consecutive rows of one group stand under its name
    notes: Sequence[tuple[str, str]] = ()  # (kind, text), kind one of KINDS
    tags: Sequence[str] = ()  # words that stand next to the name everywhere
    strong: bool = False

    @property
    def failed(self) -> bool:
        return not self.entries

    @property
    def distrusted(self) -> bool:
        return self.failed or "void" in self.tags


@dataclass(frozen=True, slots=True)
class Table:
    """Headings with their meanings, and the rows under them. `of` says what a row is: an arm, a cell, a task."""

    kind: ClassVar[str] = "table"
    columns: Sequence[tuple[str, str]]  # heading, meaning; without a meaning, the heading says all
    rows: Sequence[Row]
    of: str = "arm"
    caption: str = ""
    leading: bool = False  # a table that readers look for: notes beside the rows; on a phone, a card for each row
    text: bool = False  # all places are words, as in a list of versions
    brief: Sequence[str] = ()  # headings that the terminal shows, the most important first; empty: all

    def filled(self) -> "Table":
        """Return the table without the columns in which nothing was measured."""
        full = [row for row in self.rows if row.entries]
        kept = [place for place in range(len(self.columns)) if any(row.entries[place].line() != NONE for row in full)]
        return self.only(kept) if full else self

    def only(self, places: Sequence[int]) -> "Table":
        """Return the table with the columns at these places."""
        rows = [replace(row, entries=[row.entries[p] for p in places] if row.entries else []) for row in self.rows]
        return replace(self, columns=[self.columns[place] for place in places], rows=rows)


@dataclass(frozen=True, slots=True)
class Figure:
    """A drawing, its caption, and its content in words. Its files are figures/<name>.svg and .png."""

    kind: ClassVar[str] = "figure"
    name: str  # unique in the document
    title: str
    caption: str
    alt: str
    svg: str
    png: bytes
    source: str  # the note below the drawing in its files; on a page it is text, which a phone can show
    bare: str  # the drawing as SVG without it


@dataclass(frozen=True, slots=True)
class Pairs:
    """Facts: a name and a text each."""

    kind: ClassVar[str] = "pairs"
    rows: Sequence[tuple[str, str]]
    code: Collection[str] = ()  # names whose text is a command or options
    links: Mapping[str, str] = field(default_factory=dict)  # name -> address


@dataclass(frozen=True, slots=True)
class Notes:
    """Explanations, each with its heading: how to read the document."""

    kind: ClassVar[str] = "notes"
    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph. role: facts (small), mark (a disclaimer), remark."""

    kind: ClassVar[str] = "text"
    text: str
    role: str = ""


@dataclass(frozen=True, slots=True)
class Points:
    """A list of sentences, or of verdicts with their reasons. Rows may refer to the number of a point."""

    kind: ClassVar[str] = "points"
    points: Sequence[str | Verdict]
    numbered: bool = False


@dataclass(frozen=True, slots=True)
class Beside:
    """Blocks beside each other where there is room: figures, and a table that belongs to them."""

    kind: ClassVar[str] = "beside"
    blocks: "Sequence[Block]"


@dataclass(frozen=True, slots=True)
class Part:
    """A heading and its blocks inside a section. Folded: shown on demand, and not in the terminal."""

    kind: ClassVar[str] = "part"
    heading: str
    blocks: "Sequence[Block]"
    folded: bool = True
    open: bool = False  # of a folded part: shown at first


@dataclass(frozen=True, slots=True)
class Widget:
    """A part that only the page has: trusted HTML, and its script and style."""

    kind: ClassVar[str] = "widget"
    html: str
    script: str = ""
    style: str = ""


Block = Table | Figure | Pairs | Notes | Text | Points | Beside | Part | Widget


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its blocks. Folded: background, shown on demand, and not in the terminal."""

    heading: str
    blocks: Sequence[Block]
    folded: bool = False
    anchor: str = ""  # id in the page; empty: made from the heading
    link: str = ""  # its name in the list of sections; empty: the heading


@dataclass(frozen=True, slots=True)
class Document:
    """The document of one experiment, in reading order."""

    title: str
    lead: str  # the first sentence: what was found
    open: bool = False  # the lead is no decision
    steps: Sequence[tuple[str, str]] = ()  # what to do next: words, and a command to copy or an empty text
    subject: str = ""  # what was measured, on what
    sections: Sequence[Section] = ()
    verdict: Verdict | None = None  # on the whole; stands before the title's reason
    marks: Sequence[str] = ()  # disclaimers, which everybody must read first
    warnings: Sequence[str] = ()
    picture: Figure | None = None  # beside the first sentence
    source: str = ""  # the file that it was made from

    @property
    def name(self) -> str:
        """The title of the file: what everybody must know first."""
        return ". ".join(self.marks) or self.heading

    @property
    def heading(self) -> str:
        """The title after the word of the verdict."""
        return self.title if self.verdict is None else f"{self.verdict.word}: {self.title}"

    def figures(self) -> list[Figure]:
        """Return all figures, in order."""
        found = [] if self.picture is None else [self.picture]
        return found + [figure for section in self.sections for figure in _figures(section.blocks)]


def _figures(blocks: Sequence[Block]) -> list[Figure]:
    found: list[Figure] = []
    for block in blocks:
        if isinstance(block, Figure):
            found.append(block)
        elif isinstance(block, Beside | Part):
            found += _figures(block.blocks)
    return found

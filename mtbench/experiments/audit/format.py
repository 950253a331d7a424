"""The files of an audit as records: a line of judged.jsonl for each differing answer, and audit.json.

Shortfalls are distances of a token's logit below the largest at its position; with a temperature, of logits with the
sampling noise of the answer's seed; with top-k, top-p or min-p, also of its logit from their limits. Indices of tokens
count from the first token of the answer, 0.
"""

from typing import Annotated

from pydantic import Field

from mtbench.experiments.audit.request import AuditRequest
from mtbench.records import Count, Record, Share, StoredCount, StoredQuantity, Text, VersionOne

ClassName = Annotated[str, Field(description="name of a class, an entry of `classes`")]


class SideJudged(Record):
    """One side's tokens from the first difference on, as the judge sees them. Empty: the side has ended."""

    text: str = Field(description="text of the first of them")
    probabilities: list[Share] = Field(description="probability of each, at the temperature of the answer or at 1")
    short: dict[str, StoredQuantity] = Field(description="by index, the shortfall of each that is no choice")
    outside: dict[str, StoredQuantity] = Field(
        default_factory=dict, description="by index, how far a filter's limit must move to keep each that it removes"
    )
    endless: StoredQuantity | None = Field(description="largest shortfall without end tokens; null: all are choices")


NOT_JUDGED = SideJudged(text="", probabilities=[], short={}, endless=None)


class NoiseLine(Record):
    """A line of noise.jsonl: how far logits in a number type are from those of the judge."""

    dtype: Text = Field(description="number type")
    positions: Count = Field(description="tokens at which it was measured")
    spread: StoredQuantity | None = Field(description="RMS change of the two best logits' distance; null: none is near")


class JudgedLine(Record):
    """A line of judged.jsonl: the first difference of two answers, judged by the reference model."""

    pair: Count = Field(description="index of the pair of arms")
    item: str = Field(description="name of the item")
    first: StoredCount = Field(description="index of the first token that differs")
    side_a: SideJudged = Field(description="A's tokens from there on")
    side_b: SideJudged = Field(description="B's tokens from there on")


class PairRecord(Record):
    """Two arms whose answers are compared."""

    a: Text = Field(description="A: file or directory, and the cell in it")
    b: Text = Field(description="B: file or directory, and the cell in it")
    suite: str | None = Field(description="suite of both; null: the files name none")
    items: Count = Field(description="items that both have answered")
    noise: StoredQuantity = Field(description="shortfall up to which rounding may choose a token of A or B")


class Divergence(Record):
    """An item whose answers or scores differ."""

    pair: Count = Field(description="index of the pair of arms")
    item: str = Field(description="name of the item")
    name: ClassName
    fault: bool = Field(description="true: a defect, a broken plan, or not explained")
    evidence: Text = Field(description="what the class was decided by, alike in all answers of one cause")
    here: str = Field(description="what was seen in this answer; empty: nothing more")
    first: StoredCount | None = Field(description="index of the first token that differs; null: no token does")
    off_from: StoredCount | None = Field(description="index of the first token that is off; null: none is")
    off_by: StoredQuantity | None = Field(description="its shortfall")
    judged: JudgedLine | None = Field(description="the first difference; null: no token was judged")


class ClassCount(Record):
    """A class and its answers."""

    name: ClassName
    answers: Count = Field(description="answers of the class")
    faults: Count = Field(description="those of them that are a defect, or not explained")
    says: Text = Field(description="what the class means")


class Audit(Record):
    """audit.json: why two outputs differ."""

    schema_version: VersionOne = Field(description="version of this format")
    request: AuditRequest = Field(description="options of `mtbench audit`")
    model: str | None = Field(description="checkpoint that judged; null: nothing had to be judged")
    sentence: Text = Field(description="what was found")
    explained: bool = Field(description="true: every difference is explained, and none is a fault")
    pairs: list[PairRecord] = Field(description="pairs of arms")
    classes: list[ClassCount] = Field(description="classes and their answers")
    findings: list[Divergence] = Field(description="items whose answers or scores differ")
    notes: list[str] = Field(description="what was left out or could not be known")

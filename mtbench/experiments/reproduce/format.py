"""A published table and its reproduction as records: published/*.json, asked.json, reproduction.json.

Figures of a table are stored as they are printed, so that their digits show the rounding.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, StringConstraints

from mtbench.experiments.reproduce.agreement import Word
from mtbench.experiments.reproduce.request import ReproduceRequest as ReproduceRequest
from mtbench.records import Count, NotNull, Record, Size, Sparse, Text
from mtbench.results.figure_formats import Estimate

AVERAGE = "average"  # in place of a benchmark: the unweighted mean of all of them

Quantity = Literal[
    "accuracy",
    "accuracy_change",
    "tokens_per_forward",
    "acceptance_length",
    "tokens_per_s",
    "wall_s",
    "speedup",
]


class Kind(NamedTuple):
    """How figures of a quantity are shown."""

    words: str
    unit: str  # a share's margin is in points, a rate's in percent
    digits: int
    signed: bool = False

    @property
    def is_share(self) -> bool:
        """Whether figures are computed as shares and shown in percent or points; else they are rates or times."""
        return self.unit in ("%", "points")


KINDS: Mapping[Quantity, Kind] = {
    "accuracy": Kind("accuracy, %", "%", 1),
    "accuracy_change": Kind("change, points", "points", 1, signed=True),
    "tokens_per_forward": Kind("tokens/forward", "", 2),
    "acceptance_length": Kind("accepted length", "", 2),
    "tokens_per_s": Kind("tokens/s", "", 1),
    "wall_s": Kind("seconds", "s", 1),
    "speedup": Kind("speedup", "", 2),
}

Printed = Annotated[str, StringConstraints(pattern=r"^[+-]?[0-9]{1,3}(,[0-9]{3})*(\.[0-9]+)?$")]


class Source(Record):
    """The paper that a table is from."""

    arxiv: Text = Field(description="arXiv identifier")
    version: int = Field(description="version of the paper")
    title: Text = Field(description="title of the paper")
    authors: Text = Field(description="authors of the paper")
    table: int = Field(description="number of the table")
    section: str | None = Field(description="section of the paper; null: the table stands for itself")
    licence: Text = Field(description="licence of the paper")


class Setup(Record):
    """How the paper measured."""

    gpu: str | None = Field(description="GPU; null: not stated")
    engine: Text = Field(description="engine")
    batch_size: str | None = Field(description="batch size; null: not stated")
    max_new_tokens: Size = Field(description="most tokens of an answer")
    decoding: Text = Field(description="how tokens were chosen, number type, prompt format")
    counting: Text = Field(description="which tokens, which forwards and which seconds count")


class Aside(Record):
    """A figure that the paper gives beside the table."""

    what: Text = Field(description="what the figure is of")
    value: Text = Field(description="the figure as it is printed")


class Benchmark(Record):
    """A benchmark of a table."""

    suite: Text = Field(description="suite, as `mtbench run --suite` takes it")
    items: Size = Field(description="items of the published figure")


class TablePlan(Sparse):
    """The defaults of a reproduction."""

    batch_sizes: list[Size] = Field(min_length=1, description="batch sizes")
    rounds: Size = Field(description="how many times the first blocks are timed")
    limit: int | None = Field(description="most items per suite or subtask; null: all items")
    engine: Text = Field(description="engine of the methods whose loop is ours")
    temperature: float = Field(0.0, description="sampling temperature; 0: greedy decoding")
    chat_template_kwargs: Mapping[str, bool | int | float | str] = Field(
        default_factory=dict, description="variables of the chat template by name"
    )
    beside: Sequence[Text] = Field((), description="arms that run beside the rows: baselines of times not published")


class PublishedRow(Sparse):
    """One row of a table."""

    row: Text = Field(description="name of the row")
    family: Text = Field(description="family of checkpoints")
    arm: Text = Field(description="one arm, as `mtbench run --method` takes it")
    batch_size: Annotated[Size | None, NotNull()] = Field(
        None, description="batch size; absent: the row's figures do not depend on it"
    )
    against: Mapping[Quantity, Text] = Field(default_factory=dict, description="per quantity, the arm that it is over")
    not_comparable: Mapping[Quantity, Text] = Field(
        default_factory=dict, description="per quantity, why this row's figure cannot be compared"
    )
    note: Annotated[Text | None, NotNull()] = Field(None, description="remark on the row; absent: no remark")
    figures: Annotated[
        Mapping[Quantity, Annotated[Mapping[str, Printed], Field(min_length=1)]], Field(min_length=1)
    ] = Field(
        description="per quantity and benchmark, the figure as it is printed; `average` is the unweighted mean of the "
        "benchmarks"
    )


class AboutTable(Record):
    """A published table, and how its figures were measured."""

    name: Annotated[str, StringConstraints(pattern="^[a-z0-9-]+$")] = Field(description="name of the table")
    title: Text = Field(description="title of the table")
    what: Text = Field(description="what the table shows")
    source: Source = Field(description="the paper")
    setup: Setup = Field(description="how the paper measured")
    caveats: Sequence[Text] = Field(description="what a reader of the comparison must know")
    also: Sequence[Aside] = Field(description="figures given beside the table")


class Published(AboutTable):
    """A published table that `mtbench reproduce` runs."""

    benchmarks: Annotated[Mapping[str, Benchmark], Field(min_length=1)] = Field(description="benchmarks by name")
    plan: TablePlan = Field(description="how the reproduction runs")
    families: Annotated[Mapping[str, Mapping[str, Text]], Field(min_length=1)] = Field(
        description="per family and role, the checkpoint, for roles that the family itself has none for"
    )
    not_comparable: Mapping[Quantity, Text] = Field(description="per quantity, why it can never be compared")
    rows: Sequence[PublishedRow] = Field(min_length=1, description="rows of the table")


class AskedPart(Record):
    """The parts of one family that cannot be run."""

    family: str = Field(description="family of checkpoints")
    missing: dict[str, str] = Field(description="per method, why it is not run")
    closed: dict[str, str] = Field(description="per suite, why it is not run")


class AskedFile(Record):
    """asked.json: the request, and what cannot be run."""

    asked: ReproduceRequest = Field(description="options of `mtbench reproduce`")
    parts: list[AskedPart] = Field(description="what of each family cannot be run")


class FamilyRun(AskedPart):
    """The run of one family."""

    folder: str | None = Field(description="folder of the ordinary run, beside this file; null: nothing was run")
    disclaimers: list[str] = Field(description="disclaimers of every figure, such as that the model is small")


class Figure(Record):
    """One published figure beside ours."""

    row: Text = Field(description="name of the row")
    note: str | None = Field(description="remark on the row; null: no remark")
    family: Text = Field(description="family of checkpoints that the paper measured")
    arm: Text = Field(description="arm, as the table has it")
    benchmark: Text = Field(description="benchmark, or `average` for the unweighted mean")
    suite: str | None = Field(description="suite that ran for the benchmark; null: none, or an average")
    batch_size: int | None = Field(description="batch size of the row; null: the figure does not depend on it")
    quantity: Quantity = Field(description="what the figure is of")
    unit: str = Field(description="unit of the figure")
    published: Printed = Field(description="published figure as it is printed")
    ours: Estimate | None = Field(description="our figure, in the unit of the published one; null: none")
    n: int | None = Field(description="our items; of rates and times, our blocks; null: no figure")
    difference: Estimate | None = Field(
        description="accuracy: ours less theirs, in points; else ours over theirs; null: not comparable"
    )
    word: Word = Field(description="verdict")
    why: str = Field(description="reason of the verdict; empty: the interval says it")


class Reproduction(AboutTable):
    """reproduction.json: every published figure beside ours."""

    schema_version: Literal[2] = Field(description="version of this format")
    asked: ReproduceRequest = Field(description="options of `mtbench reproduce`; null: the table's own value")
    runs: list[FamilyRun] = Field(description="one run for each family")
    verdicts: dict[Word, Count] = Field(description="number of figures by verdict")
    figures: list[Figure] = Field(description="published figures beside ours")

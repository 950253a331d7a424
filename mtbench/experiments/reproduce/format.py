"""A published table and its reproduction as records: published/*.json, asked.json, reproduction.json.

Figures of a table are stored as they are printed, so that their digits tell how they were rounded.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_args

from pydantic import AfterValidator, Field, StringConstraints

from mtbench.experiments.reproduce.agreement import WORDS, Word
from mtbench.experiments.reproduce.request import ReproduceRequest as ReproduceRequest
from mtbench.records import Count, NotNull, Record, Size, Sparse, Text, VersionOne
from mtbench.runs.options import Protocol

SCHEMA_VERSION: Literal[1] = 1
AVERAGE = "average"  # in place of a benchmark: the unweighted mean of all of them

Quantity = Literal[
    "accuracy",
    "accuracy_change",
    "tokens_per_forward",
    "acceptance_length",
    "tokens_per_s",
    "wall_s",
    "speedup",
    "draft_forwards",
    "draft_forwards_change",
]
Unit = Literal["%", "points", "s", ""]
QUANTITIES: tuple[Quantity, ...] = get_args(Quantity)
UNITS: dict[Quantity, Unit] = {  # unit of each quantity; a share's margin is in points, a rate's in percent
    "accuracy": "%",
    "accuracy_change": "points",
    "tokens_per_forward": "",
    "acceptance_length": "",
    "tokens_per_s": "",
    "wall_s": "s",
    "speedup": "",
    "draft_forwards": "",
    "draft_forwards_change": "%",
}

Printed = Annotated[str, StringConstraints(pattern=r"^[+-]?[0-9]{1,3}(,[0-9]{3})*(\.[0-9]+)?$")]


def _no_average(name: str) -> str:
    if name == AVERAGE:
        raise ValueError(f"{AVERAGE!r} is the mean of all benchmarks and cannot name one")
    return name


def _every_word(counts: dict[Word, int]) -> dict[Word, int]:
    if lost := [word for word in WORDS if word not in counts]:
        raise ValueError(f"the word {lost[0]!r} is missing")
    return counts


BenchmarkName = Annotated[str, AfterValidator(_no_average), Field(json_schema_extra={"not": {"const": AVERAGE}})]
WordCounts = Annotated[
    dict[Word, Count], AfterValidator(_every_word), Field(json_schema_extra={"required": list(WORDS)})
]


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
    """How a reproduction runs unless it is asked otherwise."""

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


class Published(Record):
    """A published table that `mtbench reproduce` runs."""

    name: Annotated[str, StringConstraints(pattern="^[a-z0-9-]+$")] = Field(description="name of the table")
    title: Text = Field(description="title of the table")
    what: Text = Field(description="what the table shows")
    source: Source = Field(description="the paper")
    setup: Setup = Field(description="how the paper measured")
    caveats: Sequence[Text] = Field(description="what a reader of the comparison must know")
    also: Sequence[Aside] = Field(description="figures given beside the table")
    benchmarks: Annotated[Mapping[BenchmarkName, Benchmark], Field(min_length=1)] = Field(
        description="benchmarks by name"
    )
    plan: TablePlan = Field(description="how the reproduction runs")
    families: Annotated[Mapping[str, Mapping[str, Text]], Field(min_length=1)] = Field(
        description="per family and role, the checkpoint, for roles that the family itself has none for"
    )
    not_comparable: Mapping[Quantity, Text] = Field(description="per quantity, why it can never be compared")
    rows: Sequence[PublishedRow] = Field(min_length=1, description="rows of the table")


class AskedPart(Record):
    """What of one family cannot be run."""

    family: str = Field(description="family of checkpoints")
    missing: dict[str, str] = Field(description="per method, why it is not run")
    closed: dict[str, str] = Field(description="per suite, why it is not run")


class AskedFile(Record):
    """asked.json: what was asked for, and what cannot be run."""

    asked: ReproduceRequest = Field(description="options of `mtbench reproduce`")
    parts: list[AskedPart] = Field(description="what of each family cannot be run")


class Margins(Record):
    """The margins of the verdicts."""

    accuracy: float = Field(description="margin of a difference of accuracies, as a share")
    rates: float = Field(description="margin of a ratio of rates, as a share")
    level: float = Field(description="level of the intervals")


class RunMachine(Record):
    """The machine that a family ran on. null: nothing was run."""

    device: str | None = Field(description="cpu or cuda")
    dtype: str | None = Field(description="number type of the weights")
    processor: str | None = Field(description="name of the processor")
    gpu: str | None = Field(description="name of the GPU; null: none")


class MissingArm(Record):
    """An arm that is not run."""

    arm: Text = Field(description="arm, as the table has it")
    why: Text = Field(description="why it is not run")


class ClosedSuite(Record):
    """A suite that is not run."""

    suite: Text = Field(description="suite")
    why: Text = Field(description="why it is not run")


class FamilyRun(Record):
    """The run of one family."""

    family: Text = Field(description="family of checkpoints")
    folder: str | None = Field(description="folder of the ordinary run, beside this file; null: nothing was run")
    machine: RunMachine = Field(description="machine of the run")
    engine: str | None = Field(description="engine of the methods whose loop is ours; null: nothing was run")
    batch_sizes: list[int] = Field(description="batch sizes; empty: nothing was run")
    checkpoints: dict[str, Text] = Field(description="path or hub id of the checkpoint by role")
    demonstration: bool = Field(description="true: the family shows the mechanics and says nothing of real models")
    missing: list[MissingArm] = Field(description="arms that are not run")
    closed: list[ClosedSuite] = Field(description="suites that are not run")


class OurFigure(Record):
    """Our figure with its 95 % interval, in the unit of the figure."""

    value: float = Field(description="the figure")
    ci_low: float | None = Field(description="lower bound; null: no interval")
    ci_high: float | None = Field(description="upper bound; null: no interval")
    n: int = Field(description="items; of speedups and times, blocks")


class FigureDifference(Record):
    """How far our figure is from the published one, with its 95 % interval."""

    value: float = Field(description="the difference or the ratio")
    ci_low: float | None = Field(description="lower bound; null: no interval")
    ci_high: float | None = Field(description="upper bound; null: no interval")
    kind: Literal["points", "ratio"] = Field(description="points: ours less theirs; ratio: ours over theirs")


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
    unit: Unit = Field(description="unit of the figure")
    published: Printed = Field(description="published figure as it is printed")
    ours: OurFigure | None = Field(description="our figure; null: none")
    difference: FigureDifference | None = Field(description="how far ours is from theirs; null: not comparable")
    word: Word = Field(description="verdict")
    why: str = Field(description="reason of the verdict; empty: the interval says it")


class AccountingLine(Record):
    """Tokens per forward of one cell, by our accounting and by the paper's."""

    family: Text = Field(description="family of checkpoints")
    suite: Text = Field(description="suite")
    arm: Text = Field(description="arm")
    batch_size: int = Field(description="batch size")
    items: int = Field(description="answered items")
    tokens_per_forward: float = Field(description="our tokens per forward")
    tokens_after_the_end: int | None = Field(
        description="tokens that the last forward accepted after the end of an answer; null: not stored"
    )
    paper_tokens_per_forward: float | None = Field(
        description="tokens per forward with these tokens counted; null: not stored"
    )
    tokens_per_forward_with_prompt_forward: float = Field(
        description="our tokens per forward with one forward more per answer, for the prompt"
    )


class Reproduction(Record):
    """reproduction.json: every published figure beside ours."""

    schema_version: VersionOne = Field(description="version of this format")
    name: Text = Field(description="name of the table")
    title: Text = Field(description="title of the table")
    what: Text = Field(description="what the table shows")
    source: Source = Field(description="the paper")
    setup: Setup = Field(description="how the paper measured")
    caveats: Sequence[Text] = Field(description="what a reader of the comparison must know")
    also: Sequence[Aside] = Field(description="figures given beside the table")
    asked: ReproduceRequest = Field(description="options of `mtbench reproduce`; null: the table's own value")
    protocol: Protocol = Field(description="own: stop strings end the decoding; paper: they cut the scored text")
    margins: Margins = Field(description="margins of the verdicts")
    runs: list[FamilyRun] = Field(description="one run for each family")
    verdicts: WordCounts = Field(description="number of figures by verdict")
    figures: list[Figure] = Field(description="published figures beside ours")
    accounting: list[AccountingLine] = Field(description="tokens per forward of every cell that counts its forwards")

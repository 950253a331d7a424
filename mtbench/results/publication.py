"""Published tables, and our figures beside them. The tables are in published/, one file each.

A published figure is **inside** if it lies in our 95 % interval; it is rounded, so the interval is wider by half a
unit of its last digit. It is compared only if the run has the settings of the paper; else the figure has the reasons.
Fewer questions of the same benchmark measure the same with a wider interval.

**MARS** (arXiv 2604.07023) counts in its tokens per forward what the last forward accepted after the end of the answer,
and does not stop at stop strings; `--protocol paper` decodes so and stores those tokens (`surplus`). Its first forward
holds the prompt and commits. Ours caches the prompt and feeds its last token again. So both have the same number of
forwards that commit.

**DSpark** (arXiv 2607.05147, DeepSpec's evaluator) counts in its accepted length the tokens up to the end token, and
what the last forward accepted beyond the token budget, over the forwards that committed any, pooled over all answers.
Its prefill emits a token that it does not count; ours commits the first token with the first verification.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, StringConstraints

from mtbench import statistics
from mtbench.decoding.arms import parse_arms
from mtbench.errors import unknown
from mtbench.evaluation.registry import SUITES
from mtbench.plan.plan import Plan
from mtbench.plan.request import SamplingOptions
from mtbench.records import NotNull, Record, Size, Sparse, Text, read_json
from mtbench.results.comparisons import wall_ratio
from mtbench.results.figure_formats import Estimate, Printed, PublishedFigure, Quantity
from mtbench.results.format import ResultCell
from mtbench.results.samples import CellData

FOLDER = Path(__file__).parent / "published"
AVERAGE = "average"  # in place of a benchmark: the unweighted mean of all of them
PAPER, EAGER = "paper", "eager"  # the protocol of papers, and the engine that they measure with


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


class TablePlan(SamplingOptions, Sparse):
    """The settings of a reproduction."""

    batch_sizes: list[Size] = Field(min_length=1, description="batch sizes")
    rounds: Size = Field(description="how many times the first blocks are timed")
    limit: int | None = Field(description="most items per suite or subtask; null: all items")
    engine: Text = Field(description="engine of the methods whose loop is ours")
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
    figures: Annotated[
        Mapping[Quantity, Annotated[Mapping[str, Printed], Field(min_length=1)]], Field(min_length=1)
    ] = Field(
        description="per quantity and benchmark, the figure as it is printed; `average` is the unweighted mean of the "
        "benchmarks"
    )


class Published(Record):
    """A published table that `mtbench reproduce` runs. Figures are as printed, so that digits show the rounding."""

    name: Annotated[str, StringConstraints(pattern="^[a-z0-9-]+$")] = Field(description="name of the table")
    title: Text = Field(description="title of the table")
    what: Text = Field(description="what the table shows")
    source: Source = Field(description="the paper")
    setup: Setup = Field(description="how the paper measured")
    caveats: Sequence[Text] = Field(description="what a reader of the comparison must know")
    also: Sequence[Aside] = Field(description="figures given beside the table")
    benchmarks: Annotated[Mapping[str, Benchmark], Field(min_length=1)] = Field(description="benchmarks by name")
    plan: TablePlan = Field(description="how the reproduction runs")
    families: Annotated[Mapping[str, Mapping[str, Text]], Field(min_length=1)] = Field(
        description="per family and role, the checkpoint, for roles that the family itself has none for"
    )
    not_comparable: Mapping[Quantity, Text] = Field(description="per quantity, why it can never be compared")
    rows: Sequence[PublishedRow] = Field(min_length=1, description="rows of the table")

    def rows_of(self, family: str | None) -> list[PublishedRow]:
        """Return the rows that a family runs: its own, or all if it is none of the table's."""
        return [row for row in self.rows if row.family == family or family not in self.families]

    def specs(self, family: str | None) -> list[str]:
        """Return the arms of a family's rows and their baselines, as `--method` takes them."""
        every = (spec for row in self.rows_of(family) for spec in (row.arm, *row.against.values()))
        return list(dict.fromkeys([*self.plan.beside, *every]))

    def suites(self, given: Sequence[str]) -> dict[str, str]:
        """Return benchmark -> suite that runs for it: its own, or one of other suites, which replace all."""
        own = {name: benchmark.suite for name, benchmark in self.benchmarks.items()}
        if set(given) <= set(own.values()):
            return {name: suite for name, suite in own.items() if suite in given}
        return {name: given[place % len(given)] for place, name in enumerate(own)}


def names() -> list[str]:
    """Return the names of the published tables."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def published(name: str) -> Published:
    """Return a published table. Raises UserError with the choices for an unknown name."""
    if name not in names():
        raise unknown("published table", name, names(), "mtbench reproduce")
    return read_json(FOLDER / f"{name}.json", Published)


def number(printed: str) -> float:
    """Return the value of a printed figure.

    >>> number("24,857"), number("-5.8")
    (24857.0, -5.8)
    """
    return float(printed.replace(",", ""))


def half_unit(printed: str) -> float:
    """Return half a unit of the last digit: the largest rounding error of a printed figure.

    >>> half_unit("24,857"), half_unit("+1.0"), half_unit("1.50")
    (0.5, 0.05, 0.005)
    """
    digits = len(printed.partition(".")[2])
    return round(0.5 * 10.0**-digits, digits + 1)


class Ran(NamedTuple):
    """A cell that ran: its stored lines, and its figures."""

    data: CellData
    result: ResultCell


def compare(table: Published, plan: Plan, ran: Sequence[Ran]) -> list[PublishedFigure]:
    """Return every figure of the rows that a plan's family runs, beside ours."""
    cells = {(cell.result.suite, cell.result.arm, cell.result.batch_size): cell for cell in ran}
    run = _Comparison(table, plan, table.suites(plan.request.suite), cells)
    return [
        run.figure(row, quantity, benchmark, printed)
        for row in table.rows_of(plan.request.family)
        for quantity, by_benchmark in row.figures.items()
        for benchmark, printed in by_benchmark.items()
    ]


@dataclass(frozen=True, slots=True)
class _Comparison:
    """A table and a run. `suites`: that ran, by benchmark. `cells`: by suite, arm and batch size."""

    table: Published
    plan: Plan
    suites: Mapping[str, str]
    cells: Mapping[tuple[str, str, int], Ran]

    def figure(self, row: PublishedRow, quantity: Quantity, benchmark: str, printed: str) -> PublishedFigure:
        """Return one figure; of an average, a suite that replaces several benchmarks counts once."""
        every = [*{self.suites.get(name, name): name for name in self.table.benchmarks}.values()]
        found = [self._measured(row, quantity, name) for name in (every if benchmark == AVERAGE else [benchmark])]
        ours = _mean([estimate for estimate, _ in found])
        why, inside = next((why for _, why in found if why), "" if ours.value is not None else "not measured"), None
        if not why and ours.ci_low is not None and ours.ci_high is not None:
            reach, theirs = half_unit(printed), number(printed)
            inside = ours.ci_low - reach <= theirs <= ours.ci_high + reach
        return PublishedFigure(
            row=row.row,
            arm=row.arm,
            benchmark=benchmark,
            quantity=quantity,
            published=printed,
            ours=ours,
            inside=inside,
            why=why,
        )

    def _cell(self, row: PublishedRow, spec: str, benchmark: str) -> Ran | None:
        request = self.plan.request
        arm = str(parse_arms([spec], request.engine)[0])
        return self.cells.get((self.suites.get(benchmark, ""), arm, row.batch_size or max(request.batch_size)))

    def _measured(self, row: PublishedRow, quantity: Quantity, benchmark: str) -> tuple[Estimate, str]:
        """Return our figure in the published unit, and why it cannot be compared; empty: it can."""
        over = row.against.get(quantity)
        cells = [self._cell(row, spec, benchmark) for spec in ([row.arm] if over is None else [row.arm, over])]
        ran = [cell for cell in cells if cell is not None and cell.result.status == "ok"]
        if len(ran) < len(cells):
            return Estimate.of(None), "not run"
        reasons = [*self._other_settings(row, quantity, benchmark, ran[0].result)]
        reasons += [f"void: {reason}" for cell in ran for reason in cell.result.void]
        surplus = all(line.surplus is not None for line in ran[0].data.lines.values())
        if quantity == "tokens_per_forward" and not surplus:
            reasons.append("tokens accepted after the end are not stored")
        return _ours(quantity, ran[0], ran[-1]), ", ".join(reasons)

    def _other_settings(
        self, row: PublishedRow, quantity: Quantity, benchmark: str, result: ResultCell
    ) -> Iterator[str]:
        theirs, most = self.table.benchmarks[benchmark], self.table.setup.max_new_tokens
        if result.family != row.family:
            yield f"family {result.family}"
        if result.suite != theirs.suite:
            yield f"suite {result.suite}"
        elif result.items > theirs.items or (result.items < theirs.items and SUITES[theirs.suite].subtasks):
            yield f"{result.items:,} items, theirs {theirs.items:,}"
        if left_out := result.task.get("left_out", {}).get("items", 0):
            yield f"{left_out} items left out, which cannot be scored here"
        if result.max_new_tokens != most:
            yield f"{result.max_new_tokens} new tokens, theirs {most}"
        if self.plan.request.sampling != self.table.plan.sampling:
            yield f"{self.plan.request.sampling}, theirs {self.table.plan.sampling}"
        if result.simulated is not None:
            yield "simulated"
        if quantity in ("speedup", "tokens_per_forward") and self.plan.request.protocol != PAPER:
            yield "stop strings end an answer, theirs do not"
        if row.against.get(quantity) == row.arm:
            yield "it is its own baseline"
        if quantity == "speedup":
            wanted = {"device": "cuda", "engine": EAGER, "dtype": "bfloat16"}
            had = {name: getattr(result, name) for name in wanted}
            yield from (f"{had[name]}, theirs {of}" for name, of in wanted.items() if had[name] not in (None, of))
        yield from (marks[quantity] for marks in (row.not_comparable, self.table.not_comparable) if quantity in marks)


def _ours(quantity: Quantity, ran: Ran, baseline: Ran) -> Estimate:
    """Return our figure of a cell in the published unit; all null if it was not measured."""
    data, result = ran
    match quantity:
        case "accuracy":
            share = result.accuracy
            return Estimate.of(None) if share is None else _percent(share.value, share.ci_low, share.ci_high)
        case "accuracy_change":
            change = statistics.paired_difference(*statistics.gains_and_losses(data.scores, baseline.data.scores))
            return _percent(change.difference, change.ci_low, change.ci_high)
        case "tokens_per_s":
            return result.tokens_per_s
        case "wall_s":
            return Estimate(value=result.wall_s, ci_low=None, ci_high=None)
        case "speedup":
            return Estimate.of(wall_ratio(data, baseline.data))
    counts = data.tokens_and_steps() if quantity == "acceptance_length" else data.tokens_and_forwards(with_surplus=True)
    return Estimate.of(None if counts is None else statistics.ratio_of_totals([counts[0]], [counts[1]]))


def _percent(*share: float | None) -> Estimate:
    value, low, high = (None if bound is None else 100 * bound for bound in share)
    return Estimate(value=value, ci_low=low, ci_high=high)


def _mean(parts: Sequence[Estimate]) -> Estimate:
    """Return the unweighted mean of independent figures; its interval is null if one of them has none."""
    values = [part.value for part in parts if part.value is not None]
    if len(values) < len(parts):
        return Estimate.of(None)
    value = sum(values) / len(parts)
    reaches = [
        (part.value - part.ci_low, part.ci_high - part.value)
        for part in parts
        if part.value is not None and part.ci_low is not None and part.ci_high is not None
    ]
    if len(reaches) < len(parts):
        return Estimate(value=value, ci_low=None, ci_high=None)
    below, above = (math.hypot(*side) / len(parts) for side in zip(*reaches, strict=True))
    return Estimate(value=value, ci_low=value - below, ci_high=value + above)

"""Compare every published figure with ours, from the runs of a reproduction (rerun.py).

agreement.py defines the verdicts. A figure is **not comparable** if ours measures something else: a
miniature (another family, benchmark or token budget, a part of each subtask, simulated weights); for times, another
engine, device or batch size than the paper's; another accounting. A figure that the published file marks as not
comparable stays so, for example a time whose GPU is not stated. Fewer questions of the same benchmark measure the same
thing with a wider interval. A row without a checkpoint is **not run**; its reason names the command that would run it,
and the other rows still run. The same holds for a benchmark without data or sandbox.

**The paper's accounting** of tokens per forward (arXiv 2604.07023, as its samplers count) differs from ours in two
ways. It counts the tokens that the last forward accepted after the end of the answer, and it does not stop at stop
strings; `--protocol paper` decodes so and stores those tokens (`surplus`). Its sampler has no forward that only reads
the prompt: its first forward commits. Ours caches the prompt and feeds its last token again. So both have the same
number of forwards that commit, and neither counts the prompt's.

**Accepted length** (arXiv 2607.05147, as DeepSpec's evaluator counts): tokens up to the end token, and what the last
forward accepted beyond the token budget, over the forwards that committed any, pooled over all answers
(mtbench/results/acceptance.py, `deepspec`). Its prefill emits a token that it does not count; ours commits the first
token with the first verification.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtbench import statistics
from mtbench.document.formatting import Spread, bounds
from mtbench.evaluation.registry import SUITES
from mtbench.experiments.reproduce import agreement
from mtbench.experiments.reproduce.agreement import WORDS, Finding, Measured
from mtbench.experiments.reproduce.format import (
    AVERAGE,
    KINDS,
    AboutTable,
    FamilyRun,
    Figure,
    Published,
    PublishedRow,
    Quantity,
    ReproduceRequest,
    Reproduction,
)
from mtbench.experiments.reproduce.rerun import EAGER, PAPER, RESULT, Part, arm_of, stands_in, suites_of
from mtbench.plan.directory import RunDirectory
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.report.phrases import disclaimers
from mtbench.results import samples
from mtbench.results.comparisons import wall_ratio
from mtbench.results.figure_formats import Estimate
from mtbench.results.format import ResultCell, Results
from mtbench.results.samples import CellData
from mtbench.statistics import ACCURACY_MARGIN, SPEED_MARGIN


class NotRunError(Exception):
    """There is no cell of ours for a published figure. The message says why."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A cell that ran: its stored lines, and its figures in results.json."""

    data: CellData
    result: ResultCell


@dataclass(frozen=True, slots=True)
class FamilyResults:
    """The run of one family: its cells by suite, arm and batch size."""

    part: Part
    suites: dict[str, str]  # benchmark -> suite that ran for it
    cells: dict[tuple[str, str, int], Ran]

    def cell(self, spec: str, benchmark: str, batch_size: int | None) -> Ran:
        """Return the cell of an arm on a benchmark. Raises NotRunError."""
        suite = self.suites.get(benchmark, "")
        reasons = {"": "left out by --suite"} | self.part.closed | self.part.missing
        if reason := reasons.get(spec, reasons.get(suite)):
            raise NotRunError(reason)
        assert self.part.plan is not None
        request = self.part.plan.request
        size = batch_size or max(request.batch_size)
        if size not in request.batch_size:
            raise NotRunError(f"batch size {size} was not asked for; leave `--batch-size` out")
        ran = self.cells.get((suite, str(arm_of(spec, request.engine)), size))
        status = "failed" if ran is None else ran.result.status
        if ran is None or status != "ok":
            raise NotRunError(f"{status}: {(ran and ran.result.error) or '`--resume` continues the run'}")
        return ran


@dataclass(frozen=True, slots=True)
class Pair:
    """Our cell for a published figure on one benchmark, and the cell of the arm that the figure is over."""

    benchmark: str
    ran: Ran
    baseline: Ran | None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a published figure stands: its table, row and quantity, and our results of the family."""

    table: Published
    request: ReproduceRequest
    row: PublishedRow
    quantity: Quantity
    family: FamilyResults | None  # None: the family was not run

    def suite(self, benchmark: str) -> str | None:
        """Return the suite that ran for a benchmark; None if none did."""
        return None if self.family is None else self.family.suites.get(benchmark)

    def pair(self, benchmark: str) -> Pair:
        """Return the cells for the figure on a benchmark. Raises NotRunError."""
        if self.family is None:
            raise NotRunError("left out by --family")
        ran = self.family.cell(self.row.arm, benchmark, self.row.batch_size)
        over = self.row.against.get(self.quantity)
        baseline = None if over is None else self.family.cell(over, benchmark, self.row.batch_size)
        return Pair(benchmark, ran, baseline)


def compare(table: Published, request: ReproduceRequest, parts: Sequence[Part], folder: Path) -> Reproduction:
    """Compare every published figure with ours, and write reproduction.json."""
    opened = {part.family: _open(table, request, part, folder) for part in parts}
    stand_in = request.family if stands_in(table, request) else None
    figures = [
        _figure(Place(table, request, row, quantity, opened.get(stand_in or row.family)), benchmark, printed)
        for row in table.rows
        for quantity, by_benchmark in row.figures.items()
        for benchmark, printed in by_benchmark.items()
    ]
    result = Reproduction(
        **{name: getattr(table, name) for name in AboutTable.model_fields},
        schema_version=2,
        asked=request,
        runs=[
            FamilyRun(
                family=family.part.family,
                missing=family.part.missing,
                closed=family.part.closed,
                folder=None if family.part.plan is None else family.part.folder,
                disclaimers=disclaimers([ran.result for ran in family.cells.values()]),
            )
            for family in opened.values()
        ],
        verdicts={word: sum(figure.word == word for figure in figures) for word in WORDS},
        figures=figures,
    )
    RunDirectory(folder).write_json(RESULT, dump(result))
    return result


def _open(table: Published, request: ReproduceRequest, part: Part, folder: Path) -> FamilyResults:
    """Read the results of a family's run, if there are any."""
    cells, run = {}, RunDirectory(folder / part.folder)
    if part.plan is not None and run.has("results.json"):
        data = samples.read(Run.open(run))
        for result in run.read("results.json", Results).cells:
            cells[result.suite, result.arm, result.batch_size] = Ran(data[result.cell], result)
    return FamilyResults(part, suites_of(table, request), cells)


def _figure(place: Place, benchmark: str, printed: str) -> Figure:
    """Return one figure of reproduction.json."""
    row, kind, published = place.row, KINDS[place.quantity], agreement.number(printed)
    names = [benchmark]
    if benchmark == AVERAGE:  # a suite that replaces several benchmarks counts once
        names = [*{place.suite(name) or name: name for name in place.table.benchmarks}.values()]
    ours, finding = _compared(place, names, printed)
    difference = finding.difference and _shown(finding.difference)
    if difference and not kind.is_share:  # ours over theirs
        difference = Estimate(**{name: None if x is None else 1 + x / published for name, x in difference})
    return Figure(
        row=row.row,
        note=row.note,
        family=row.family,
        arm=row.arm,
        benchmark=benchmark,
        suite=place.suite(benchmark),
        batch_size=row.batch_size,
        quantity=place.quantity,
        unit=kind.unit,
        published=printed,
        ours=ours and _shown(ours),
        n=ours and ours.n,
        difference=difference,
        word=finding.word,
        why=finding.why,
    )


def _shown(found: Measured) -> Estimate:
    low, high = (None if math.isinf(x) else x for x in (found.value - found.below, found.value + found.above))
    return Estimate(value=found.value, ci_low=low, ci_high=high)


def _compared(place: Place, names: Sequence[str], printed: str) -> tuple[Measured | None, Finding]:
    """Return our figure, a mean over several benchmarks, and the verdict."""
    try:
        pairs = [place.pair(name) for name in names]
    except NotRunError as why:
        return None, Finding("not run", str(why))
    measured = [_measure(place, pair) for pair in pairs]
    parts = [part for part in measured if part is not None]
    ours = agreement.mean(parts) if len(parts) == len(pairs) else None
    reason = next((reason for pair in pairs for reason in _not_comparable(place, pair)), None)
    if reason is not None or ours is None:
        return ours, Finding("not comparable", reason or "nothing was measured, or the engine does not expose it")
    value, rounding = agreement.number(printed), agreement.half_unit(printed)
    if not KINDS[place.quantity].is_share:
        return ours, agreement.judge(ours, Measured(value, 0, 0, 0), rounding, SPEED_MARGIN * value, "block")
    items = [place.table.benchmarks[name].items for name in names]
    if place.quantity == "accuracy":  # the parts of a mean have about our values
        values = [value] if len(parts) == 1 else [part.value for part in parts]
        theirs = agreement.mean([*map(agreement.share, values, items)])
    else:  # it is the difference of two rounded figures
        rounding, theirs = 2 * rounding, agreement.mean([part.on(n) for part, n in zip(parts, items, strict=True)])
    return ours, agreement.judge(ours, theirs._replace(value=value), rounding, 100 * ACCURACY_MARGIN)


def _measure(place: Place, pair: Pair) -> Measured | None:
    """Return our figure; None if there is none."""
    data, result, baseline = pair.ran.data, pair.ran.result, pair.baseline
    match place.quantity:
        case "accuracy":
            accuracy = result.accuracy
            return None if accuracy is None else _found(accuracy.value, accuracy, accuracy.n, 100)
        case "tokens_per_forward":  # by the paper's accounting if the run follows its protocol, else by ours
            with_surplus = place.request.protocol == PAPER and _stores_surplus(data)
            return _rate(data.tokens_and_forwards(with_surplus=with_surplus))
        case "acceptance_length":
            return _rate(data.tokens_and_steps())
        case "tokens_per_s":
            return _found(result.tokens_per_s.value, result.tokens_per_s, result.blocks)
        case "wall_s":
            return _found(result.wall_s, None, result.blocks)
    assert baseline is not None, f"{place.quantity} is over another arm"
    if place.quantity == "speedup":
        ratio = wall_ratio(data, baseline.data)
        return _found(ratio.value, ratio, ratio.units)
    change = statistics.paired_difference(*statistics.gains_and_losses(data.scores, baseline.data.scores))
    return _found(change.difference, change, change.n, 100)


def _found(value: float | None, interval: Spread | None, n: int, scale: int = 1) -> Measured | None:
    """Return a figure in the printed unit, a multiple of the stored one; None if it was not measured."""
    if value is None:
        return None
    limits = interval and bounds(interval)
    below, above = (value - limits[0], limits[1] - value) if limits else (math.inf, math.inf)
    return Measured(float(scale * value), scale * below, scale * above, n)


def _rate(counts: tuple[list[int], list[int]] | None) -> Measured | None:
    """Return tokens over forwards, both per unit of blocks; None if the engine does not expose its forwards."""
    if counts is None:
        return None
    ratio = statistics.ratio_of_totals([counts[0]], [counts[1]])
    return _found(ratio.value, ratio, ratio.units)


def _stores_surplus(data: CellData) -> bool:
    """Return whether every answer stores how many tokens were accepted after its end."""
    return bool(data.lines) and all(line.surplus is not None for line in data.lines.values())


def _not_comparable(place: Place, pair: Pair) -> Iterator[str]:
    """Yield why our figure does not measure what the paper's does."""
    row, quantity, result = place.row, place.quantity, pair.ran.result
    if differences := [*_miniature(place, pair)]:
        yield f"a miniature: {', '.join(differences)}"
    for marks in (row.not_comparable, place.table.not_comparable):
        if quantity in marks:
            yield marks[quantity]
    for ran in (pair.ran, pair.baseline):
        yield from (f"void: {reason}" for reason in ([] if ran is None else ran.result.void))
    if quantity == "speedup":
        if result.device != "cuda":
            yield f"measured on {result.device}, theirs on a GPU"
        if result.engine not in (None, EAGER):
            yield f"engine {result.engine}, theirs is eager"
        if result.dtype != "bfloat16":
            yield f"{result.dtype}, theirs is bfloat16"
        if row.arm == row.against[quantity]:
            yield "it is its own baseline"
    if quantity in ("speedup", "tokens_per_forward") and place.request.protocol != PAPER:
        yield "--protocol own stops at stop strings, theirs does not"
    if quantity == "tokens_per_forward" and not _stores_surplus(pair.ran.data):
        yield "tokens accepted after the end are not stored, theirs count them"


def _miniature(place: Place, pair: Pair) -> Iterator[str]:
    """Yield in what our run is smaller than, or different from, the paper's. Fewer items of one task are the same."""
    assert place.family is not None
    row, result, family = place.row, pair.ran.result, place.family.part.family
    theirs, suite = place.table.benchmarks[pair.benchmark], place.family.suites[pair.benchmark]
    if family != row.family:
        yield f"family {family}"
    if suite != theirs.suite:
        yield f"suite {suite}"
    if result.max_new_tokens != place.table.setup.max_new_tokens:
        yield f"{result.max_new_tokens} new tokens, theirs {place.table.setup.max_new_tokens}"
    if pair.ran.data.cell.simulated is not None:
        yield "simulated"
    if suite != theirs.suite or row.batch_size is not None:
        return
    counts = f"{result.items:,} items, theirs {theirs.items:,}"
    if result.items > theirs.items:
        yield counts
    elif result.items < theirs.items and SUITES[suite].subtasks:
        yield f"{counts}, so another mix of subtasks"
    if left_out := result.task.get("left_out", {}).get("items", 0):
        yield f"{left_out} items left out, which cannot be scored here"

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

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mtbench import statistics
from mtbench.document.formatting import Spread
from mtbench.experiments.reproduce import agreement
from mtbench.experiments.reproduce.agreement import WORDS, Estimate, Finding
from mtbench.experiments.reproduce.comparable import FamilyResults, Pair, Place, reasons_not_comparable, stores_surplus
from mtbench.experiments.reproduce.format import (
    AVERAGE,
    KINDS,
    SCHEMA_VERSION,
    AboutTable,
    Figure,
    FigureDifference,
    OurFigure,
    Published,
    Quantity,
    ReproduceRequest,
    Reproduction,
)
from mtbench.experiments.reproduce.rerun import PAPER, RESULT, SHARES, Part, stands_in
from mtbench.records import dump
from mtbench.results.comparisons import wall_ratio
from mtbench.runs.directory import RunDirectory


def compare(table: Published, asked: ReproduceRequest, parts: Sequence[Part], folder: Path) -> Reproduction:
    """Compare every published figure with ours, and write reproduction.json."""
    opened = {part.family: FamilyResults(table, asked, part, folder) for part in parts}
    stand_in = asked.family if stands_in(table, asked) else None
    figures = [
        _figure(Place(table, asked, row, quantity, opened.get(stand_in or row.family)), benchmark, printed)
        for row in table.rows
        for quantity, by_benchmark in row.figures.items()
        for benchmark, printed in by_benchmark.items()
    ]
    result = Reproduction(
        **{name: getattr(table, name) for name in AboutTable.model_fields},
        schema_version=SCHEMA_VERSION,
        asked=asked,
        runs=[family.described() for family in opened.values()],
        verdicts={word: sum(figure.word == word for figure in figures) for word in WORDS},
        figures=figures,
    )
    RunDirectory(folder).write_json(RESULT, dump(result))
    return result


@dataclass(frozen=True, slots=True)
class _Ours:
    """Our figure; shares as shares. `n`: items, or blocks for speedups and times."""

    estimate: Estimate
    n: int
    discordant: float = 0.0  # of a change of accuracy: share of items that only one arm answers correctly


def _figure(place: Place, benchmark: str, printed: str) -> Figure:
    """Return one figure of reproduction.json."""
    row, family = place.row, place.family
    names = place.benchmarks() if benchmark == AVERAGE else [benchmark]
    ours, finding = _compared(place, names, printed)
    value = agreement.mean([one.estimate for one in ours]) if len(ours) == len(names) else None
    suite = None if family is None or benchmark == AVERAGE else family.suites.get(benchmark)
    kind: Literal["points", "ratio"] = "points" if place.quantity in SHARES else "ratio"
    return Figure(
        row=row.row,
        note=row.note,
        family=row.family,
        arm=row.arm,
        benchmark=benchmark,
        suite=suite,
        batch_size=row.batch_size,
        quantity=place.quantity,
        unit=KINDS[place.quantity].unit,
        published=printed,
        ours=None if value is None else OurFigure(**_shown(value, place.quantity), n=sum(one.n for one in ours)),
        difference=finding.difference and FigureDifference(**_shown(finding.difference, place.quantity), kind=kind),
        word=finding.word,
        why=finding.why,
    )


def _compared(place: Place, names: Sequence[str], printed: str) -> tuple[list[_Ours], Finding]:
    """Return our figures on these benchmarks as far as there are any, and the verdict."""
    pairs: list[Pair] = []
    absent: list[tuple[str, str]] = []  # benchmark, reason
    for name in names:
        pair = _pair(place, name)
        if isinstance(pair, str):
            absent.append((name, pair))
        else:
            pairs.append(pair)
    if absent:
        name, why = absent[0]
        return [], Finding("not run", why if len(absent) == len(names) else f"{name} was not run")
    measures = [_measure(place.quantity, pair, place.asked.protocol) for pair in pairs]
    ours = [measure for measure in measures if isinstance(measure, _Ours)]
    reasons = [why for pair in pairs for why in reasons_not_comparable(place, pair)]
    reasons += [measure for measure in measures if isinstance(measure, str)]
    if reasons:
        return ours, Finding("not comparable", reasons[0])
    return ours, _judge(place, names, printed, ours)


def _pair(place: Place, benchmark: str) -> Pair | str:
    """Return the row's cell and the cell of the arm that it is over, or the reason why there is none."""
    row, family = place.row, place.family
    if family is None:
        return "left out by --family"
    ran = family.cell(row.arm, benchmark, row.batch_size)
    if isinstance(ran, str):
        return ran
    if place.quantity not in row.against:
        return Pair(benchmark, ran, None)
    over = row.against[place.quantity]
    baseline = family.cell(over, benchmark, row.batch_size)
    if isinstance(baseline, str):
        return f"{over}, which it is over: {baseline}"
    return Pair(benchmark, ran, baseline)


def _measure(quantity: Quantity, pair: Pair, protocol: str) -> _Ours | str:
    """Return our figure, or the reason why there is none."""
    data, result, baseline = pair.ran.data, pair.ran.result, pair.baseline
    match quantity:
        case "accuracy":
            accuracy = result.accuracy
            return "nothing was scored" if accuracy is None else _found(accuracy.value, accuracy, accuracy.n)
        case "tokens_per_forward":  # by the paper's accounting if the run follows its protocol, else by ours
            return _rate(data.tokens_and_forwards(with_surplus=protocol == PAPER and stores_surplus(data)))
        case "acceptance_length":
            return _rate(data.tokens_and_steps())
        case "tokens_per_s":
            return _found(result.tokens_per_s.value, result.tokens_per_s, result.blocks)
        case "wall_s":
            return _found(result.wall_s, None, result.blocks)
    assert baseline is not None, f"{quantity} is over another arm"
    if quantity == "speedup":
        ratio = wall_ratio(data, baseline.data)
        return _found(ratio.value, ratio, ratio.units)
    gained, lost, n = statistics.gains_and_losses(data.scores, baseline.data.scores)
    change = statistics.paired_difference(gained, lost, n)
    return _found(change.difference, change, n, discordant=(gained + lost + 2) / (n + 2))


def _found(value: float | None, interval: Spread | None, n: int, discordant: float = 0.0) -> _Ours | str:
    if value is None:
        return "nothing was measured"
    low, high = (None, None) if interval is None else (interval.ci_low, interval.ci_high)
    return _Ours(Estimate(float(value), low, high), n, discordant)


def _rate(counts: tuple[list[int], list[int]] | None) -> _Ours | str:
    """Return tokens over forwards, both per unit of blocks."""
    if counts is None:
        return "its engine does not expose its forwards"
    ratio = statistics.ratio_of_totals([counts[0]], [counts[1]])
    return _found(ratio.value, ratio, ratio.units)


def _judge(place: Place, names: Sequence[str], printed: str, ours: Sequence[_Ours]) -> Finding:
    """Return the verdict on figures that measure the same thing."""
    quantity = place.quantity
    estimate, n = agreement.mean([one.estimate for one in ours]), sum(one.n for one in ours)
    value, rounding = agreement.number(printed), agreement.half_unit(printed)
    if quantity in SHARES:
        spread = agreement.mean(_their_parts(place, names, printed, ours))
        low, high = spread.span
        theirs = Estimate(value / 100, value / 100 - (spread.value - low), value / 100 + (high - spread.value))
        units = 2 if quantity == "accuracy_change" else 1
        return agreement.judge_points(estimate, theirs, units * rounding / 100, n=n)
    unit = "block" if quantity in ("speedup", "tokens_per_forward", "acceptance_length") else "item"
    return agreement.judge_rate(estimate, value, rounding, n=n, unit=unit)


def _their_parts(place: Place, names: Sequence[str], printed: str, ours: Sequence[_Ours]) -> list[Estimate]:
    """Return the paper's figure on each benchmark with its interval. Ours replace parts of a mean that it omits."""
    by_benchmark = place.row.figures[place.quantity]
    texts = [printed] if len(ours) == 1 else [by_benchmark.get(name) for name in place.table.benchmarks]
    parts = []
    for name, text, own in zip(names, texts, ours, strict=True):
        n = place.table.benchmarks[name].items
        value = own.estimate.value if text is None else agreement.number(text) / 100
        if place.quantity == "accuracy_change":
            parts.append(agreement.change(value, own.discordant, n))
        else:
            parts.append(agreement.share(value, n))
    return parts


def _shown(estimate: Estimate, quantity: Quantity) -> dict[str, Any]:
    """Return the estimate in the unit that is printed."""
    return {name: None if x is None else x * KINDS[quantity].factor for name, x in estimate._asdict().items()}

"""The main table of a page: what each arm gains and what it costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mtbench import statistics
from mtbench.document.formatting import NONE, bounds, count, counted, interval, number
from mtbench.document.model import Bar, Entry, Table, Verdict
from mtbench.report.arm_table import Column, Notes, table_of
from mtbench.report.detail_tables import length_detail
from mtbench.report.phrases import (
    REPEATED_FLAG,
    falling_acceptance,
    flags_of_measurement,
    grade_note,
    shown_verdict,
    speed_entry,
    spread_over_tasks,
    ungraded,
)
from mtbench.results.comparisons import OwnSpeedups, over_fastest_engine
from mtbench.results.figure_formats import Accuracy, AccuracyComparison, Speedup, Spread
from mtbench.results.flags import WRONG_ANSWERS
from mtbench.results.format import ResultCell

CAPTION = "95% intervals in brackets, each of one arm alone. Bars: speedup on a log scale; the upright line is 1."
IMPORTANT = ("speedup", "cost", "accuracy", "valid", "unread", "lossless", "by value", "per forward")  # of headings
LEAST_SPAN = 1.25  # of the axis of the bars, as a factor on either side of 1


def main_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> Table:
    """Return accuracy, speedup, tokens per forward, grade and notes of each arm; its price if the machine has one."""
    baselines = {speedup.baseline for speedup in own.headline.values()}
    common = baselines.pop() if len(baselines) == 1 else None
    sound = {cell.arm for cell in cells if not cell.void}
    drawn = _bars([speedup for arm, speedup in own.headline.items() if arm in sound])
    columns = [
        *_answer_columns(cells, own),
        Column(
            f"speedup over {common}" if common else "speedup",
            "wall time of plain decoding, on the checkpoint that one would deploy without the method, over that of the "
            "arm, on the same prompts",
            lambda cell: _headline_entry(cell, own.headline.get(cell.arm), drawn, named=common is None),
        ),
        Column(
            "tokens per forward",
            "committed tokens per forward pass of the model",
            lambda cell: Entry(
                number(cell.tokens_per_forward),
                interval(cell.tokens_per_forward_ci),
                detail=_by_task(cell, cell.tokens_per_forward_spread),
            ),
        ),
        Column(
            "lossless",
            "whether the tokens are those of the arm that it promises; floor: that arm against itself, at the smallest "
            "and the largest batch size of the run",
            _lossless_entry,
        ),
        Column(
            "cost per 1M tokens",
            "price of the machine over the tokens that it decodes in an hour, prefill included",
            lambda cell: Entry(number(cell.cost_per_million)),
        ),
    ]
    table = table_of(columns, cells, numbers, CAPTION, notes_of)
    headings = [heading for heading, _ in table.columns]
    important = sorted(headings, key=lambda heading: next(n for n, word in enumerate(IMPORTANT) if word in heading))
    return replace(table, brief=important, leading=True)


def _answer_columns(cells: Sequence[ResultCell], own: OwnSpeedups) -> list[Column]:
    unread = any(cell.unread for cell in cells)
    return [
        Column(
            "accuracy, %",
            "share of items answered correctly; the verdict compares it with the baseline's, on the same items",
            lambda cell: _share_entry(cell.accuracy, cell.accuracy_vs, own.headline.get(cell.arm)),
        ),
        Column(
            "unread",
            "answers in which the rule of the score finds no result",
            lambda cell: Entry(count(cell.unread.answers if cell.unread else 0) if unread and cell.accuracy else NONE),
        ),
        Column(
            "by value, %",
            "the same share by the value of each result, in whatever notation",
            lambda cell: _share_entry(cell.by_value, cell.by_value_vs, own.headline.get(cell.arm)),
        ),
        Column(
            "valid, %",
            "share of answers that are JSON of their schema, or whose calls fit the tools; the verdict as of accuracy",
            lambda cell: _share_entry(cell.valid, cell.valid_vs, own.headline.get(cell.arm)),
        ),
    ]


def _bars(speedups: Sequence[Speedup]) -> Callable[[Speedup], Bar | None]:
    """Return what draws a speedup on one logarithmic axis for all of them, with the factor 1 on it."""
    ends = [end for s in speedups for end in bounds(s) or () if end > 0]
    low, high = min([1 / LEAST_SPAN, *ends]), max([LEAST_SPAN, *ends])

    def place(factor: float) -> float:
        return round(math.log(min(max(factor, low), high) / low) / math.log(high / low), 4)

    def bar(speedup: Speedup) -> Bar | None:
        ends = bounds(speedup)
        if ends is None or speedup.value is None or speedup.value <= 0:
            return None
        least, most = ends
        return Bar(place(max(least, low)), place(speedup.value), place(most), place(1.0))

    return bar


def _share_entry(share: Accuracy | None, compared: Sequence[AccuracyComparison], own: Speedup | None) -> Entry:
    """Return an accuracy or the share of valid answers, with the verdict against the arm's baseline if there is one."""
    entry = Entry.of(share, 100, 1)
    verdicts = {comparison.baseline: shown_verdict(comparison.verdict, brief=True) for comparison in compared}
    if share is None or share.value is None or not verdicts:
        return entry
    baseline = own.baseline if own is not None and own.baseline in verdicts else next(iter(verdicts))
    return replace(entry, verdict=verdicts[baseline], against=None if own else baseline)


def _headline_entry(
    cell: ResultCell, speedup: Speedup | None, drawn: Callable[[Speedup], Bar | None], *, named: bool
) -> Entry:
    if speedup is None or speedup.value is None:
        over = None if cell.engine else over_fastest_engine(cell)
        return speed_entry(over, judged=False, against=over.baseline, detail="includes the engine") if over else Entry()
    details = [detail for detail in (_by_task(cell, speedup.spread), length_detail(speedup)) if detail]
    lost = cell.left is not None and cell.left.lost and cell.left.rival is not None
    is_open = speedup.verdict.word == statistics.INCONCLUSIVE and speedup.verdict.reason is None
    return speed_entry(
        speedup,
        brief=True,
        judged=not (lost and is_open),  # else its note has more
        against=speedup.baseline if named else None,
        detail="; ".join(details) or None,
        bar=None if cell.void else drawn(speedup),
    )


def _by_task(cell: ResultCell, spread: Spread | None) -> str | None:
    over_tasks = None if cell.void else spread_over_tasks(spread)
    return f"by task {over_tasks}" if over_tasks else None


def _lossless_entry(cell: ResultCell) -> Entry:
    graded = cell.lossless
    if graded is None:
        return Entry(ungraded(cell))
    same = f"{graded.identical:,} of {graded.items:,} the same"
    floor = "" if graded.floor is None else f", floor {graded.floor.identical:,} of {graded.floor.items:,}"
    if cell.other_tokens:
        return Entry(ungraded(cell), against=graded.against, detail=f"{same}{floor}")
    if cell.claims != "lossless":  # compared with an equivalent arm, which is lossy too
        return Entry("lossy by design", None, Verdict.of(graded.grade), graded.against, f"{same}{floor}")
    return Entry(graded.grade, against=graded.against, detail=f"{same}{floor}")


def notes_of(cell: ResultCell) -> Notes:
    """Return what a reader must know of an arm, the gravest first."""
    notes = []
    if cell.error:
        notes.append(("failed", f"Failed: {cell.error}"))
    elif cell.status == "partial":
        notes.append(("warned", "Unfinished (partial): some items have no answer yet; continue with `--resume`."))
    notes += [("void", f"Void, not to be trusted: {reason}.") for reason in cell.void]
    if cell.left is not None:
        notes.append(("left", f"Left after {counted(cell.left.block, 'block')}: {cell.left.reason}."))
    if (graded := cell.lossless) is not None and (note := grade_note(graded)):
        notes.append(("open", note))
    flags = [flag for flag in flags_of_measurement(cell) if flag != REPEATED_FLAG] + falling_acceptance(cell)
    return notes + [("open" if WRONG_ANSWERS in flag else "flag", f"{flag}.") for flag in flags]

"""The tables of speed: rates and speedups, the factors of a speedup, and references by other engines."""

from collections.abc import Mapping, Sequence

from mtbench import statistics
from mtbench.document import Entry, Table
from mtbench.document.formatting import bounds, interval, number, times
from mtbench.report.arm_table import Column, arm_row, failure, table_of
from mtbench.report.figures import FACTORS
from mtbench.results.comparisons import OwnSpeedups, over_fastest_engine
from mtbench.results.figure_formats import PlainSpeedup, Speedup
from mtbench.results.format import ResultCell


def speed_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> Table:
    """Return tokens per second and the speedups over each kind of baseline."""
    engines = {cell.arm: over_fastest_engine(cell) for cell in cells}
    decodes = {arm: speedup for arm, speedup in own.headline.items() if speedup.decode is not None}
    columns = [
        Column(
            "tokens/s",
            "tokens per second of wall time, prefill included",
            lambda cell: Entry(number(cell.tokens_per_s.value), interval(bounds(cell.tokens_per_s))),
        ),
        Column(
            "speedup, same checkpoint",
            "wall time of the baseline on the same checkpoint over that of the arm, on the same prompts; the ratio of "
            "answer lengths is given if it differs from 1 by more than 1%",
            lambda cell: _speedup_entry(own.same.get(cell.arm)),
        ),
        Column(
            "speedup, deployment",
            "the same over the baseline on the checkpoint that one would deploy without this method",
            lambda cell: _speedup_entry(own.deployed.get(cell.arm)),
            shown=bool(own.deployed),
        ),
        Column(
            "decoding alone",
            "decoding time of the baseline of the main table over that of the arm, without the prompts",
            lambda cell: _decode_entry(decodes.get(cell.arm)),
            shown=bool(decodes),
        ),
        Column(
            "incl. engine",
            "wall time of the fastest reference by another engine over that of the arm, so that the ratio contains the "
            "engine's part; plain: the ratio of plain decoding by the arm's own engine, which is the engine's part "
            "alone",
            lambda cell: _engine_entry(engines[cell.arm]),
            shown=any(engines.values()),
        ),
    ]
    return table_of(columns, cells, numbers, failure)


def factor_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> Table:
    """Return the five factors of the speed over the baseline on the same checkpoint."""
    meanings = {
        "tokens_per_forward": "tokens per forward of a row, arm over baseline",
        "forward_time": "device time of a forward, baseline over arm",
        "utilisation": "live rows per forward, arm over baseline",
        "host": "device share of decode time, arm over baseline",
        "decode_share": "decode share of wall time, arm over baseline",
    }
    columns = [
        *(_factor_column(name, meaning, own.same) for name, meaning in meanings.items()),
        Column(
            "rate ratio",
            "product of the five: tokens per second, arm over baseline",
            lambda cell: Entry(times(own.same[cell.arm].rate_ratio)),
        ),
        Column(
            "answer length",
            "tokens, arm over baseline; the speedup is the rate ratio over it",
            lambda cell: Entry(times(own.same[cell.arm].length_ratio)),
        ),
        Column(
            "speedup",
            "wall time, baseline over arm",
            lambda cell: Entry(times(own.same[cell.arm].value), against=own.same[cell.arm].baseline),
        ),
    ]
    return table_of(columns, [cell for cell in cells if cell.arm in own.same], numbers, failure)


def _factor_column(name: str, meaning: str, speedups: Mapping[str, Speedup]) -> Column:
    def entry(cell: ResultCell) -> Entry:
        factors = speedups[cell.arm].factors
        return Entry(times(None if factors is None else getattr(factors, name)))

    return Column(FACTORS[name], meaning, entry)


def engine_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return every comparison with a reference by another engine, one row each."""
    columns = [
        ("incl. engine", "wall time of a reference by another engine over that of the arm, on the same prompts"),
        (
            "plain by the same engine",
            "the same ratio of plain decoding by the arm's own engine: the engine's part alone",
        ),
        ("answer length", "tokens, arm over reference"),
    ]
    rows = []
    for cell in cells:
        for speedup in cell.speedup:
            if speedup.includes_engine:
                entries = [
                    Entry(times(speedup.value), interval(bounds(speedup)), speedup.verdict, speedup.baseline),
                    _plain_entry(speedup.plain),
                    Entry(times(speedup.length_ratio)),
                ]
                rows.append(arm_row(cell, numbers, entries))
    return Table(columns, rows)


def _speedup_entry(speedup: Speedup | None) -> Entry:
    if speedup is None or speedup.value is None:
        return Entry()
    length = speedup.length_ratio
    differs = length is not None and abs(length - 1) > statistics.LENGTH_RATIO_SHOWN_BEYOND
    detail = f"length {times(length)}" if differs else None
    return Entry(times(speedup.value), interval(bounds(speedup)), speedup.verdict, speedup.baseline, detail)


def _decode_entry(speedup: Speedup | None) -> Entry:
    if speedup is None or speedup.decode is None:
        return Entry()
    return Entry(times(speedup.decode.value), interval(bounds(speedup.decode)), against=speedup.baseline)


def _engine_entry(speedup: Speedup | None) -> Entry:
    """Return a ratio that contains an engine's part, with that part as its detail if it is known."""
    if speedup is None:
        return Entry()
    plain = speedup.plain
    alone = None if plain is None else f"plain {plain.arm} {times(plain.value)}"
    return Entry(times(speedup.value), interval(bounds(speedup)), speedup.verdict, speedup.baseline, alone)


def _plain_entry(plain: PlainSpeedup | None) -> Entry:
    return Entry() if plain is None else Entry(times(plain.value), interval(bounds(plain)), detail=plain.arm)

"""The tables of a report: each arm's values with interval, verdict and baseline, as text for every format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from mtbench import statistics
from mtbench.report.arm_names import in_words
from mtbench.report.figures import FACTORS
from mtbench.report.formatting import (
    NONE,
    bounds,
    count,
    interval,
    joules,
    listed,
    memory,
    number,
    percent,
    points,
    seconds,
    times,
)
from mtbench.report.phrases import short_verdict
from mtbench.results.acceptance import OWNERS
from mtbench.results.comparisons import OwnSpeedups, over_fastest_engine
from mtbench.results.format import (
    AcceptanceFigures,
    Accuracy,
    Percentiles,
    PlainSpeedup,
    RequestLatency,
    ResultCell,
    Speedup,
    TaskFigures,
    TaskSpeedup,
)

TONES = {  # first words of a verdict; any other verdict is neither good nor bad
    "good": ("faster", "not worse", "exact"),
    "bad": ("slower", "worse", "divergent"),
}
COMPARATIVES = ("faster", "slower", "not worse", "worse")  # verdicts that `than` may follow
SIGNS = {"good": "▲", "bad": "▼", "plain": "•"}
POSITIONS_SHOWN = 6


class Bar(NamedTuple):
    """An interval, its value and the factor 1 on a common axis, each from 0 to 1."""

    low: float
    value: float
    high: float
    one: float


@dataclass(frozen=True, slots=True)
class Entry:
    """One place of a table: a value, its interval, a verdict, and the baseline."""

    value: str = NONE
    interval: str | None = None
    verdict: str | None = None
    against: str | None = None  # baseline
    detail: str | None = None  # a second value that belongs to the first
    bar: Bar | None = None  # the interval, drawn

    @property
    def tone(self) -> str:
        """Whether the verdict is good, bad or neither, as `worse by less than the margin` is."""
        verdict = self.verdict or self.value
        if "less than the margin" in verdict:
            return "plain"
        for tone, words in TONES.items():
            if verdict.startswith(words):
                return tone
        return "plain"

    @property
    def words(self) -> bool:
        """Whether the value is words, which may wrap, and not a number."""
        return self.value[:1].isalpha()

    @property
    def sign(self) -> str:
        return SIGNS[self.tone]

    def line(self) -> str:
        """Return the whole entry on one line."""
        value = self.value
        if self.interval:
            value += f" {self.interval}" if self.interval.startswith("[") else f", {self.interval}"
        if self.detail:
            value += f", {self.detail}"
        if not self.verdict:
            return f"{value} (against {self.against})" if self.against else value
        if not self.against:
            return f"{value}, {self.verdict}"
        if self.verdict in COMPARATIVES:
            return f"{value}, {self.verdict} than {self.against}"
        return f"{value}, {self.verdict} (against {self.against})"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm, or one task, which has no number. A failed arm has no entries."""

    number: int | None
    arm: str
    entries: list[Entry]
    notes: list[tuple[str, str]]  # (kind, text), kind one of failed, void, flag, spread
    void: bool
    failed: bool
    simulated: bool
    words: str = ""  # the arm in words; empty: as `arm`

    @property
    def title(self) -> str:
        """The arm in words, or the name of the task."""
        return self.words or self.arm

    @property
    def tags(self) -> list[str]:
        """Words that stand next to the arm's name everywhere."""
        tags = []
        if self.void:
            tags.append("void")
        if self.simulated:
            tags.append("simulated")
        return tags


@dataclass(frozen=True, slots=True)
class Table:
    """Headings with their meanings, and the rows under them. `of` says what a row is: an arm or a task."""

    columns: list[tuple[str, str]]  # heading, meaning
    rows: list[Row]
    of: str = "arm"

    def named(self, names: Mapping[str, str]) -> "Table":
        """Return the table with its arms in words. A row keeps the id of its arm."""
        columns = [(in_words(heading, names), in_words(meaning, names)) for heading, meaning in self.columns]
        rows = [
            replace(row, words=names.get(row.arm, ""), entries=[_named(entry, names) for entry in row.entries])
            for row in self.rows
        ]
        return Table(columns, rows, self.of)

    def first(self, n: int) -> "Table":
        """Return the table with its first n columns only."""
        return Table(self.columns[:n], [replace(row, entries=row.entries[:n]) for row in self.rows])


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table of arms."""

    heading: str
    meaning: str
    entry: Callable[[ResultCell], Entry]
    shown: bool = True


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
    return table_of(columns, cells, numbers, _failure)


def latency_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return the times of a request, and what its answer took."""
    columns = [
        Column(
            "request",
            "median, 95th and 99th percentile of the time from the start of a batch to the end of an answer",
            lambda cell: _request_entry(cell.request_latency_s),
            shown=any(cell.request_latency_s is not None for cell in cells),
        ),
        Column(
            "first token",
            "median and 95th percentile of the time to the first token",
            lambda cell: _latency_entry(cell.ttft_s),
        ),
        Column(
            "between commits",
            "median and 95th percentile of the time between two commits of a row",
            lambda cell: _latency_entry(cell.commit_latency_s),
        ),
        Column(
            "cut by budget, %",
            "answers that ended at the token budget, and those of them that end in a loop",
            _cut_entry,
        ),
        Column(
            "target positions per token",
            "positions fed to the target per token of the answers; those of a draft model are not in it",
            lambda cell: Entry(number(cell.positions_fed_per_token)),
        ),
        Column(
            "peak memory",
            "highest use in an untimed pass; on a CPU of the whole process, libraries included",
            lambda cell: Entry(memory(cell.peak_memory_bytes)),
        ),
    ]
    return table_of(columns, cells, numbers, _failure)


def cost_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return where time and memory went, and how clean the measurement was."""
    columns = [
        Column("items", "answered items", lambda cell: Entry(count(cell.items))),
        Column(
            "blocks × rounds",
            "blocks with a clean timing, and rounds; later rounds repeat the first blocks",
            lambda cell: Entry(f"{cell.blocks} × {cell.rounds}"),
        ),
        Column(
            "samples dropped",
            "timings that do not count, because the machine was disturbed",
            lambda cell: Entry(f"{cell.samples.dropped} of {cell.samples.used + cell.samples.dropped}"),
        ),
        *_time_columns(cells),
        *_draft_columns(cells),
        Column(
            "KV cache", "most bytes of keys and values that a block needs", lambda cell: Entry(memory(cell.kv_bytes))
        ),
        Column(
            "energy per token",
            "energy of the whole GPU; it includes prompts and idle power",
            lambda cell: Entry(joules(cell.j_per_token)),
        ),
        Column("same tokens again", "repeated requests with the tokens of round 1", _repeated_entry),
    ]
    return table_of(columns, cells, numbers, _failure)


def _time_columns(cells: Sequence[ResultCell]) -> list[Column]:
    """Return the columns about seconds of the whole cell."""
    return [
        Column(
            "wall",
            "wall time of all blocks; a block has the mean over its rounds",
            lambda cell: Entry(seconds(cell.wall_s)),
        ),
        Column("prefill", "wall time of reading the prompts", lambda cell: Entry(seconds(cell.prefill_s))),
        Column("decode", "wall time of decoding", lambda cell: Entry(seconds(cell.decode_s))),
        Column("host gap", "decode time less device time", lambda cell: Entry(seconds(cell.host_gap_s))),
        Column(
            "decode tokens/s",
            "tokens per second of decode time",
            lambda cell: Entry(number(cell.decode_tokens_per_s.value)),
        ),
        Column(
            "preparation",
            "time of the first calls beyond that of warm ones: capture, compilation, memory; it is not timed",
            lambda cell: Entry(seconds(cell.preparation_s or None)),
        ),
        Column(
            "% of roofline",
            "least time of its forwards for their weights, keys, values and FLOPs at the measured speeds of the GPU, "
            "over decode time",
            lambda cell: Entry(percent(cell.roofline_fraction)),
            shown=any(cell.roofline_fraction is not None for cell in cells),
        ),
    ]


def _draft_columns(cells: Sequence[ResultCell]) -> list[Column]:
    """Return the columns about what a method computes beyond the target's forwards, if any arm does."""
    return [
        Column(
            "target positions per forward",
            "positions fed to the target per forward; those of a draft model are not in it",
            lambda cell: Entry(number(cell.positions_fed_per_forward)),
        ),
        Column(
            "draft forwards per token",
            "forwards of other models per token, and in all",
            lambda cell: _part_entry(
                cell.draft_forwards, number(cell.draft_forwards_per_token), f"{count(cell.draft_forwards)} in all"
            ),
            shown=any(cell.draft_forwards for cell in cells),
        ),
        Column(
            "draft time",
            "time in forwards of other models",
            lambda cell: _time_entry(cell.draft_s, cell.decode_s),
            shown=any(cell.draft_s for cell in cells),
        ),
        Column(
            "head time",
            "time in what the method computes beside its models",
            lambda cell: _time_entry(cell.head_s, cell.decode_s),
            shown=any(cell.head_s for cell in cells),
        ),
    ]


def guesses(found: AcceptanceFigures | None) -> bool:
    """Return whether an arm with this acceptance guesses. Where `offered` is null, only the length is known."""
    return found is not None and found.length is not None and found.offered != 0


def acceptance_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return the acceptance of the arms that guess, ours and by the formulas of other projects."""
    figures: dict[str, AcceptanceFigures] = {}
    for cell in cells:
        found = cell.acceptance
        if found is not None and guesses(found):
            figures[cell.arm] = found
    columns = [
        Column(
            "acceptance length",
            "tokens per forward that committed any; it includes the model's own token",
            lambda cell: _acceptance_entry(cell, figures[cell.arm].length, "acceptance_length", number),
        ),
        Column(
            "acceptance rate, %",
            "accepted guesses over offered guesses",
            lambda cell: _acceptance_entry(cell, figures[cell.arm].rate, "acceptance_rate", percent),
        ),
        Column("offered", "guesses offered", lambda cell: Entry(count(figures[cell.arm].offered))),
        Column(
            "per position, %",
            "share of these forwards that accepted at least 1, 2, … guesses",
            lambda cell: _positions_entry(figures[cell.arm].per_position),
        ),
        *(_owner_column(owner, figures) for owner in OWNERS),
    ]

    def notes(cell: ResultCell) -> list[tuple[str, str]]:
        who = figures[cell.arm].reported_by
        return _failure(cell) + ([("flag", f"Counted by {who}.")] if who else [])

    return table_of(columns, [cell for cell in cells if cell.arm in figures], numbers, notes)


def _owner_column(owner: str, figures: Mapping[str, AcceptanceFigures]) -> Column:
    """Return the column of acceptance as one other project computes it."""
    name, formula = OWNERS[owner]
    return Column(
        name,
        f"as the owner computes it: {formula}",
        lambda cell: Entry(number(getattr(figures[cell.arm].derived, owner))),
    )


def task_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> Table:
    """Return a row per task and a column per arm if the suite has several tasks; then all items together."""
    items: dict[str, int] = {}
    for part in (part for cell in cells for part in cell.tasks):
        items[part.task] = max(part.items, items.get(part.task, 0))
    shown = [cell for cell in cells if cell.status != "failed"]
    if not items or not shown:
        return Table([], [], of="task")
    baselines = {cell.arm: own.headline[cell.arm].baseline for cell in shown if cell.arm in own.headline}
    columns = []
    for cell in shown:
        over = f"speedup over {baselines[cell.arm]}" if cell.arm in baselines else "a baseline"
        columns.append((f"{numbers[cell.arm]}. {cell.arm}", over))
    simulated = any(cell.simulated for cell in shown)

    def row(name: str, entries: list[Entry]) -> Row:
        return Row(None, name, entries, [], void=False, failed=False, simulated=simulated)

    rows = []
    for task, n in items.items():
        parts = {cell.arm: part for cell in shown for part in cell.tasks if part.task == task}
        entries = [_task_entry(parts.get(cell.arm), baselines.get(cell.arm)) for cell in shown]
        rows.append(row(f"{task} ({n:,})", entries))
    whole = [_task_entry(cell, baselines.get(cell.arm)) for cell in shown]
    rows.append(row(f"all items ({sum(items.values()):,})", whole))
    if any(cell.accuracy_macro for cell in shown):
        rows.append(row(f"mean of the {len(items)}", [percent_entry(cell.accuracy_macro) for cell in shown]))
    return Table(columns, rows, of="task")


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
    return table_of(columns, [cell for cell in cells if cell.arm in own.same], numbers, _failure)


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
                rows.append(_comparison_row(cell, numbers, entries))
    return Table(columns, rows)


def accuracy_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return every paired comparison of accuracy, one row each."""
    columns = [
        ("difference, points", "accuracy less the baseline's, on the same items"),
        ("only arm correct", "items that only the arm answers correctly"),
        ("only baseline correct", "items that only the baseline answers correctly"),
        ("McNemar p", "exact p-value; it decides nothing"),
        ("items needed", "items for a verdict at this margin, if the arms differ as often as here"),
        ("same answers", "items with the baseline's tokens"),
    ]
    rows = []
    for cell in cells:
        same = {a.baseline: f"{a.identical:,} of {a.items:,}" for a in cell.agreement}
        for versus in cell.accuracy_vs:
            difference = interval(bounds(versus), 100, 1)
            entries = [
                Entry(points(versus.difference), difference, versus.verdict, versus.baseline),
                Entry(count(versus.gained)),
                Entry(count(versus.lost)),
                Entry(NONE if versus.p_mcnemar is None else f"{versus.p_mcnemar:.2g}"),
                Entry(count(versus.n_needed or None)),
                Entry(same.get(versus.baseline, NONE)),
            ]
            rows.append(_comparison_row(cell, numbers, entries))
    return Table(columns, rows)


def gaps(cells: Sequence[ResultCell]) -> list[str]:
    """Return why places of the tables are empty, each reason once, and where a percentile is a single value."""
    answered = [cell for cell in cells if cell.status != "failed"]
    sentences = _reasons("Energy per token", {cell.arm: cell.energy_reason for cell in answered})
    sentences += _reasons("% of roofline", {cell.arm: cell.roofline_reason for cell in answered})
    if any(cell.device == "cpu" and cell.peak_memory_bytes is None for cell in answered):
        sentences.append("Peak memory: on a CPU it is measured only with `--peak-memory`.")
    if any(cell.batching == "refill" for cell in answered):
        sentences.append("Between commits: for refilled slots the step at which a row starts is not stored.")
    if any(cell.samples.used == 1 and cell.ttft_s.p50 is not None for cell in answered):
        sentences.append("First token: one block was timed, so median and 95th percentile are the same sample.")
    return sentences


def _reasons(what: str, reasons: Mapping[str, str | None]) -> list[str]:
    """Return a sentence per reason, with the arms that it holds for unless it holds for all."""
    sentences = []
    for reason in dict.fromkeys(reasons.values()):
        arms = [arm for arm, of_arm in reasons.items() if of_arm == reason]
        if reason and len(arms) == len(reasons):
            sentences.append(f"{what}: {reason}.")
        elif reason:
            sentences.append(f"{what} of {listed(arms)}: {reason}.")
    return sentences


def table_of(
    columns: Sequence[Column],
    cells: Sequence[ResultCell],
    numbers: Mapping[str, int],
    notes: Callable[[ResultCell], list[tuple[str, str]]],
) -> Table:
    """Return a table with a row for each cell."""
    shown = [column for column in columns if column.shown]
    rows = []
    for cell in cells:
        failed = cell.status == "failed"
        rows.append(
            Row(
                numbers[cell.arm],
                cell.arm,
                [] if failed else [column.entry(cell) for column in shown],
                notes(cell),
                void=bool(cell.void),
                failed=failed,
                simulated=cell.simulated is not None,
            )
        )
    return Table([(column.heading, column.meaning) for column in shown], rows)


def _comparison_row(cell: ResultCell, numbers: Mapping[str, int], entries: list[Entry]) -> Row:
    """Return a row for one of several comparisons of an arm."""
    return Row(
        numbers[cell.arm],
        cell.arm,
        entries,
        [],
        void=bool(cell.void),
        failed=False,
        simulated=cell.simulated is not None,
    )


def _failure(cell: ResultCell) -> list[tuple[str, str]]:
    """Return the note of a cell in a table that only repeats why it failed."""
    return [("failed", f"Failed: {cell.error}")] if cell.status == "failed" else []


def _acceptance_entry(
    cell: ResultCell, figure: float | None, name: str, written: Callable[[float | None], str]
) -> Entry:
    return Entry(written(figure), detail=without_loops(cell, figure, name, written))


def without_loops(
    cell: ResultCell, figure: float | None, name: str, written: Callable[[float | None], str]
) -> str | None:
    """Return a figure of the answers that do not end in a loop; None if no answer does, or if it is written alike.

    figure: that of all answers; name: the field of Degenerate.
    """
    found = cell.degenerate
    others = written(getattr(found, name)) if found is not None and found.answers else NONE
    return None if others in (NONE, written(figure)) else f"{others} without loops"


def _speedup_entry(speedup: Speedup | None) -> Entry:
    if speedup is None or speedup.value is None:
        return Entry()
    length = speedup.length_ratio
    differs = length is not None and abs(length - 1) > statistics.LENGTH_RATIO_SHOWN_BEYOND
    detail = f"length {times(length)}" if differs else None
    return Entry(times(speedup.value), interval(bounds(speedup)), speedup.verdict, speedup.baseline, detail)


def _engine_entry(speedup: Speedup | None) -> Entry:
    """Return a ratio that contains an engine's part, with that part as its detail if it is known."""
    if speedup is None:
        return Entry()
    plain = speedup.plain
    alone = None if plain is None else f"plain {plain.arm} {times(plain.value)}"
    return Entry(times(speedup.value), interval(bounds(speedup)), speedup.verdict, speedup.baseline, alone)


def _plain_entry(plain: PlainSpeedup | None) -> Entry:
    return Entry() if plain is None else Entry(times(plain.value), interval(bounds(plain)), detail=plain.arm)


def _cut_entry(cell: ResultCell) -> Entry:
    """Return the share of answers that the budget cut, with the part of it that is in loops."""
    if not cell.items:
        return Entry()
    found = cell.degenerate
    loops = f"{percent(found.share)} in a loop" if found is not None and found.answers else None
    return Entry(percent(cell.finish.length / cell.items), detail=loops)


def _repeated_entry(cell: ResultCell) -> Entry:
    share = cell.repeated_identical
    return Entry(NONE if share is None else f"{100 * share:.4g}%")


def _time_entry(part_s: float | None, decode_s: float | None) -> Entry:
    """Return seconds, and their share of decoding."""
    share = f"{percent(part_s / decode_s)}% of decoding" if part_s and decode_s else None
    return _part_entry(part_s, seconds(part_s), share)


def _part_entry(total: float | None, value: str, detail: str | None) -> Entry:
    """Return a value with its detail; 0 without a detail for an arm that has no such part."""
    if total:
        return Entry(value, detail=detail)
    return Entry() if total is None else Entry("0")


def _positions_entry(shares: Sequence[float] | None) -> Entry:
    shown = [percent(share, 0) for share in (shares or ())[:POSITIONS_SHOWN]]
    if shares and len(shares) > POSITIONS_SHOWN:
        shown.append("…")
    return Entry(listed(shown) or NONE)


def _task_entry(part: TaskFigures | ResultCell | None, baseline: str | None) -> Entry:
    """Return the accuracy of a task with the other figures as its detail; if it is not scored, the speedup."""
    if part is None:
        return Entry()
    details = []
    if part.tokens_per_forward:
        details.append(f"{number(part.tokens_per_forward)} per forward")
    if part.acceptance is not None and part.acceptance.rate is not None:
        details.append(f"{percent(part.acceptance.rate, 0)}% accepted")
    speedups: Sequence[Speedup | TaskSpeedup] = part.speedup
    speedup = next((s for s in speedups if s.baseline == baseline), None)
    speed = Entry()
    if speedup is not None and speedup.value:
        speed = Entry(times(speedup.value), interval(bounds(speedup)), short_verdict(speedup.verdict))
    elif part.tokens_per_s.value is not None:
        speed = Entry(f"{number(part.tokens_per_s.value)} tokens/s")
    if part.accuracy is None:
        return replace(speed, detail=listed(details) or None)
    if speed.value != NONE and (speedup is None or speedup.ci_low is not None):
        details.insert(0, speed.value)
    return replace(percent_entry(part.accuracy), detail=listed(details) or None)


def percent_entry(accuracy: Accuracy | None) -> Entry:
    if accuracy is None or accuracy.value is None:
        return Entry()
    return Entry(percent(accuracy.value), interval(bounds(accuracy), 100, 1))


def _latency_entry(spread: Percentiles) -> Entry:
    return Entry() if spread.p50 is None else Entry(seconds(spread.p50), f"p95 {seconds(spread.p95)}")


def _request_entry(latency: RequestLatency | None) -> Entry:
    if latency is None:
        return Entry()
    return Entry(seconds(latency.p50), f"p95 {seconds(latency.p95)}", detail=f"p99 {seconds(latency.p99)}")


def _decode_entry(speedup: Speedup | None) -> Entry:
    if speedup is None or speedup.decode is None:
        return Entry()
    return Entry(times(speedup.decode.value), interval(bounds(speedup.decode)), against=speedup.baseline)


def _named(entry: Entry, names: Mapping[str, str]) -> Entry:
    """Return an entry with its arms in words."""

    def words(text: str | None) -> str | None:
        return text and in_words(text, names)

    return replace(entry, verdict=words(entry.verdict), against=words(entry.against), detail=words(entry.detail))

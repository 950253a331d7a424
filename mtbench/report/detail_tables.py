"""The tables behind the main table of a page: accuracy, tasks, acceptance, speed, its factors, what answers took."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mtbench import statistics
from mtbench.document.formatting import (
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
from mtbench.document.model import Entry, Row, Table
from mtbench.report.arm_table import Column, Notes, arm_row, failure, table_of
from mtbench.report.phrases import shown_verdict, speed_entry
from mtbench.results.comparisons import OwnSpeedups, over_fastest_engine
from mtbench.results.figure_formats import Percentiles, RangeFigures, RequestLatency, Speedup, TaskFigures, TaskSpeedup
from mtbench.results.format import ResultCell

POSITIONS_SHOWN = 6
FACTORS = {  # field of a speedup's factors -> its heading and meaning
    "tokens_per_forward": ("tokens per forward", "tokens per forward of a row, arm over baseline"),
    "forward_time": ("forward time", "device time of a forward, baseline over arm"),
    "utilisation": ("utilisation", "live rows per forward, arm over baseline"),
    "host": ("host", "device share of decode time, arm over baseline"),
    "decode_share": ("decode share", "decode share of wall time, arm over baseline"),
}


def detail_tables(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> dict[str, Table]:
    """Return the tables by heading, in the order of the page. Those that a run lacks are left out."""
    tables = {
        "Accuracy compared": accuracy_table(cells, numbers),
        "Valid answers compared": accuracy_table(cells, numbers, "valid"),
        "By task": task_table(cells, numbers, own),
        "By turn": range_table(cells, numbers, own, "turns"),
        "By context": range_table(cells, numbers, own, "contexts"),
        "Acceptance": acceptance_table(cells, numbers),
        "Speed": speed_table(cells, numbers, own),
        "Factors of the speedup": factor_table(cells, numbers, own),
        "Latency, answers and memory": latency_table(cells, numbers),
        "Cost of the measurement": cost_table(cells, numbers),
    }
    return {heading: table for heading, table in tables.items() if table.rows}


def accuracy_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], right: str = "correct") -> Table:
    """Return every paired comparison of accuracy, or of `valid` answers, one row each."""
    what, field = ("accuracy", "accuracy_vs") if right == "correct" else ("share of valid answers", "valid_vs")
    columns = [
        ("difference, points", f"{what} less the baseline's, on the same items"),
        (f"only arm {right}", f"items that only the arm answers {right}ly"),
        (f"only baseline {right}", f"items that only the baseline answers {right}ly"),
        ("same answers", "items with the baseline's tokens"),
    ]
    rows = []
    for cell in cells:
        same = {a.baseline: f"{a.identical:,} of {a.items:,}" for a in cell.agreement}
        for versus in getattr(cell, field):
            difference = interval(bounds(versus), 100, 1)
            entries = [
                Entry(points(versus.difference), difference, shown_verdict(versus.verdict), versus.baseline),
                Entry(count(versus.gained)),
                Entry(count(versus.lost)),
                Entry(same.get(versus.baseline, NONE)),
            ]
            rows.append(arm_row(cell, numbers, entries))
    caption = "Paired differences on the same items, one row for each arm and baseline"
    return Table(columns, rows, caption=caption, leading=True)


def task_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> Table:
    """Return a row per task and a column per arm if the suite has several tasks; then all items together."""
    shown = [cell for cell in cells if cell.status != "failed"]
    tasks = [*zip(*(cell.tasks for cell in shown), strict=True)]  # each of all arms
    items = {task[0].task: max(part.items for part in task) for task in tasks}
    if not items:
        return Table([], [], of="task")
    baselines = {cell.arm: own.headline[cell.arm].baseline for cell in shown if cell.arm in own.headline}
    over = {arm: f"speedup over {baseline}" for arm, baseline in baselines.items()}
    columns = [(f"{numbers[cell.arm]}. {cell.arm}", over.get(cell.arm, "a baseline")) for cell in shown]
    tags = ["simulated"] if any(cell.simulated for cell in shown) else []
    rows = []
    for task in tasks:
        entries = [_task_entry(part, baselines.get(cell.arm)) for part, cell in zip(task, shown, strict=True)]
        rows.append(Row(f"{task[0].task} ({items[task[0].task]:,})", entries, tags=tags))
    whole = [_task_entry(cell, baselines.get(cell.arm)) for cell in shown]
    rows.append(Row(f"all items ({sum(items.values()):,})", whole, tags=tags))
    if any(cell.accuracy_macro for cell in shown):
        mean = [Entry.of(cell.accuracy_macro, 100, 1) for cell in shown]
        rows.append(Row(f"mean of the {len(items)}", mean, tags=tags))
    caption = (
        "Speedup, tokens per forward and acceptance rate, and accuracy if the suite is scored; for a baseline, tokens "
        "per second instead of a speedup"
    )
    return Table(columns, rows, of="task", caption=caption)


def _task_entry(part: TaskFigures | ResultCell, baseline: str | None) -> Entry:
    """Return the accuracy of a task with the other figures as its detail; if it is not scored, the speedup."""
    details = []
    if part.tokens_per_forward:
        details.append(f"{number(part.tokens_per_forward)} per forward")
    if part.acceptance is not None and part.acceptance.rate is not None:
        details.append(f"{percent(part.acceptance.rate, 0)}% accepted")
    speedups: Sequence[Speedup | TaskSpeedup] = part.speedup
    speedup = next((s for s in speedups if s.baseline == baseline), None)
    speed = Entry()
    if speedup is not None and speedup.value:
        speed = speed_entry(speedup, brief=True)
    elif part.tokens_per_s.value is not None:
        speed = Entry(f"{number(part.tokens_per_s.value)} tokens/s")
    if part.accuracy is None:
        return replace(speed, detail=listed(details) or None)
    if speed.value != NONE and (speedup is None or speedup.ci_low is not None):
        details.insert(0, speed.value)
    return replace(Entry.of(part.accuracy, 100, 1), detail=listed(details) or None)


def range_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups, name: str) -> Table:
    """Return a row for each arm and range. name: the field of a cell with the ranges, `turns` or `contexts`."""
    columns: list[tuple[str, str, Callable[[RangeFigures], Entry]]] = [
        ("answers", "", lambda p: Entry(count(p.items))),
        ("tokens per forward", "", lambda p: Entry(number(p.tokens_per_forward), interval(p.tokens_per_forward_ci))),
        ("acceptance rate, %", "accepted guesses over offered ones", lambda p: Entry.of(p.acceptance_rate, 100)),
        ("tokens/s", "tokens per second of wall time, prefill included", lambda p: Entry.of(p.tokens_per_s)),
        ("first token, ms", "time to the first token, mean over blocks", lambda p: Entry.of(p.ttft_s, 1e3)),
        ("later token, ms", "time per token of a request after its first", lambda p: Entry.of(p.tpot_s, 1e3)),
        ("cached, %", "tokens of the prompts that the engine had kept", lambda p: Entry.of(p.cached_share, 100)),
    ]
    rows = []
    for cell in (cell for cell in cells if cell.status != "failed"):
        baseline = own.headline[cell.arm].baseline if cell.arm in own.headline else None
        for part in getattr(cell, name):
            over = [s for s in part.speedup if s.baseline == baseline]
            speedups = [speed_entry(s, brief=True) for s in over]
            row = arm_row(cell, numbers, [*(entry(part) for *_, entry in columns), *(speedups or [Entry()])])
            rows.append(replace(row, name=part.part, number=None, group=f"{numbers[cell.arm]}. {cell.arm}"))
    headings = [*((heading, meaning) for heading, meaning, _ in columns), ("speedup", "as in the main table")]
    caption = "Means of blocks of conversations; intervals are over conversations"
    return Table(headings, rows, of={"turns": "turn", "contexts": "prompt tokens"}[name], caption=caption).filled()


def acceptance_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return the acceptance of the arms that guess."""
    measured = ((cell.arm, cell.acceptance) for cell in cells if cell.acceptance is not None)
    figures = {arm: found for arm, found in measured if found.length is not None and found.offered != 0}

    def notes(cell: ResultCell) -> Notes:
        who = figures[cell.arm].reported_by
        return failure(cell) + ([("flag", f"Counted by {who}.")] if who else [])

    columns = [
        Column(
            "acceptance length",
            "tokens per forward that committed any; it includes the model's own token",
            lambda cell: Entry(number(figures[cell.arm].length), interval(figures[cell.arm].length_ci)),
        ),
        Column(
            "acceptance rate, %",
            "accepted guesses over offered guesses",
            lambda cell: Entry(percent(figures[cell.arm].rate)),
        ),
        Column("offered", "guesses offered", lambda cell: Entry(count(figures[cell.arm].offered))),
        Column(
            "per position, %",
            "share of these forwards that accepted at least 1, 2, … guesses",
            lambda cell: _positions_entry(figures[cell.arm].per_position),
        ),
        Column(
            "as vLLM counts",
            "1 + accepted / drafts, accepted after the answer's end included",
            lambda cell: Entry(number(figures[cell.arm].vllm)),
        ),
    ]
    caption = "Acceptance, from the commits of each forward; acceptance.yaml has vLLM's length by number of drafts"
    return table_of(columns, [cell for cell in cells if cell.arm in figures], numbers, caption, notes)


def _positions_entry(shares: Sequence[float] | None) -> Entry:
    shown = [percent(share, 0) for share in (shares or ())[:POSITIONS_SHOWN]]
    if shares and len(shares) > POSITIONS_SHOWN:
        shown.append("…")
    return Entry(listed(shown) or NONE)


def speed_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> Table:
    """Return tokens per second and the speedups over each kind of baseline."""
    columns = [
        Column(
            "tokens/s",
            "tokens per second of wall time, prefill included",
            lambda cell: Entry.of(cell.tokens_per_s),
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
        ),
        Column(
            "decoding alone",
            "decoding time of the baseline of the main table over that of the arm, without the prompts",
            lambda cell: _decode_entry(own.headline.get(cell.arm)),
        ),
        Column(
            "incl. engine",
            "wall time of the fastest reference by another engine over that of the arm, so that the ratio contains the "
            "engine's part; plain: the ratio of plain decoding by the arm's own engine, which is the engine's part "
            "alone",
            lambda cell: _speedup_entry(over_fastest_engine(cell)),
        ),
    ]
    return table_of(columns, cells, numbers, "Rates, and speedups over each kind of baseline")


def _speedup_entry(speedup: Speedup | None) -> Entry:
    """Return a speedup. One that contains an engine's part has this as its detail, if it is known."""
    if speedup is None or speedup.value is None:
        return Entry()
    detail, plain = length_detail(speedup), speedup.plain
    if speedup.includes_engine:
        detail = f"plain {plain.arm} {times(plain.value)}" if plain and bounds(plain) else None
    return speed_entry(speedup, against=speedup.baseline, detail=detail)


def length_detail(speedup: Speedup) -> str | None:
    """Return the ratio of answer lengths if it matters to a speedup."""
    length = speedup.length_ratio
    differs = length is not None and abs(length - 1) > statistics.LENGTH_RATIO_SHOWN_BEYOND
    return f"length {times(length)}" if differs else None


def _decode_entry(speedup: Speedup | None) -> Entry:
    if speedup is None or speedup.decode is None or not bounds(speedup.decode):
        return Entry()
    return Entry(times(speedup.decode.value), interval(bounds(speedup.decode)), against=speedup.baseline)


def factor_table(cells: Sequence[ResultCell], numbers: Mapping[str, int], own: OwnSpeedups) -> Table:
    """Return the factors of the speedup over the baseline on the same checkpoint."""

    def factor(name: str) -> Column:
        def entry(cell: ResultCell) -> Entry:
            factors = own.same[cell.arm].factors
            return Entry(times(None if factors is None else getattr(factors, name)))

        return Column(*FACTORS[name], entry)

    columns = [
        *map(factor, FACTORS),
        Column(
            "answer length", "tokens, arm over baseline", lambda cell: Entry(times(own.same[cell.arm].length_ratio))
        ),
        Column(
            "speedup",
            "wall time, baseline over arm: the product of the five factors, over the ratio of answer lengths",
            lambda cell: Entry(times(own.same[cell.arm].value), against=own.same[cell.arm].baseline),
        ),
    ]
    caption = "Factors over the baseline on the same checkpoint; their product over the answer length is the speedup"
    with_intervals = [cell for cell in cells if cell.arm in own.same and bounds(own.same[cell.arm])]
    return table_of(columns, with_intervals, numbers, caption)


def latency_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return the times of a request, and the cost of its answer."""
    columns = [
        Column(
            "request",
            "median, 95th and 99th percentile of the time from the start of a batch to the end of an answer",
            lambda cell: _latency_entry(cell.request_latency_s),
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
            "stopped by a string",
            "answers that ended at a stop string",
            lambda cell: Entry(count(cell.finish.stop)) if any(other.finish.stop for other in cells) else Entry(),
        ),
        Column(
            "cut by budget, %",
            "answers that ended at the token budget",
            lambda cell: Entry(percent(cell.finish.length / cell.items if cell.items else None)),
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
    return table_of(columns, cells, numbers, "Times of a request, how answers ended, and what they took")


def _latency_entry(spread: Percentiles | RequestLatency | None) -> Entry:
    if spread is None or spread.p50 is None:
        return Entry()
    detail = f"p99 {seconds(spread.p99)}" if isinstance(spread, RequestLatency) else None
    return Entry(seconds(spread.p50), f"p95 {seconds(spread.p95)}", detail=detail)


def cost_table(cells: Sequence[ResultCell], numbers: Mapping[str, int]) -> Table:
    """Return where time and memory went, and how clean the measurement was."""
    columns = [
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
        Column("prefill", "wall time of reading the prompts", lambda cell: Entry(seconds(cell.prefill_s))),
        Column(
            "% of roofline",
            "least time of its forwards for their weights, keys, values and FLOPs at the measured speeds of the GPU, "
            "over decode time",
            lambda cell: Entry(percent(cell.roofline_fraction)),
        ),
        Column(
            "draft forwards per token",
            "forwards of other models per token",
            lambda cell: Entry(number(cell.draft_forwards_per_token or None)),
        ),
        Column("draft time", "time in forwards of other models", lambda cell: _part_entry(cell.draft_s, cell.decode_s)),
        Column(
            "head time",
            "time in what the method computes beside its models",
            lambda cell: _part_entry(cell.head_s, cell.decode_s),
        ),
        Column(
            "KV cache", "most bytes of keys and values that a block needs", lambda cell: Entry(memory(cell.kv_bytes))
        ),
        Column(
            "energy per token",
            "energy of the whole GPU; it includes prompts and idle power",
            lambda cell: Entry(joules(cell.j_per_token)),
        ),
    ]
    return table_of(columns, cells, numbers, "Time, memory and disturbances of each arm's measurement")


def _part_entry(part_s: float | None, decode_s: float | None) -> Entry:
    """Return seconds with their share of decoding; nothing for an arm that has no such part."""
    share = f"{percent(part_s / decode_s)}% of decoding" if part_s and decode_s else None
    return Entry(seconds(part_s or None), detail=share)

"""What a report's tables say: each arm's values, with interval, verdict and baseline, as text for every format."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtbench import statistics
from mtbench.report.figures import FACTORS
from mtbench.report.formatting import NONE, ci, interval, joules, memory, number, points, seconds, times
from mtbench.report.terminal import strongest, ungraded
from mtbench.results.acceptance import OWNERS
from mtbench.runs.simulation import flags_of

Cell = Mapping[str, Any]

TONES = {  # of a verdict's first words: good, bad; anything else says neither
    "good": ("faster", "not worse", "exact"),
    "bad": ("slower", "worse", "divergent"),
}
SAID = "accuracy inconclusive"  # a flag whose row says so already, with the items needed
SIGNS = {"good": "▲", "bad": "▼", "plain": "•"}
POSITIONS_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Entry:
    """One place of a table: a value, its interval, a verdict, what it is compared with."""

    value: str = NONE
    interval: str | None = None
    verdict: str | None = None
    against: str | None = None
    detail: str | None = None  # what else to know of the value

    @property
    def tone(self) -> str:
        """What kind of news the verdict is; `worse by less than the margin` is neither."""
        verdict = self.verdict or ""
        if "less than the margin" in verdict:
            return "plain"
        return next((tone for tone, words in TONES.items() if verdict.startswith(words)), "plain")

    @property
    def words(self) -> bool:
        """Whether the value is words, which may wrap, and not a number."""
        return self.value[:1].isalpha()

    @property
    def sign(self) -> str:
        return SIGNS[self.tone]

    def line(self) -> str:
        """All of it on one line."""
        bracket = (self.interval or "").startswith("[")
        value = f"{self.value}{' ' if bracket else ', '}{self.interval}" if self.interval else self.value
        value = f"{value}, {self.detail}" if self.detail else value
        if not self.against:
            return f"{value}, {self.verdict}" if self.verdict else value
        comparative = self.verdict in ("faster", "slower", "not worse", "worse")
        named = f"{self.verdict} than {self.against}" if comparative else f"{self.verdict} (against {self.against})"
        return f"{value}, {named}" if self.verdict else f"{value} (against {self.against})"


@dataclass(frozen=True, slots=True)
class Row:
    """One arm, or one task, which has no number. `notes`: its failure, why it is void, its flags, in words.

    A failed arm has no entries.
    """

    number: int | None
    arm: str
    entries: list[Entry]
    notes: list[tuple[str, str]]  # (kind, text), kind one of failed, void, flag
    void: bool
    failed: bool
    simulated: bool

    @property
    def tags(self) -> list[str]:
        """What stands beside the arm wherever it is named."""
        return ["void"] * self.void + ["simulated"] * self.simulated


@dataclass(frozen=True, slots=True)
class Table:
    """Columns beside that of the arm, and a row for each arm; or the other way round, of another thing."""

    columns: list[tuple[str, str]]  # heading, and what it means
    rows: list[Row]
    of: str = "arm"  # what the rows are

    def first(self, n: int) -> "Table":
        """The same with so many columns."""
        return Table(self.columns[:n], [replace(row, entries=row.entries[:n]) for row in self.rows])


def main_table(
    cells: Sequence[Cell], numbers: Mapping[str, int], own: Mapping[str, Cell], deployed: Mapping[str, Cell]
) -> Table:
    """Quality, speed and cost. own, deployed: arm -> its `speedup` entry over either baseline."""
    engines = {c["arm"]: entry for c in cells if (entry := strongest(c)) is not None}
    columns = [
        ("accuracy, %", "share of items right; the verdict is on the same items, against the arm named"),
        ("tokens per forward", "committed tokens over forwards of the model"),
        ("tokens/s", "wall-clock, prefill included"),
        (
            "speedup, same checkpoint",
            "baseline's wall-clock over the arm's, same prompts, same checkpoint; "
            "answer length is given where it is off by more than 1%",
        ),
        ("speedup, deployment", "the same over the checkpoint one would deploy without this method"),
        *[
            (
                "incl. engine",
                "the same over the fastest reference by another engine, so the engine's part is in it; beside it, what "
                "plain decoding by the arm's own engine comes to, which is the engine's part alone",
            )
        ][: len(engines)],
        (
            "lossless",
            "are the tokens those of the arm it is held to? floor: that arm against itself, at the smallest and the "
            "largest batch size of the run",
        ),
        ("cut by budget, %", "answers ended by the token budget"),
        ("between commits", "median and 95th percentile of the wait between two commits of a row"),
        ("first token", "median and 95th percentile of the time to the first token"),
        ("positions per token", "positions fed to the model for each token that came out"),
        ("peak memory", "highest use in an untimed pass; on a CPU the whole process, libraries included"),
    ]

    def entries(cell: Cell) -> list[Entry]:
        positions = cell["positions_fed_per_token"]
        return [
            _accuracy_entry(cell, own),
            Entry(number(cell["tokens_per_forward"]), interval(cell["tokens_per_forward_ci"])),
            Entry(number(cell["tokens_per_s"]["value"]), interval(ci(cell["tokens_per_s"]))),
            _speedup_entry(own.get(cell["arm"])),
            _speedup_entry(deployed.get(cell["arm"])),
            *([_engine_entry(engines.get(cell["arm"]))] if engines else []),
            _lossless_entry(cell),
            Entry(f"{100 * cell['finish']['length'] / cell['items']:.1f}" if cell["items"] else NONE),
            _latency_entry(cell["commit_latency_s"]),
            _latency_entry(cell["ttft_s"]),
            Entry(number(positions)),
            Entry(memory(cell["peak_memory_bytes"])),
        ]

    return _table(columns, cells, numbers, entries)


def cost_table(cells: Sequence[Cell], numbers: Mapping[str, int]) -> Table:
    """Where time and memory went, and how clean the measurement was."""
    probed = any(c["roofline_fraction"] is not None for c in cells)
    drafts, draft_times, heads = (any(c[name] for c in cells) for name in ("draft_forwards", "draft_s", "head_s"))
    columns = [
        ("items", "answered items"),
        ("blocks × rounds", "blocks with a clean timing, and how often the first of them were timed"),
        ("samples dropped", "timings left out because the machine was disturbed"),
        ("wall", "seconds for the blocks once, mean over rounds"),
        ("prefill", "of the wall-clock"),
        ("decode", "of the wall-clock"),
        ("host gap", "decode time outside the model"),
        ("decode tokens/s", "prefill left out"),
        ("preparation", "what first calls took beyond warm ones: capture, compilation, memory; before the clock runs"),
        *[
            (
                "% of roofline",
                "least time that the weights, K/V and FLOPs of its forwards take at the probed bandwidth and speed, "
                "over decode time",
            )
        ][:probed],
        ("positions per forward", "how wide the windows were"),
        *[("draft forwards per token", "of other models; in all")][:drafts],
        *[("draft time", "seconds in forwards of other models")][:draft_times],
        *[("head time", "seconds in what a method computes beside the model")][:heads],
        ("K/V cache", "bytes at the longest batch"),
        ("energy per token", "of the whole GPU, prompts included and idle power not subtracted"),
        ("same tokens again", "repeated items whose tokens equalled round 1's"),
    ]

    def entries(cell: Cell) -> list[Entry]:
        samples = cell["samples"]
        repeated = cell["repeated_identical"]
        return [
            Entry(f"{cell['items']:,}"),
            Entry(f"{cell['blocks']} × {cell['rounds']}"),
            Entry(f"{samples['dropped']} of {samples['used'] + samples['dropped']}"),
            Entry(seconds(cell["wall_s"])),
            Entry(seconds(cell["prefill_s"])),
            Entry(seconds(cell["decode_s"])),
            Entry(seconds(cell["host_gap_s"])),
            Entry(number(cell["decode_tokens_per_s"]["value"])),
            Entry(seconds(cell["preparation_s"] or None)),
            *[_share_entry(cell["roofline_fraction"])][:probed],
            Entry(number(cell["positions_fed_per_forward"])),
            *[_draft_entry(cell)][:drafts],
            *[_time_entry(cell["draft_s"], cell["decode_s"])][:draft_times],
            *[_time_entry(cell["head_s"], cell["decode_s"])][:heads],
            Entry(memory(cell["kv_bytes"])),
            Entry(joules(cell.get("j_per_token"))),
            Entry(NONE if repeated is None else f"{100 * repeated:.4g}%"),
        ]

    return _table(columns, cells, numbers, entries, notes=False)


def acceptance_table(cells: Sequence[Cell], numbers: Mapping[str, int]) -> Table:
    """What was accepted, in the field's words, of the arms that guess."""
    told = [c for c in cells if c["acceptance"] and c["acceptance"]["length"] is not None]
    guessing = [c for c in told if c["acceptance"]["offered"] != 0]  # None: an engine tells no more than the length
    columns = [
        ("acceptance length", "tokens per forward that committed any, the model's own one included"),
        ("acceptance rate, %", "accepted guesses over those offered"),
        ("offered", "guesses offered"),
        ("per position, %", "forwards that accepted a first guess, a first and a second, and so on"),
        *((whose, f"its own figure: {formula}") for whose, formula in OWNERS.values()),
    ]

    def entries(cell: Cell) -> list[Entry]:
        told = cell["acceptance"]
        return [
            Entry(number(told["length"])),
            _share_entry(told["rate"]),
            Entry(NONE if told["offered"] is None else f"{told['offered']:,}"),
            _positions_entry(told["per_position"]),
            *(Entry(number(told["derived"][owner])) for owner in OWNERS),
        ]

    return _table(columns, guessing, numbers, entries, notes=False)


def task_table(cells: Sequence[Cell], numbers: Mapping[str, int], own: Mapping[str, Cell]) -> Table:
    """Each task apart, where a suite has several: a row for each, a column for each arm; then all of them together."""
    items = {
        part["task"]: max(p["items"] for c in cells for p in c["tasks"] if p["task"] == part["task"])
        for c in cells
        for part in c["tasks"]
    }
    shown = [cell for cell in cells if cell["status"] != "failed"] if items else []
    baselines = {cell["arm"]: own[cell["arm"]]["baseline"] if cell["arm"] in own else None for cell in shown}
    over = {arm: f"speedup over {baseline}" if baseline else "a baseline" for arm, baseline in baselines.items()}
    columns = [(f"{numbers[cell['arm']]}. {cell['arm']}", over[cell["arm"]]) for cell in shown]

    def row(name: str, entries: list[Entry]) -> Row:
        return Row(None, name, entries, [], False, False, any(cell["simulated"] for cell in shown))

    rows = []
    for task, count in items.items() if shown else ():
        apart = [next((p for p in cell["tasks"] if p["task"] == task), None) for cell in shown]
        parts = zip(apart, baselines.values(), strict=True)
        rows.append(row(f"{task} ({count:,})", [_task_entry(part, baseline) for part, baseline in parts]))
    if rows:
        every = sum(items.values())
        whole = [_task_entry(cell, baselines[cell["arm"]]) for cell in shown]
        rows.append(row(f"all items ({every:,})", whole))
    if any(cell["accuracy_macro"] for cell in shown):
        rows.append(row(f"mean of the {len(items)}", [_percent_entry(cell["accuracy_macro"]) for cell in shown]))
    return Table(columns, rows, of="task")


def factor_table(cells: Sequence[Cell], numbers: Mapping[str, int], own: Mapping[str, Cell]) -> Table:
    """The five factors, over the baseline on the same checkpoint."""
    columns = [
        ("tokens per forward", "how many more tokens a row's forward commits"),
        ("forward time", "baseline's time of a forward over the arm's"),
        ("utilisation", "live rows per forward"),
        ("host", "share of decoding spent in the model"),
        ("decode share", "share of the wall-clock spent decoding"),
        ("rate ratio", "the product of the five: tokens per second over the baseline's"),
        ("answer length", "tokens over the baseline's; speedup is the rate ratio over this"),
        ("speedup", "wall-clock of the baseline over the arm's"),
    ]
    explained = [c for c in cells if c["arm"] in own]

    def entries(cell: Cell) -> list[Entry]:
        entry = own[cell["arm"]]
        factors = entry["factors"] or {}
        return [
            *(Entry(times(factors.get(name))) for name in FACTORS),
            Entry(times(entry["rate_ratio"])),
            Entry(times(entry["length_ratio"])),
            Entry(times(entry["value"]), against=entry["baseline"]),
        ]

    return _table(columns, explained, numbers, entries, notes=False)


def engine_table(cells: Sequence[Cell], numbers: Mapping[str, int]) -> Table:
    """Every comparison with a reference by another engine, one row each, beside plain decoding by the arm's own."""
    columns = [
        ("incl. engine", "wall-clock of a reference by another engine over the arm's, on the same prompts"),
        ("plain by the same engine", "the same ratio for plain decoding by the arm's own engine: the engine's part"),
        ("answer length", "tokens over the reference's"),
    ]
    rows = [
        Row(
            numbers[cell["arm"]],
            cell["arm"],
            [
                Entry(times(entry["value"]), interval(ci(entry)), entry["verdict"], entry["baseline"]),
                _plain_entry(entry["plain"]),
                Entry(times(entry["length_ratio"])),
            ],
            [],
            bool(cell["void"]),
            failed=False,
            simulated=bool(cell["simulated"]),
        )
        for cell in cells
        for entry in cell["speedup"]
        if entry.get("includes_engine")
    ]
    return Table(columns, rows)


def gaps(cells: Sequence[Cell]) -> list[str]:
    """Why places of the tables are empty, and where a percentile is a single value; each reason once."""
    answered = [c for c in cells if c["status"] != "failed"]
    said = []
    for what, key in (("Energy per token", "energy_reason"), ("% of roofline", "roofline_reason")):
        for reason in dict.fromkeys(c[key] for c in answered if c.get(key)):
            arms = [c["arm"] for c in answered if c.get(key) == reason]
            whose = "" if len(arms) == len(answered) else f" of {', '.join(arms)}"
            said.append(f"{what}{whose}: {reason}.")
    if any(c["device"] == "cpu" and c["peak_memory_bytes"] is None for c in answered):
        said.append("Peak memory: on a CPU it is measured only with `--peak-memory`.")
    if any(c["batching"] == "refill" for c in answered):
        said.append("Between commits: the step a row began at is not stored where slots are refilled.")
    if any(c["samples"]["used"] == 1 and c["ttft_s"]["p50"] is not None for c in answered):
        said.append("First token: one block was timed, so median and 95th percentile are the same sample.")
    return said


def accuracy_table(cells: Sequence[Cell], numbers: Mapping[str, int]) -> Table:
    """Every paired comparison of accuracy, one row each."""
    columns = [
        ("difference, points", "accuracy less the baseline's, on the same items"),
        ("only this right", "items"),
        ("only baseline right", "items"),
        ("McNemar p", "reported; decides nothing"),
        ("items needed", "for a verdict at this margin, if the arms differ as often as here"),
        ("same answers", "items with the baseline's very tokens"),
    ]
    rows = []
    for cell in cells:
        agreement = {a["baseline"]: a for a in cell["agreement"]}
        for versus in cell["accuracy_vs"]:
            same = agreement.get(versus["baseline"])
            entries = [
                Entry(
                    points(versus["difference"]),
                    interval(ci(versus), 100, 1),
                    versus["verdict"],
                    versus["baseline"],
                ),
                Entry(f"{versus['gained']:,}"),
                Entry(f"{versus['lost']:,}"),
                Entry(NONE if versus["p_mcnemar"] is None else f"{versus['p_mcnemar']:.2g}"),
                Entry(NONE if not versus["n_needed"] else f"{versus['n_needed']:,}"),
                Entry(NONE if same is None else f"{same['identical']:,} of {same['items']:,}"),
            ]
            void, simulated = bool(cell["void"]), bool(cell["simulated"])
            rows.append(Row(numbers[cell["arm"]], cell["arm"], entries, [], void, failed=False, simulated=simulated))
    return Table(columns, rows)


def _table(
    columns: list[tuple[str, str]],
    cells: Sequence[Cell],
    numbers: Mapping[str, int],
    entries: Callable[[Cell], list[Entry]],
    *,
    notes: bool = True,
) -> Table:
    rows = [
        Row(
            numbers[cell["arm"]],
            cell["arm"],
            [] if cell["status"] == "failed" else entries(cell),
            _notes(cell) if notes else [("failed", f"Failed: {cell['error']}")] if cell["status"] == "failed" else [],
            bool(cell["void"]),
            cell["status"] == "failed",
            bool(cell["simulated"]),
        )
        for cell in cells
    ]
    return Table(columns, rows)


def _notes(cell: Cell) -> list[tuple[str, str]]:
    """What a reader must know of an arm, the gravest first."""
    notes = []
    if cell["error"]:
        notes.append(("failed", f"Failed: {cell['error']}"))
    elif cell["status"] != "ok":
        notes.append(("failed", f"Unfinished ({cell['status']}): some items have no answer yet; resume the run."))
    notes += [("void", f"Void, not to be trusted: {reason}.") for reason in cell["void"]]
    flags = [flag for flag in cell["flags"] if flag != SAID and flag not in flags_of(cell["simulated"])]
    return notes + [("flag", f"Mind: {'; '.join(flags)}.")] * bool(flags)


def _accuracy_entry(cell: Cell, own: Mapping[str, Cell]) -> Entry:
    accuracy = cell["accuracy"]
    if accuracy is None or accuracy["value"] is None:
        return Entry()
    preferred = own[cell["arm"]]["baseline"] if cell["arm"] in own else None
    compared = sorted(cell["accuracy_vs"], key=lambda a: a["baseline"] != preferred)
    versus = compared[0] if compared else None
    return Entry(
        f"{100 * accuracy['value']:.1f}",
        interval(ci(accuracy), 100, 1),
        versus and versus["verdict"],
        versus and versus["baseline"],
    )


def _speedup_entry(entry: Cell | None) -> Entry:
    if entry is None or entry["value"] is None:
        return Entry()
    length = entry.get("length_ratio")
    off = length is not None and abs(length - 1) > statistics.LENGTH_RATIO_SHOWN_BEYOND
    detail = f"length {times(length)}" if off else None
    return Entry(times(entry["value"]), interval(ci(entry)), entry.get("verdict"), entry["baseline"], detail)


def _engine_entry(entry: Cell | None) -> Entry:
    """A ratio that holds an engine's part, never without that part beside it where it is known."""
    if entry is None:
        return Entry()
    plain = entry["plain"]
    alone = plain and f"plain {plain['arm']} {times(plain['value'])}"
    return Entry(times(entry["value"]), interval(ci(entry)), entry["verdict"], entry["baseline"], alone)


def _plain_entry(plain: Cell | None) -> Entry:
    return Entry(times(plain["value"]), interval(ci(plain)), detail=plain["arm"]) if plain else Entry()


def _lossless_entry(cell: Cell) -> Entry:
    graded = cell["lossless"]
    if graded is None:
        return Entry(ungraded(cell))
    same = f"{graded['identical']:,} of {graded['items']:,}"
    floor = graded["floor"] and f"floor {graded['floor']['identical']:,} of {graded['floor']['items']:,}"
    if cell["claims"] != "lossless":  # held to a twin of itself
        return Entry("lossy by design", f"{same} the same", graded["grade"], graded["against"], floor)
    return Entry(same, "the same", graded["grade"], graded["against"], floor)


def _draft_entry(cell: Cell) -> Entry:
    total = cell["draft_forwards"]
    return _part_entry(total, number(cell["draft_forwards_per_token"]), f"{total or 0:,} in all")


def _time_entry(part_s: float | None, decode_s: float | None) -> Entry:
    """Seconds, and their share of decoding."""
    share = f"{100 * part_s / decode_s:.1f}% of decoding" if part_s and decode_s else None
    return _part_entry(part_s, seconds(part_s), share)


def _part_entry(total: float | None, value: str, detail: str | None) -> Entry:
    """What an arm may have no part in, which is 0 without further words."""
    return Entry(value, detail=detail) if total else Entry(NONE if total is None else "0")


def _positions_entry(shares: Sequence[float] | None) -> Entry:
    shown = [f"{100 * share:.0f}" for share in (shares or ())[:POSITIONS_SHOWN]]
    more = ["…"] if shares and len(shares) > POSITIONS_SHOWN else []
    return Entry(", ".join(shown + more) or NONE)


def _task_entry(part: Cell | None, baseline: str | None) -> Entry:
    """Of a scored suite the share of items right, with the rest beside it; of any other the speedup."""
    if part is None:
        return Entry()
    taken = part["acceptance"] and part["acceptance"]["rate"]
    beside = [
        f"{number(part['tokens_per_forward'])} per forward" if part["tokens_per_forward"] else None,
        f"{100 * taken:.0f}% accepted" if taken is not None else None,
    ]
    entry = next((s for s in part["speedup"] if s["baseline"] == baseline), None)
    speed = Entry(times(entry["value"]), interval(ci(entry)), entry["verdict"]) if entry and entry["value"] else None
    if speed is None and part["tokens_per_s"]["value"] is not None:
        speed = Entry(f"{number(part['tokens_per_s']['value'])} tokens/s")
    if not part["accuracy"]:
        return replace(speed or Entry(), detail=", ".join(filter(None, beside)) or None)
    beside = [speed.value if speed and (not entry or entry["ci_low"] is not None) else None, *beside]
    return replace(_percent_entry(part["accuracy"]), detail=", ".join(filter(None, beside)) or None)


def _percent_entry(accuracy: Cell | None) -> Entry:
    if accuracy is None or accuracy["value"] is None:
        return Entry()
    return Entry(f"{100 * accuracy['value']:.1f}", interval(ci(accuracy), 100, 1))


def _latency_entry(spread: Cell) -> Entry:
    if spread["p50"] is None:
        return Entry()
    return Entry(seconds(spread["p50"]), f"p95 {seconds(spread['p95'])}")


def _share_entry(share: float | None) -> Entry:
    return Entry(NONE if share is None else f"{100 * share:.1f}")

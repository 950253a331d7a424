"""Every published figure beside ours, with a verdict, from the runs of a reproduction (mtbench/reproduce/published.py).

The words of a verdict are those of mtbench/reproduce/agreement.py. A figure is **not comparable** where ours is of
another thing: a miniature (another family, benchmark or budget of tokens, a part of each subtask, simulated weights),
an engine, device or batch size that times depend on and that is not the paper's, an accounting that is not; what the
published file says cannot be compared at all (such as times on a GPU that is not stated) never is. A smaller number of
questions of the same benchmark is the same thing told less surely. A row whose checkpoint is not to be had is **not
run**, says what would run it, and costs nothing else; so does a benchmark whose data or sandbox is missing.

**The paper's accounting** of tokens per forward (arXiv 2604.07023, as its samplers count) differs from ours twice. It
counts what the last forward accepted behind the end of the answer, and it does not stop at stop strings; `--protocol
paper` decodes so, and stores those tokens (`surplus`). And its sampler has no forward that only reads the prompt: the
first one commits. Ours caches the prompt and feeds its last token again, so there are as many forwards that commit in
ours as there are forwards in theirs, and the prompt's own is counted in neither.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtbench import statistics
from mtbench.evaluation.registry import SUITES
from mtbench.reproduce import agreement
from mtbench.reproduce.agreement import WORDS, Estimate, Finding
from mtbench.reproduce.published import (
    AVERAGE,
    EAGER,
    PAPER,
    RESULT,
    SCHEMA_VERSION,
    SHARES,
    UNITS,
    Asked,
    Part,
    Published,
    PublishedRow,
    arm_of,
    stands_in,
    suites_of,
)
from mtbench.results import samples
from mtbench.results.samples import CellData
from mtbench.runs.directory import Record, RunDirectory


def compare(table: Published, asked: Asked, parts: Sequence[Part], folder: Path) -> Record:
    """Every published figure beside ours, as reproduction.json holds it; written there and returned."""
    opened = {part.family: _Opened(table, asked, part, folder) for part in parts}
    found = []
    for row in table.rows:
        part = opened.get(asked.family if stands_in(table, asked) and asked.family else row.family)
        for quantity, by_benchmark in row.figures.items():
            for benchmark, printed in by_benchmark.items():
                found.append(_figure(table, asked, row, quantity, benchmark, printed, part))
    result = {
        "schema_version": SCHEMA_VERSION,
        **{name: getattr(table, name) for name in ("name", "title", "what", "source", "setup", "caveats", "also")},
        "asked": dataclasses.asdict(asked),
        "protocol": asked.protocol,
        "margins": {"accuracy": statistics.ACCURACY_MARGIN, "rates": statistics.SPEED_MARGIN, "level": 0.95},
        "runs": [one.described() for one in opened.values()],
        "verdicts": {word: sum(f["word"] == word for f in found) for word in WORDS},
        "figures": found,
        "accounting": [line for one in opened.values() for line in one.accounting()],
    }
    RunDirectory(folder).write_json(RESULT, result)
    return result


class _Opened:
    """The run of a part, read."""

    def __init__(self, table: Published, asked: Asked, part: Part, folder: Path) -> None:
        self.table, self.asked, self.part = table, asked, part
        self.suites = suites_of(table, asked)
        self.run = RunDirectory(folder / part.folder)
        self.cells: dict[tuple[str, str, int], tuple[CellData, Record]] = {}
        self.session: Record = {}
        if part.plan is not None and self.run.has("results.json"):
            self.session = (self.run.read_json("environment.json").get("sessions") or [{}])[-1]
            of_run = samples.read(self.run, part.plan)
            for record in self.run.read_json("results.json")["cells"]:
                place = record["suite"], record["arm"], record["batch_size"]
                self.cells[place] = of_run[record["cell"]], record

    def described(self) -> Record:
        """What is said of the run in reproduction.json."""
        gpu, ran = self.session.get("gpu"), self.part.plan is not None
        told = {name: self.session.get(name) for name in ("device", "dtype", "processor")}
        checkpoints = {role: where for one, _ in self.cells.values() for role, where in one.cell.checkpoints.items()}
        return {
            "family": self.part.family,
            "folder": self.part.folder if ran else None,
            "machine": {**told, "gpu": gpu and gpu["name"]},
            "engine": self.part.plan.request.engine if self.part.plan else None,
            "batch_sizes": list(self.part.plan.request.batch_size) if self.part.plan else [],
            "checkpoints": checkpoints,
            "demonstration": any(one.cell.demonstration for one, _ in self.cells.values()),
            "missing": [{"arm": arm, "why": why} for arm, why in self.part.missing.items()],
            "closed": [{"suite": suite, "why": why} for suite, why in self.part.closed.items()],
        }

    def cell(self, spec: str, benchmark: str, batch_size: int | None) -> tuple[CellData, Record] | str:
        """The cell of an arm on a benchmark, or why there is none."""
        if spec in self.part.missing:
            return self.part.missing[spec]
        if benchmark not in self.suites:
            return "left out by --suite"
        suite = self.suites[benchmark]
        if suite in self.part.closed:
            return self.part.closed[suite]
        assert self.part.plan is not None
        request = self.part.plan.request
        size = batch_size or max(request.batch_size)
        if size not in request.batch_size:
            return f"batch size {size} was not asked for; leave `--batch-size` out"
        place = suite, str(arm_of(spec, request.engine)), size
        if place not in self.cells:
            return "failed: its run did not come to results; `--resume` goes on"
        one, record = self.cells[place]
        if record["error"]:
            return f"failed: {record['error']}"
        if record["status"] != "ok":
            return "not finished: `--resume` goes on"
        return one, record

    def accounting(self) -> list[Record]:
        """Tokens per forward, ours and by the paper's accounting, of every cell that counts its forwards."""
        lines = []
        for (suite, arm, size), (one, _) in self.cells.items():
            forwards, tokens = one.counted("forwards"), one.tokens
            if not forwards:
                continue
            surplus = one.counted("surplus") if self.asked.protocol == PAPER and _told(one) else None
            lines.append(
                {
                    "family": self.part.family,
                    "suite": suite,
                    "arm": arm,
                    "batch_size": size,
                    "items": len(one.lines),
                    "tokens_per_forward": tokens / forwards,
                    "tokens_after_the_end": surplus,
                    "paper_tokens_per_forward": None if surplus is None else (tokens + surplus) / forwards,
                    "tokens_per_forward_with_prompt_forward": tokens / (forwards + len(one.lines)),
                }
            )
        return lines


def _told(one: CellData) -> bool:
    """Whether every answer says how many tokens were accepted behind its end."""
    return bool(one.lines) and all(line.surplus is not None for line in one.lines.values())


def _figure(
    table: Published, asked: Asked, row: PublishedRow, quantity: str, benchmark: str, printed: str, part: _Opened | None
) -> Record:
    """One figure of reproduction.json."""
    wanted = _means(table, part) if benchmark == AVERAGE else [benchmark]
    cells = [_pair(row, quantity, name, part) for name in wanted]
    absent = [(name, cell) for name, cell in zip(wanted, cells, strict=True) if isinstance(cell, str)]
    ours: list[_Ours] = []
    if absent:
        name, why = absent[0]
        finding = Finding("not run", why if len(absent) == len(wanted) else f"{name} was not run")
    else:
        assert part is not None
        pairs = [cell for cell in cells if not isinstance(cell, str)]
        measures = [_measure(quantity, *pair, asked.protocol) for pair in pairs]
        ours = [m for m in measures if isinstance(m, _Ours)]
        odd = [why for name, pair in zip(wanted, pairs, strict=True) for why in _odd(part, row, quantity, name, pair)]
        odd += [m for m in measures if isinstance(m, str)]
        if odd:
            finding = Finding("not comparable", odd[0])
        else:
            finding = _judge(quantity, printed, ours, [table.benchmarks[name]["items"] for name in wanted], row, table)
    value = agreement.mean([o.estimate for o in ours]) if len(ours) == len(wanted) else None
    return {
        "row": row.row,
        "note": row.note,
        "family": row.family,
        "arm": row.arm,
        "benchmark": benchmark,
        "suite": None if part is None or benchmark == AVERAGE else part.suites.get(benchmark),
        "batch_size": row.batch_size,
        "quantity": quantity,
        "unit": UNITS[quantity],
        "published": printed,
        "ours": None if value is None else {**_bounds(value, quantity), "n": sum(o.n for o in ours)},
        "difference": None if finding.difference is None else _bounds(finding.difference, quantity, difference=True),
        "word": finding.word,
        "why": finding.why,
    }


def _means(table: Published, part: _Opened | None) -> list[str]:
    """The benchmarks that a mean is over; a suite that stands in for several counts once."""
    suites = {name: part.suites.get(name, name) if part else name for name in table.benchmarks}
    return list({suite: name for name, suite in reversed(suites.items())}.values())[::-1]


Pair = tuple[tuple[CellData, Record], tuple[CellData, Record] | None]


def _pair(row: PublishedRow, quantity: str, benchmark: str, part: _Opened | None) -> Pair | str:
    """A row's cell and that of the arm it is over; or why there is none."""
    if part is None:
        return "left out by --family"
    cell = part.cell(row.arm, benchmark, row.batch_size)
    if isinstance(cell, str) or quantity not in row.against:
        return cell if isinstance(cell, str) else (cell, None)
    over = part.cell(row.against[quantity], benchmark, row.batch_size)
    return f"{row.against[quantity]}, which it is over: {over}" if isinstance(over, str) else (cell, over)


@dataclass(frozen=True, slots=True)
class _Ours:
    """A figure of ours; of shares as shares. `n` units: items, or for speedups blocks."""

    estimate: Estimate
    n: int
    discordant: float = 0.0


def _measure(
    quantity: str, cell: tuple[CellData, Record], over: tuple[CellData, Record] | None, protocol: str
) -> "_Ours | str":
    """Ours of a quantity, or why there is none."""
    one, record = cell
    if quantity == "accuracy":
        if not one.scores:
            return "nothing was scored"
        found = statistics.wilson(round(sum(one.scores.values())), len(one.scores))
        assert found.value is not None
        return _Ours(Estimate(found.value, found.ci_low, found.ci_high), found.n)
    if quantity == "tokens_per_forward":
        return _tokens_per_forward(one, protocol)
    if quantity == "tokens_per_s":
        rate = record["tokens_per_s"]
        return _plainly(rate["value"], record["blocks"], rate["ci_low"], rate["ci_high"])
    if quantity == "wall_s":
        return _plainly(record["wall_s"], record["blocks"])
    if quantity == "draft_forwards":
        return _plainly(record["draft_forwards"], record["items"])
    assert over is not None, f"{quantity} is over another arm"
    base, base_record = over
    if quantity == "draft_forwards_change":
        drafts, before = record["draft_forwards"], base_record["draft_forwards"]
        return _plainly(drafts / before - 1 if drafts is not None and before else None, record["items"])
    if quantity == "accuracy_change":
        common = one.scores.keys() & base.scores.keys()
        gained = sum(one.scores[i] > base.scores[i] for i in common)
        lost = sum(one.scores[i] < base.scores[i] for i in common)
        change = statistics.paired_difference(gained, lost, len(common))
        if change.difference is None:
            return "nothing was scored"
        discordant = (gained + lost + 2) / (len(common) + 2)
        return _Ours(Estimate(change.difference, change.ci_low, change.ci_high), len(common), discordant)
    assert quantity == "speedup", quantity
    ratio = statistics.ratio_of_totals([base.by_block("wall_s")], [one.by_block("wall_s")])
    return _plainly(ratio.value, ratio.units, ratio.ci_low, ratio.ci_high)


def _plainly(value: float | None, n: int, low: float | None = None, high: float | None = None) -> "_Ours | str":
    return "nothing was measured" if value is None else _Ours(Estimate(float(value), low, high), n)


def _tokens_per_forward(one: CellData, protocol: str) -> "_Ours | str":
    """By the paper's accounting where the run follows its protocol, else ours."""
    if one.counted("forwards") is None:
        return "its engine hides its forwards"
    counted = protocol == PAPER and _told(one)
    lines = one.lines.values()
    tokens = [len(g.token_ids) + (g.surplus or 0 if counted else 0) for g in lines]
    ratio = statistics.ratio_of_totals([tokens], [[g.forwards or 0 for g in lines]], unit="item")
    return _plainly(ratio.value, ratio.units, ratio.ci_low, ratio.ci_high)


def _odd(part: _Opened, row: PublishedRow, quantity: str, benchmark: str, pair: Pair) -> list[str]:
    """Why ours is not of the same thing as the paper's; none if it is."""
    table, (one, record) = part.table, pair[0]
    if small := _miniature(part, row, benchmark, one, record):
        return [f"a miniature: {', '.join(small)}"]
    void = [reason for _, of_cell in filter(None, pair) for reason in of_cell["void"]]
    said = [row.not_comparable.get(quantity) or table.not_comparable.get(quantity)]
    said += [f"void: {reason}" for reason in void]
    if quantity == "speedup":
        device = part.session.get("device")
        said += [f"measured on {device or 'no known device'}, theirs on a GPU"] * (device != "cuda")
        said += [f"engine {one.cell.engine}, theirs is eager"] * (one.cell.engine not in (None, EAGER))
        said += [f"{record['dtype']}, theirs is bfloat16"] * (record["dtype"] != "bfloat16")
        said += ["--protocol own stops at stop strings, theirs does not"] * (part.asked.protocol != PAPER)
        said += ["it is its own baseline"] * (row.arm == row.against[quantity])
    if quantity in ("wall_s", "draft_forwards"):
        theirs = table.benchmarks[benchmark]["items"]
        said += [f"of {record['items']} items, theirs of {theirs}"] * (record["items"] != theirs)
    if quantity == "tokens_per_forward":
        said += ["--protocol own stops at stop strings, theirs does not"] * (part.asked.protocol != PAPER)
        said += ["tokens accepted behind the end are not stored, theirs count them"] * (not _told(one))
    return [why for why in said if why]


def _miniature(part: _Opened, row: PublishedRow, benchmark: str, one: CellData, record: Record) -> list[str]:
    """In what ours is smaller than, or different from, what the paper ran."""
    own, suite = part.table.benchmarks[benchmark], part.suites[benchmark]
    tokens, items = part.table.setup["max_new_tokens"], record["items"]
    said = [f"family {part.part.family}"] * (part.part.family != row.family)
    said += [f"suite {suite}"] * (suite != own["suite"])
    said += [f"{record['max_new_tokens']} new tokens, theirs {tokens}"] * (record["max_new_tokens"] != tokens)
    said += ["simulated"] * (one.cell.simulated is not None)
    if suite == own["suite"] and row.batch_size is None:
        theirs = f"{items:,} items, theirs {own['items']:,}"
        said += [f"{theirs}, so another mix of subtasks"] * bool(SUITES[suite].subtasks and items < own["items"])
        said += [theirs] * (items > own["items"])
        left_out = record["task"].get("left_out", {}).get("items", 0)
        said += [f"{left_out} items left out, which cannot be scored here"] * bool(left_out)
    return said


def _judge(
    quantity: str, printed: str, ours: Sequence[_Ours], items: Sequence[int], row: PublishedRow, table: Published
) -> Finding:
    """Of figures that are of the same thing. items: theirs, by benchmark."""
    estimate, n = agreement.mean([o.estimate for o in ours]), sum(o.n for o in ours)
    value, rounding = agreement.number(printed), agreement.half_unit(printed)
    if quantity in SHARES:
        spread = agreement.mean(_parts_of_theirs(quantity, printed, ours, items, row, table))
        low, high = spread.span
        theirs = Estimate(value / 100, value / 100 - (spread.value - low), value / 100 + (high - spread.value))
        units = 2 if quantity == "accuracy_change" else 1
        return agreement.judge_points(estimate, theirs, units * rounding / 100, n=n)
    unit = "block" if quantity == "speedup" else "item"
    return agreement.judge_rate(estimate, value, rounding, n=n, unit=unit)


def _parts_of_theirs(
    quantity: str, printed: str, ours: Sequence[_Ours], items: Sequence[int], row: PublishedRow, table: Published
) -> list[Estimate]:
    """Their figure on each benchmark, with its interval. Where a mean's parts are not printed, ours stand for them."""
    by_benchmark = row.figures[quantity]
    texts = [printed] if len(ours) == 1 else [by_benchmark.get(name) for name in table.benchmarks]
    parts = []
    for text, own, n in zip(texts, ours, items, strict=True):
        value = own.estimate.value if text is None else agreement.number(text) / 100
        change = quantity == "accuracy_change"
        parts.append(agreement.change(value, own.discordant, n) if change else agreement.share(value, n))
    return parts


def _bounds(estimate: Estimate, quantity: str, *, difference: bool = False) -> Record:
    """As reproduction.json holds it, in the unit that is printed."""
    scale = 100 if UNITS[quantity] in ("%", "points") else 1  # stored as shares
    low, high = estimate.low, estimate.high
    return {
        "value": estimate.value * scale,
        "ci_low": None if low is None else low * scale,
        "ci_high": None if high is None else high * scale,
        **({"kind": "points" if quantity in SHARES else "ratio"} if difference else {}),
    }

"""results.json: the totals, intervals and verdicts of a run, cell by cell.

Accuracy and speed come from the same generations. Which lines count is decided in mtbench/results/samples.py.
Acceptance is in acceptance.py, degenerate answers in degenerate.py, single tasks in subtasks.py, comparisons of arms in
comparisons.py, the roofline in roofline.py, and every other definition in mtbench/statistics.py. A value that an engine
hides is null.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from mtbench import statistics
from mtbench.decoding.arms import is_ours
from mtbench.measure import energy, grades
from mtbench.plan.formats import (
    EnergyRecord,
    GenerationLine,
    MemoryRecord,
    PreparationLine,
    RescoringRecord,
    SessionRecord,
)
from mtbench.plan.plan import Group
from mtbench.plan.request import SamplingOptions
from mtbench.plan.run import Run
from mtbench.records import dump
from mtbench.results import acceptance, collapse, degenerate, speed_factors, subtasks
from mtbench.results.acceptance_curves import write_curves
from mtbench.results.comparisons import Comparisons, compare, floor, same_items, stops_paying
from mtbench.results.figure_formats import Finish, Percentiles, Publication, RequestLatency, Samples, SpeedParts
from mtbench.results.flags import (
    cache_flags,
    disturbances,
    measurement_flags,
    prefix_cache,
    reading_flags,
    result_flags,
    scoring_flags,
    void_reasons_of,
)
from mtbench.results.format import SCHEMA_VERSION, ResultCell, ResultEnvironment, Results, StatisticsInfo, Status
from mtbench.results.lossless_format import JUDGE, Lossless
from mtbench.results.publication import Ran, published
from mtbench.results.publication import compare as compare_published
from mtbench.results.roofline import Fraction, fraction
from mtbench.results.samples import CellData, read
from mtbench.results.subtasks import accuracy_of, by_part, summarize, tokens_per_forward_spread, with_spreads

STATISTICS = (
    "ratios of totals over blocks, a block's time being its median over rounds, t interval on the log scale; Wilson; "
    "score interval of paired differences (Tango); "
    "Holm over the arms of one suite or task, batch size and baseline decides the words, intervals are pointwise"
)
OVER_ROUNDS = "; arms that decode apart: ratios of totals over rounds, whose intervals hold for these prompts only"
SHARED = (
    "; the levels of the words are shared by the looks at which cells may leave, and the end (union bound); "
    "a word on speed needs the log-normal interval, too"
)
COPIED = (  # fields that a cell of results.json has from the plan
    *("cell", "suite", "arm", "method", "options", "engine", "family", "on", "checkpoints", "simulated"),
    *("demonstration", "batch_size", "length", "batching", "claims"),
)
ENERGY = {"energy_j", "j_per_token", "energy_reason"}  # fields of results.json from energy.json


@dataclass
class Stored(Run):
    """An open run with its other stored data."""

    cells: dict[str, CellData]
    preparation: list[PreparationLine]
    memory: Mapping[str, int | None]  # peak memory by cell
    energy: EnergyRecord
    price_per_hour: float | None  # of the machine that one worker decodes on

    def looks(self, group: Group) -> int:
        """Return how often the verdicts of a group may be looked at, the end included."""
        return 1 if self.race is None else 1 + len(self.race.looks[group.name])

    @property
    def last_session(self) -> SessionRecord:
        return self.sessions[-1] if self.sessions else SessionRecord()

    @cached_property
    def plan_sha256(self) -> str:
        return self.directory.sha256("plan.json")

    @property
    def run_id(self) -> str:
        """12 digits that name the run: another run of the same plan started at another time."""
        digest = f"{self.plan_sha256} {self.environment.started}"
        return hashlib.sha256(digest.encode()).hexdigest()[:12]

    def task(self, suite: str) -> dict[str, Any]:
        """Return the description of a suite's task: as it was scored, else as it was planned."""
        return dict((self.environment.scored_as or {}).get(suite, self.plan.suite(suite).task))


def read_stored(run: Run) -> Stored:
    """Return the stored data of a run. Raise UserError for a faulty file."""
    files = run.directory
    return Stored(
        **vars(run),
        cells=read(run),
        preparation=files.read_lines("preparation.jsonl", PreparationLine),
        memory=files.read("memory.json", MemoryRecord).root if files.has("memory.json") else {},
        energy=files.read("energy.json", EnergyRecord) if files.has("energy.json") else EnergyRecord(),
        price_per_hour=run.plan.request.price_per_hour,
    )


def statuses(stored: Stored) -> dict[str, Status]:
    """Return by cell whether every block of every round was run."""
    return {name: _status(stored, stored.cells[name], group) for group in stored.plan.groups for name in group.cells}


def void_reasons(stored: Stored) -> dict[str, list[str]]:
    """Return by cell why it cannot be trusted; an empty list for a sound one."""
    return {name: void_reasons_of(data, _lossless(stored, data)) for name, data in stored.cells.items()}


def assemble(run: Run, *, price_per_hour: float | None = None) -> Results:
    """Write results.json from the stored lines and return it. Failed cells are in it, too.

    price_per_hour: in place of the plan's.
    """
    stored = read_stored(run)
    if price_per_hour is not None:
        stored.price_per_hour = price_per_hour
    plan, environment = stored.plan, stored.environment
    cells = [cell for group in plan.groups for cell in _group_cells(stored, group)]
    given = {name: getattr(environment, name) for name in environment.model_fields_set - {"scored_as"}}
    results = Results(
        schema_version=SCHEMA_VERSION,
        run_id=stored.run_id,
        command=environment.command,
        environment=ResultEnvironment(**given, idle_power_w=stored.energy.idle_power_w),
        seed=plan.request.seed,
        temperature=plan.request.temperature,
        plan_sha256=stored.plan_sha256,
        statistics=StatisticsInfo(
            method=f"{STATISTICS}{OVER_ROUNDS if stored.plan.request.apart else ''}{SHARED if stored.race else ''}",
            level=0.95,
            speed_margin=statistics.SPEED_MARGIN,
            max_loss=plan.request.max_loss,
        ),
        price_per_hour=stored.price_per_hour,
        cells=cells,
        stops_paying=stops_paying(cells),
        **_more(stored, cells),
    )
    stored.directory.write_json("results.json", dump(results))
    write_curves(stored, cells)
    return results


def _more(stored: Stored, cells: Sequence[ResultCell]) -> dict[str, Any]:
    """Return the fields that not all results have: a sampling, the published figures beside ours."""
    name, request, more = stored.plan.publication, stored.plan.request, dict[str, Any]()
    if request.words:
        more["sampling"] = SamplingOptions(**request.of_sampling)
    if name is not None:
        ran = [Ran(stored.cells[cell.cell], cell) for cell in cells]
        more["publication"] = Publication(name=name, figures=compare_published(published(name), stored.plan, ran))
    return more


def _group_cells(stored: Stored, group: Group) -> list[ResultCell]:
    of_arm = {stored.cells[name].cell.arm: stored.cells[name] for name in group.cells}
    suite, max_loss = stored.plan.suite(group.suite), stored.plan.request.max_loss
    synchronisation_s = stored.last_session.synchronisation_s or 0.0
    lossless = {arm: _lossless(stored, data) for arm, data in of_arm.items()}
    not_trusted = {arm for arm, data in of_arm.items() if void_reasons_of(data, lossless[arm])}
    looks = stored.looks(group)
    judged = partial(compare, synchronisation_s=synchronisation_s, max_loss=max_loss, void=not_trusted, looks=looks)
    comparisons, parts = judged(of_arm), by_part(of_arm, suite.items, group.blocks, suite.metric, judged)
    return [_cell(stored, group, data, comparisons[arm], parts[arm], lossless[arm]) for arm, data in of_arm.items()]


def _cell(
    stored: Stored,
    group: Group,
    data: CellData,
    compared: Comparisons,
    parts: dict[str, Any],
    lossless: Lossless | None,
) -> ResultCell:
    cell, suite, session = data.cell, stored.plan.suite(data.cell.suite), stored.last_session
    summary, of_arm = summarize(data, suite.metric), _of_arm(stored, cell.suite, cell.arm)
    finish, cost = _finish(data), _cost(stored.price_per_hour, summary.tokens_per_s.value)
    prepared = [line for line in stored.preparation if line.cell == cell.cell]
    cached, divided = prefix_cache(data.cache) if cell.prefix_cache else None, acceptance.divided(data, suite.thinking)
    beside = {stored.cells[name].cell.arm: stored.cells[name] for name in group.cells}
    collapsed, read = collapse.find(data, beside.values()), subtasks.readings(suite.metric, data)
    roofline, loops = _roofline(data, stored.sessions), degenerate.of_cell(data)
    return ResultCell(
        **{name: getattr(cell, name) for name in COPIED},
        status=_status(stored, data, group),
        **_given(data, compared, collapse=collapsed, prefix_cache=cached, acceptance_by=divided, **read, **cost),
        task=stored.task(cell.suite),
        dtype=session.dtype,
        device=session.device,
        max_new_tokens=suite.max_new_tokens,
        blocks=len({t.block for t in data.samples}),
        rounds=len(group.rounds),
        samples=Samples(used=len(data.samples), dropped=data.not_clean),
        **dict(summary),
        tokens_per_forward_spread=tokens_per_forward_spread(parts["tasks"]),
        accuracy_same_items=None if summary.accuracy is None else same_items(data, of_arm),
        finish=finish,
        **_counts(data),
        degenerate=loops,
        **_times(data, prepared),
        repeated_identical=_over(*data.repeated),
        reference=cell.is_reference,
        lossless=lossless,
        void=void_reasons_of(data, lossless),
        flags=[
            *cell.flags,
            *disturbances(data, compared.far_off),
            *measurement_flags(data, stored.sessions),
            *cache_flags(data, of_arm, [call for line in prepared for call in line.unseen]),
            *scoring_flags(data, suite),
            *result_flags(cell, summary, finish, compared),
            *reading_flags(data, beside, **read),
            *degenerate.flags(loops, summary.tokens_per_forward),
            *[text for text in (collapsed, None if cached is None else cached.text) if text],
        ],
        error=data.error,
        peak_memory_bytes=stored.memory.get(cell.cell),
        **energy.of(stored.energy, cell.cell, data.error).model_dump(include=ENERGY),
        roofline_fraction=roofline.value,
        roofline_reason=roofline.reason,
        speedup=with_spreads(compared.speedup, parts["tasks"]),
        accuracy_vs=compared.accuracy_vs,
        agreement=compared.agreement,
        **parts,
    )


def _finish(data: CellData) -> Finish:
    ends = Counter(line.finish_reason for line in data.lines.values())
    return Finish(end=ends["end"], stop=ends["stop"], length=ends["length"])


def _status(stored: Stored, data: CellData, group: Group) -> Status:
    """Return `ok` if every block of every round was run; in a race, if some arm of the group has each."""
    if data.error:
        return "failed"
    if data.left is not None:
        return "left"
    raced = stored.race is not None and data.timings
    beside = [stored.cells[name] for name in group.cells] if raced else [data]
    ran = {(t.round, t.block) for one in beside for t in one.timings}
    return "ok" if len(ran) == sum(group.rounds) else "partial"


def _given(data: CellData, compared: Comparisons, **found: Any) -> dict[str, Any]:
    """Return the fields that only some cells have; others lack the keys."""
    fields = {name: getattr(data.cell, name) for name in ("engine_options", "other_tokens")}
    fields |= {"valid": accuracy_of("valid", data.validity), "valid_vs": compared.valid_vs}
    fields["by_value_vs"] = compared.by_value_vs
    return {name: value for name, value in {**fields, "left": data.left, **found}.items() if value}


def _cost(price_per_hour: float | None, tokens_per_s: float | None) -> dict[str, float]:
    """Return the price of a million tokens; nothing without a price or a rate."""
    if not price_per_hour or not tokens_per_s:
        return {}
    return {"cost_per_million": price_per_hour / 3600 / tokens_per_s * 1_000_000}


def _counts(data: CellData) -> dict[str, Any]:
    fed, draft_forwards = data.counted("positions_fed"), data.counted("draft_forwards")
    return {
        "kv_bytes": max((t.kv_bytes for t in data.timings if t.kv_bytes is not None), default=None),
        "commit_histogram": acceptance.histogram([line.commits or () for line in data.lines.values()]),
        "tokens": data.tokens,
        "positions_fed": fed,
        "positions_fed_per_token": _over(fed, data.tokens),
        "positions_fed_per_forward": _over(fed, data.counted("forwards")),
        "draft_forwards": draft_forwards,
        "draft_forwards_per_token": _over(draft_forwards, data.tokens),
    }


def _times(data: CellData, prepared: Sequence[PreparationLine]) -> dict[str, Any]:
    """Return the measured times of a cell. Seconds, summed over blocks."""
    times = {name: data.total(name) for name in ("wall_s", "prefill_s", "decode_s", "device_s", "draft_s", "head_s")}
    parts, steps_s = speed_factors.parts(data.totals) if data.totals else None, dict[int, Sequence[float] | None]()
    if data.cell.batching == "static":  # of refilled slots the step at which a row started is not stored
        steps_s = {t.block: t.step_s for t in data.samples if t.round == 1}
    return times | {
        "ttft_s": percentiles([t.ttft_s for t in data.samples if t.ttft_s is not None]),
        "commit_latency_s": percentiles(commit_gaps(data.lines.values(), steps_s)),
        "request_latency_s": _request_latency(data),
        "preparation_s": sum(line.preparation_s for line in prepared) if prepared else None,
        "parts": None if parts is None else SpeedParts(**parts._asdict()),
    }


def commit_gaps(lines: Iterable[GenerationLine], steps_s: Mapping[int, Sequence[float] | None]) -> list[float]:
    """Return the seconds between two commits of the same row, in round 1. Empty if the engine hides its steps.

    steps_s: the seconds of each step, by block.
    """
    gaps = []
    for line in lines:
        waited_s = None  # None until the first commit: its wait is the time to the first token
        for count, step_s in zip(line.commits or [], steps_s.get(line.block) or [], strict=False):
            if waited_s is not None:
                waited_s += step_s
            if count:
                if waited_s is not None:
                    gaps.append(waited_s)
                waited_s = 0.0
    return gaps


def _request_latency(data: CellData) -> RequestLatency | None:
    """Return the times from the start of a batch to the forward that ended each answer, in round 1.

    A batch of one request takes its wall time. None for refilled slots, and if an engine hides the steps of a batch.
    """
    if data.cell.batching != "static":
        return None
    first = {t.block: t for t in data.samples if t.round == 1}
    times = []
    for line in data.lines.values():
        timing = first.get(line.block)
        if timing is None:
            continue
        if timing.items == 1:
            times.append(timing.wall_s)
        elif timing.prefill_s is None or timing.step_s is None or line.forwards is None:
            return None
        else:
            times.append(timing.prefill_s + sum(timing.step_s[: line.forwards]))
    if not times:
        return None
    p50, p95, p99 = map(float, np.percentile(times, [50, 95, 99]))
    return RequestLatency(p50=max(0.0, p50), p95=max(0.0, p95), p99=max(0.0, p99), requests=len(times))


def percentiles(values: Sequence[float]) -> Percentiles:
    """Return p50 and p95; null without values."""
    if not values:
        return Percentiles(p50=None, p95=None)
    p50, p95 = np.percentile(values, [50, 95])
    return Percentiles(p50=float(p50), p95=float(p95))


def _over(total: float | None, count: float | None) -> float | None:
    return total / count if total is not None and count else None


def _roofline(data: CellData, sessions: Sequence[SessionRecord]) -> Fraction:
    cell, judged = data.cell, 1
    if is_ours(cell.engine) and not cell.fault:
        variants = cell.built.variants
        if len(variants) > 1:
            return Fraction(None, "its width differs from forward to forward")
        judged = variants[0].window().guesses + 1
    return fraction(cell, judged, data.lines.values(), data.samples, sessions)


def _lossless(stored: Stored, data: CellData) -> Lossless | None:
    """Return the grade of an arm that promises another arm's tokens, with the floor of that arm.

    An arm of a serving engine without such an arm is graded if a judge read it. None for an arm that promises nothing
    or a distribution, and if the other arm did not run.
    """
    cell, against = data.cell, None
    if cell.claims == "distribution":
        return None
    name = f"lossless/{cell.cell}.json"
    rescored = stored.directory.read(name, RescoringRecord) if stored.directory.has(name) else None
    reference = _of_arm(stored, cell.suite, cell.lossless_reference)
    if cell.lossless_reference is not None:
        same = [d for d in reference if (d.cell.batch_size, d.cell.batching) == (cell.batch_size, cell.batching)]
        if not same:
            return None
        against = same[-1].lines
        if same[-1].cell.engine != cell.engine:
            forced = stored.plan.suite(cell.suite).constrained(cell.engine)
            against = {item: line for item, line in against.items() if item not in forced}
    graded = grades.grade(data.lines, against, rescored, stored.last_session.dtype or "float32")
    return (
        None
        if graded is None
        else Lossless(
            against=cell.lossless_reference or JUDGE,
            **graded._asdict(),
            floor=floor(reference),
            why=None if rescored is None else rescored.why,
        )
    )


def _of_arm(stored: Stored, suite: str, arm: str | None) -> list[CellData]:
    return [data for data in stored.cells.values() if (data.cell.suite, data.cell.arm) == (suite, arm)]

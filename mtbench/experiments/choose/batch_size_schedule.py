"""The schedule of a serving engine by batch size, measured as an arm.

Where the batch sizes of a race have different answers, an engine may hold them in one server. It may be slow at the
sizes where the answer changes (github.com/vllm-project/vllm/issues/49548). So it decodes there, and with one request
fewer, beside the chosen arm, in servers for the largest batch size. The run is in the folder `schedule` of the race.
"""

import itertools
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from mtbench.clients.serving_engine import Setting
from mtbench.decoding.arms import is_served
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.lineup.planner import write_plan
from mtbench.measure.block_writer import Progress
from mtbench.measure.executor import generate
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Elimination
from mtbench.plan.plan import Cell, Plan
from mtbench.plan.request import Execution
from mtbench.plan.run import Run
from mtbench.results import samples, verdicts
from mtbench.results.aggregate import Stored, read_stored, statuses
from mtbench.results.decision_format import Recommendation, Schedule, ScheduledSize
from mtbench.results.figure_formats import Estimate
from mtbench.statistics import shared_ratio, units_of

FOLDER = "schedule"
UNITS = 8  # of times, at a batch size
NOT_RUN = "it is not measured yet: `--resume` measures it"


def measure(
    race: Run, recommendations: Sequence[Recommendation], execution: Execution, progress: Progress, deadline: float
) -> None:
    """Measure the schedule of a race, if it has one, as far as the deadline (by time.monotonic) allows."""
    plan = schedule_plan(race, recommendations)
    if plan is None or time.monotonic() >= deadline:
        return
    run = _stored_run(race, plan)
    if run is None:
        shutil.rmtree(path := race.directory.path / FOLDER, ignore_errors=True)  # of an earlier decision
        write_plan(directory := RunDirectory.create(path), plan, race.environment.command)
        run = Run.open(directory)

    def leave(cells: Sequence[str]) -> list[Elimination]:
        walls = [[timing.wall_s for timing in run.timings[name]] for name in cells]
        units = units_of(map(min, zip(*walls, strict=False)), samples.SERVED_UNIT_S)
        there = {*cells} - {line.cell for line in run.left} if len({*units}) >= UNITS else ()
        return [Elimination(cell=name, block=len(units), lost=False, reason="it is measured") for name in there]

    progress.note("measuring the schedule by batch size")
    generate(run, progress, replace(execution, leave=leave, timed_only=True))


def measured(race: Run, recommendations: Sequence[Recommendation]) -> Schedule | None:
    """Return the schedule of a race by its stored lines; None if it has none."""
    plan = schedule_plan(race, recommendations)
    if plan is None:
        return None
    if (run := _stored_run(race, plan)) is None:
        return Schedule(command=None, sizes=[], reason=NOT_RUN)
    stored = read_stored(run)
    sizes = _sizes(stored)
    doubts = [failure.error for failure in run.failures] + [NOT_RUN] * ("partial" in statuses(stored).values())
    doubts += [size.verdict.reason.text for size in sizes if size.verdict.reason]
    commands = {line.cell: line.server for line in stored.preparation}
    return Schedule(command=commands.get(plan.cells[0].cell), sizes=sizes, reason=next(iter(doubts), None))


def _stored_run(race: Run, plan: Plan) -> Run | None:
    path = race.directory.path / FOLDER
    run = Run.open(RunDirectory(path)) if (path / "plan.json").is_file() else None
    return run if run and (run.plan.cells, run.plan.groups) == (plan.cells, plan.groups) else None


def _sizes(run: Stored) -> list[ScheduledSize]:
    pairs = [[run.cells[name] for name in group.cells] for group in run.plan.groups]
    walls = [[data.per_unit("wall_s") if data.samples else () for data in reversed(pair)] for pair in pairs]
    ratios = [shared_ratio(*of_pair, looks=1, among=len(walls)) for of_pair in walls]
    judged = zip(pairs, ratios, verdicts.speed_verdicts(ratios, [None] * len(ratios)), strict=True)
    return [
        ScheduledSize(
            batch_size=own.cell.batch_size,
            arm=own.cell.arm,
            ratio=Estimate(value=ratio.value, ci_low=ratio.ci_low, ci_high=ratio.ci_high),
            verdict=verdict,
        )
        for (_, own), ratio, verdict in judged
    ]


def schedule_plan(race: Run, recommendations: Sequence[Recommendation]) -> Plan | None:
    """Return the plan that measures the schedule; None without one."""
    chosen, first = _chosen(race.plan, recommendations), race.plan.groups[0]
    changes = [high for low, high in itertools.pairwise(sorted(chosen)) if chosen[low].arm != chosen[high].arm]
    if not changes:
        return None
    alone = {size: cell.changed(baselines=[], engine_baselines=[]) for size, cell in sorted(chosen.items())}
    follows = [item.follows for item in race.plan.suite(first.suite).items]
    items = [item for block in first.blocks for item in block if follows[item] is None]
    cells, groups = list[Cell](), []
    for size in sorted({beside for change in changes for beside in (change - 1, change)}, reverse=True):
        own = alone[max(smaller for smaller in alone if smaller <= size)]
        last = own.changed(batch_size=max(alone))
        name = f"by batch size@{own.on}/{own.engine}"
        pair = [
            own.changed(cell=f"schedule.b{size}", arm=name, batch_size=size, schedule=[*alone.values()]),
            own.changed(cell=f"own.b{size}", batch_size=size, schedule=[last]),
        ]
        blocks = [items[at * size :][:size] for at in range(max(1, len(items) // size))]
        names = [cell.cell for cell in pair]
        groups.append(first.changed(batch_size=size, blocks=blocks, rounds=[len(blocks)], cells=names))
        cells += pair
    return race.plan.changed(cells=cells, groups=groups)


def _server(cell: Cell) -> tuple[object, ...]:
    return cell.engine, cell.on, cell.checkpoints[cell.on], cell.engine_options


def _chosen(plan: Plan, recommendations: Sequence[Recommendation]) -> dict[int, Cell]:
    """Return by batch size the cell of the arm to use; nothing if one has no answer, or no server can have them all."""
    cells = {(cell.batch_size, cell.arm): cell for cell in plan.cells}
    arms = {
        rec.batch_size: rec.same_tokens.arm if rec.same_tokens else rec.word == "plain" and rec.baseline
        for rec in recommendations
    }
    if not arms or not all(arms.values()) or not all(is_served(rec.engine) for rec in recommendations):
        return {}
    chosen = {size: cells[size, str(arm)] for size, arm in arms.items()}
    first, *others = chosen.values()
    if any(_server(cell) != _server(first) for cell in others):
        return {}
    engine = SERVING_ENGINES[str(first.engine)]()
    settings = {size: engine.setting(cell.built, cell.checkpoints) for size, cell in chosen.items()}
    own = {size: setting for size, setting in settings.items() if isinstance(setting, Setting)}
    return chosen if own == settings and engine.scheduled(own) is not None else {}

"""Compare the cells of two runs: their tokens and accuracy item by item, and their tokens per forward over blocks.

The first run is the **base**; every other run is a **head**. A difference is head less base, a ratio head over base.
Cells match by their id, items by their name. Only items that both runs answered count, and only if their prompts are
the same. Nothing here compares times: two runs are two sessions, which differ by more than the blocks inside a session
show. `mtbench gate` compares times, in pairs of processes.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from mtbench import statistics
from mtbench.records import CellName, Count, NonNegative, Record, Sha256, Share, Size, VersionOne
from mtbench.results import acceptance
from mtbench.results.aggregate import Stored, void_reasons
from mtbench.results.samples import CellData
from mtbench.runs.formats import GenerationLine, Machine, SessionRecord
from mtbench.runs.plan import CELL_ID, Batching, Cell

SCHEMA_VERSION: Literal[1] = 1

Counts = Mapping[str, int]  # by item

SELECTION = {"subtasks", "mean", "left_out"}  # keys of a task that say which items it has, and not what they are

MACHINE: Mapping[str, Callable[[Machine], object]] = {
    "processor": lambda machine: machine.processor,
    "cores": lambda machine: machine.cores,
    "GPU": lambda machine: machine.gpu and machine.gpu.name,
    "GPU driver": lambda machine: machine.gpu and machine.gpu.driver,
    "GPU power cap, W": lambda machine: machine.gpu and machine.gpu.power_cap_w,
    "platform": lambda machine: machine.platform,
    "torch": lambda machine: (machine.packages or {}).get("torch"),
    "transformers": lambda machine: (machine.packages or {}).get("transformers"),
    "mtbench": lambda machine: machine.mtbench and f"{machine.mtbench} ({machine.git or 'no checkout'})",
}
SESSION: Mapping[str, Callable[[SessionRecord], object]] = {
    "device": lambda session: session.device,
    "dtype": lambda session: session.dtype,
    "threads": lambda session: session.threads,
    "workers": lambda session: session.workers,
}


class ComparedRun(Record):
    """One of the runs."""

    directory: str = Field(description="run directory, as it was given")
    run_id: str = Field(description="12 digits that name the run")
    started: str | None = Field(description="UTC time, YYYY-MM-DDTHH:MM:SSZ; null: not stored")
    plan_sha256: Sha256 = Field(description="SHA-256 of plan.json")


class Differs(Record):
    """A condition that differs between two runs."""

    name: str = Field(description="the condition, such as torch or max new tokens")
    base: str | None = Field(description="its value in the base run; null: not stored")
    head: str | None = Field(description="its value in the head run; null: not stored")


class PairedAccuracy(Record):
    """The accuracy of both runs on the same items, and the paired difference with its 95 % interval."""

    metric: str = Field(description="metric of the score")
    base: Share = Field(description="mean score in the base run")
    head: Share = Field(description="mean score in the head run")
    difference: float = Field(description="accuracy of head less that of base, as a share")
    ci_low: float | None = Field(description="lower bound of its 95 % interval")
    ci_high: float | None = Field(description="upper bound of its 95 % interval")
    gained: Count = Field(description="items that only head answers correctly")
    lost: Count = Field(description="items that only base answers correctly")
    n: Size = Field(description="items that are scored in both runs")


class PairedRatio(Record):
    """A figure of both runs on the same items, and its ratio with a 95 % interval over the base run's units."""

    base: NonNegative | None = Field(description="value in the base run; null: an engine hides it")
    head: NonNegative | None = Field(description="value in the head run; null: an engine hides it")
    ratio: NonNegative | None = Field(description="head over base; null: one of them is not known")
    ci_low: NonNegative | None = Field(description="lower bound; null: too few units")
    ci_high: NonNegative | None = Field(description="upper bound; null: too few units")
    units: Count = Field(description="blocks of the base run; the blocks of one conversation are one unit")


class BothRuns(Record):
    """A figure of both runs that is not compared by a test."""

    base: NonNegative | None = Field(description="value in the base run; null: not measured, or hidden")
    head: NonNegative | None = Field(description="value in the head run; null: not measured, or hidden")


class CellFigures(Record):
    """What a cell did in both runs. All but the times are over the items that both answered."""

    items: Size = Field(description="items that both runs answered")
    differing: Count = Field(description="items with other tokens")
    accuracy: PairedAccuracy | None = Field(description="accuracy; null: not compared")
    accuracy_reason: str | None = Field(description="why accuracy is null")
    tokens_per_forward: PairedRatio = Field(description="tokens per forward")
    acceptance_length: BothRuns = Field(description="tokens per forward, of the forwards that committed any")
    answer_length: PairedRatio = Field(description="tokens per answer")
    tokens_per_s: BothRuns = Field(
        description="tokens per second of wall time over each run's own items. The runs are other sessions, so no "
        "ratio and no verdict follows"
    )


class CellAcrossRuns(Record):
    """A cell that both runs planned."""

    cell: CellName = Field(description=CELL_ID)
    suite: str = Field(description="suite as it was asked for, name or name:rest")
    arm: str = Field(description="arm: method:options@role/engine")
    batch_size: Size = Field(description="requests decoded side by side")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    demonstration: bool = Field(description="true: the family shows the mechanics and says nothing of real models")
    simulated: bool = Field(description="true: weights or acceptance are simulated in one of the runs")
    void_base: list[str] = Field(description="reasons not to trust the base run's cell; empty: none")
    void_head: list[str] = Field(description="reasons not to trust the head run's cell; empty: none")
    figures: CellFigures | None = Field(description="what it did in both runs; null: not compared")
    reason: str | None = Field(description="why it is not compared; null: it is")


class RunComparison(Record):
    """One head run against the base run."""

    head: str = Field(description="directory of the head run")
    differs: list[Differs] = Field(description="conditions that differ: machine, versions, options; empty: none")
    only_base: list[CellName] = Field(description="cells that only the base run planned")
    only_head: list[CellName] = Field(description="cells that only the head run planned")
    cells: list[CellAcrossRuns] = Field(description="cells that both planned, in the order of the base run")


class Comparison(Record):
    """Two or more runs side by side: the first one is the base, and every other run is compared with it."""

    schema_version: VersionOne = Field(description="version of this format")
    runs: Annotated[list[ComparedRun], Field(min_length=2)] = Field(description="the runs; the first one is the base")
    comparisons: Annotated[list[RunComparison], Field(min_length=1)] = Field(
        description="one entry for each run after the first"
    )


def compare_runs(base: Stored, head: Stored) -> RunComparison:
    """Return every cell that both runs planned, with head compared with base; cells of one run only are named."""
    void_base, void_head = void_reasons(base), void_reasons(head)
    matched = [cell for cell in base.plan.cells if cell.cell in head.cells]
    return RunComparison(
        head=str(head.run.path),
        differs=_differs(base, head, [(cell, head.cells[cell.cell].cell) for cell in matched]),
        only_base=[cell.cell for cell in base.plan.cells if cell.cell not in head.cells],
        only_head=[cell.cell for cell in head.plan.cells if cell.cell not in base.cells],
        cells=[_compare_cell(base, head, cell.cell, void_base[cell.cell], void_head[cell.cell]) for cell in matched],
    )


def _compare_cell(base: Stored, head: Stored, name: str, void_base: list[str], void_head: list[str]) -> CellAcrossRuns:
    """Return one cell in both runs, or why it is not compared."""
    before, after = base.cells[name], head.cells[name]
    common = [item for item in before.lines if item in after.lines]
    reason = _not_comparable(base, head, name, common)
    return CellAcrossRuns(
        cell=name,
        suite=before.cell.suite,
        arm=before.cell.arm,
        batch_size=before.cell.batch_size,
        batching=before.cell.batching,
        demonstration=before.cell.demonstration or after.cell.demonstration,
        simulated=before.cell.simulated is not None or after.cell.simulated is not None,
        void_base=void_base,
        void_head=void_head,
        figures=None if reason else _figures(base, head, name, common),
        reason=reason,
    )


def _not_comparable(base: Stored, head: Stored, name: str, common: Collection[str]) -> str | None:
    """Return why a cell cannot be compared: it failed, or the runs share no item, or ask other prompts; else None."""
    for stored in (base, head):
        error = stored.cells[name].error
        if error:
            return f"failed in {stored.run.path}: {error}"
    before, after = base.cells[name], head.cells[name]
    if not common:
        return f"no item in common: {len(before.lines)} and {len(after.lines)} answers"
    asked, asked_by_head = _prompts(base, before, common), _prompts(head, after, common)
    changed = sum(asked[item] != asked_by_head[item] for item in common)
    return f"other prompts in {changed} of {len(common)} common items" if changed else None


def _prompts(stored: Stored, data: CellData, items: Collection[str]) -> dict[str, object]:
    """Return by item what was asked. Of a private suite only the length of a first turn is stored.

    The prompt of a later turn contains the arm's own answer, so its own tokens count, and the turn that it follows.
    """
    suite, wanted = stored.plan.suite(data.cell.suite), set(items)
    asked: dict[str, object] = {}
    for item in suite.items:
        if item.item in wanted:
            before = None if item.follows is None else suite.items[item.follows].item
            if suite.withheld is None:
                asked[item.item] = (before, item.prompt_ids)
            else:
                asked[item.item] = (before, None if before else data.lines[item.item].prompt_tokens)
    return asked


def _figures(base: Stored, head: Stored, name: str, common: Collection[str]) -> CellFigures:
    """Return what a cell did on the common items, and its speed in each run."""
    before, after = (_on(stored.cells[name], common) for stored in (base, head))
    tokens = [_per_item(data, lambda line: len(line.token_ids)) for data in (before, after)]
    forwards = [_per_item(data, lambda line: line.forwards) for data in (before, after)]
    unit_of = {item: before.unit_of[line.block] for item, line in before.lines.items()}
    reason = _not_scored(base, head, name)
    accuracy = None if reason else _accuracy(base, before, after)
    return CellFigures(
        items=len(common),
        differing=sum(before.lines[item].token_ids != after.lines[item].token_ids for item in common),
        accuracy=accuracy,
        accuracy_reason=reason or (None if accuracy else "no common item is scored in both runs"),
        tokens_per_forward=_ratio(tokens, forwards, unit_of),
        acceptance_length=BothRuns(
            base=_acceptance_length(before, base.cells[name]), head=_acceptance_length(after, head.cells[name])
        ),
        answer_length=_ratio(tokens, [dict.fromkeys(common, 1)] * 2, unit_of),
        tokens_per_s=BothRuns(base=_rate(base.cells[name]), head=_rate(head.cells[name])),
    )


def _on(data: CellData, items: Collection[str]) -> CellData:
    """Return the data of these items only, in the base run's order. Times stay those of the whole cell."""
    return dataclasses.replace(
        data,
        lines={item: data.lines[item] for item in items},
        scores={item: data.scores[item] for item in items if item in data.scores},
    )


def _per_item(data: CellData, count: Callable[[GenerationLine], int | None]) -> dict[str, int] | None:
    """Return a count by item; None if an engine hides it."""
    counts: dict[str, int] = {}
    for item, line in data.lines.items():
        value = count(line)
        if value is None:
            return None
        counts[item] = value
    return counts


def _ratio(above: Sequence[Counts | None], below: Sequence[Counts | None], unit_of: Mapping[str, int]) -> PairedRatio:
    """Return the figure above / below of both runs and the ratio of the two, in units of the base run.

    above, below: counts by item of the base and of the head run; None: hidden.
    """
    values = [
        sum(a.values()) / sum(b.values()) if a and b and sum(b.values()) else None
        for a, b in zip(above, below, strict=True)
    ]
    units = sorted(set(unit_of.values()))
    ratio = statistics.Ratio(None, None, None, None, len(units), "block")
    if None not in values:
        base_above, head_above, base_below, head_below = (_by_unit(c or {}, unit_of) for c in (*above, *below))
        ratio = statistics.ratio_of_totals([head_above, base_below], [head_below, base_above])
    return PairedRatio(
        base=values[0],
        head=values[1],
        ratio=ratio.value,
        ci_low=ratio.ci_low,
        ci_high=ratio.ci_high,
        units=len(units),
    )


def _by_unit(counts: Counts, unit_of: Mapping[str, int]) -> list[int]:
    totals = Counter[int]()
    for item, unit in unit_of.items():
        totals[unit] += counts[item]
    return [totals[unit] for unit in sorted(totals)]


def _acceptance_length(common: CellData, whole: CellData) -> float | None:
    """Return the acceptance length on the common items. An engine's own counters cover all items, so they need all."""
    counted = all(line.commits is not None for line in common.lines.values())
    if not counted and len(common.lines) < len(whole.lines):
        return None
    figures = acceptance.of_cell(common)
    return None if figures is None else figures.length


def _rate(data: CellData) -> float | None:
    """Return tokens per second of wall time, over the samples that count."""
    tokens, wall_s = data.total("tokens"), data.total("wall_s")
    return tokens / wall_s if tokens is not None and wall_s else None


def _not_scored(base: Stored, head: Stored, name: str) -> str | None:
    """Return why the accuracies of a cell cannot be compared, or None."""
    suites = [stored.plan.suite(stored.cells[name].cell.suite) for stored in (base, head)]
    metrics = [suite.metric for suite in suites]
    if metrics == [None, None]:
        return "the suite is not scored"
    if metrics[0] != metrics[1]:
        return f"other metric: {metrics[0]}, {metrics[1]}"
    tasks = [stored.task(stored.cells[name].cell.suite) for stored in (base, head)]
    changed = [key for key in sorted(tasks[0].keys() | tasks[1].keys()) if tasks[0].get(key) != tasks[1].get(key)]
    changed = [key for key in changed if key not in SELECTION]
    if changed:
        values = "; ".join(f"{key} {tasks[0].get(key)}, {tasks[1].get(key)}" for key in changed)
        return f"other version of the task: {values}"
    if base.cells[name].cell.length == "fixed":
        return "answers of fixed length are not scored"
    unscored = next((stored for stored in (base, head) if not stored.cells[name].scores), None)
    return None if unscored is None else f"not scored; run `mtbench score {unscored.run.path}`"


def _accuracy(base: Stored, before: CellData, after: CellData) -> PairedAccuracy | None:
    """Return both accuracies over the items that are scored in both runs; None without such an item."""
    gained, lost, n = statistics.gains_and_losses(after.scores, before.scores)
    if not n:
        return None
    common = before.scores.keys() & after.scores.keys()
    difference = statistics.paired_difference(gained, lost, n)
    return PairedAccuracy(
        metric=str(base.plan.suite(before.cell.suite).metric),
        base=sum(before.scores[item] for item in sorted(common)) / n,
        head=sum(after.scores[item] for item in sorted(common)) / n,
        difference=(gained - lost) / n,
        ci_low=difference.ci_low,
        ci_high=difference.ci_high,
        gained=gained,
        lost=lost,
        n=n,
    )


def _differs(base: Stored, head: Stored, cells: Sequence[tuple[Cell, Cell]]) -> list[Differs]:
    """Return the conditions with other values: machine and versions, options, checkpoints of the cells compared."""
    before, after = _conditions(base, [cell for cell, _ in cells]), _conditions(head, [cell for _, cell in cells])
    return [
        Differs(name=name, base=before.get(name), head=after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _conditions(stored: Stored, cells: Iterable[Cell]) -> dict[str, str | None]:
    """Return by name what the sessions, the plan and the cells say of how a run was made."""
    told = {name: _listed(read(machine) for machine in stored.machines) for name, read in MACHINE.items()}
    told |= {name: _listed(read(session) for session in stored.sessions) for name, read in SESSION.items()}
    request = stored.plan.request
    told |= {"protocol": request.protocol, "temperature": f"{request.temperature:g}", "seed": str(request.seed)}
    told["template options"] = _listed(f"{name}={value}" for name, value in request.chat_template_kwargs.items())
    of_cells: dict[str, list[object]] = {}
    for cell in cells:
        suite = cell.cell.partition(".")[0]  # the suite's name may hold a path, which differs between machines
        of_cells.setdefault(f"max new tokens of {suite}", []).append(stored.plan.suite(cell.suite).max_new_tokens)
        for role, source in cell.checkpoints.items():
            of_cells.setdefault(f"checkpoint {role}", []).append(source)
        options = ", ".join(f"{name}={value}" for name, value in cell.options.items())
        if options:
            of_cells.setdefault(f"options of {cell.arm}", []).append(options)
    return told | {name: _listed(values) for name, values in of_cells.items()}


def _listed(values: Iterable[object]) -> str | None:
    """Return the known values, each once; None if there is none."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None

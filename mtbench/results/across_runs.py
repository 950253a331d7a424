"""Compare the cells of two runs: their tokens and accuracy item by item, and their tokens per forward over blocks.

The first run is the **base**; every other run is a **head**. A difference is head less base, a ratio head over base.
Cells match by their id, items by their name. Only items that both runs answered count, and only if their prompts are
the same; the head run's answers are put into the base run's blocks, and then compared as two arms of one run are
(comparisons.py). Nothing here compares times: two runs are two sessions, which differ by more than the blocks inside a
session show. `mtbench gate` compares times, in pairs of processes.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from mtbench import statistics
from mtbench.plan.formats import SessionRecord
from mtbench.plan.plan import CELL_ID, Batching
from mtbench.records import CellName, NonNegative, Record, Sha256, Size
from mtbench.results.aggregate import Stored, void_reasons
from mtbench.results.comparisons import accuracies, agreement
from mtbench.results.figure_formats import Accuracy, AccuracyComparison, Agreement, Estimate, Reason
from mtbench.results.samples import CellData
from mtbench.results.subtasks import summarize

SELECTION = {"subtasks", "mean", "left_out"}  # keys of a task that say which items it has, not what they are

CONDITIONS: Mapping[str, Callable[[SessionRecord], object]] = {
    "processor": lambda session: session.processor,
    "cores": lambda session: session.cores,
    "CPU quota, cores": lambda session: session.cpu_quota,
    "GPU": lambda session: session.gpu and session.gpu.name,
    "GPU driver": lambda session: session.gpu and session.gpu.driver,
    "GPU power cap, W": lambda session: session.gpu and session.gpu.power_cap_w,
    "platform": lambda session: session.platform,
    "torch": lambda session: (session.packages or {}).get("torch"),
    "transformers": lambda session: (session.packages or {}).get("transformers"),
    "mtbench": lambda session: session.mtbench and f"{session.mtbench} ({session.git or 'no checkout'})",
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


class RunFigures(Record):
    """A cell's results in one run. All but the times are over the items that both runs answered."""

    accuracy: Accuracy | None = Field(description="mean score of the items scored in both runs; null: not compared")
    tokens_per_forward: NonNegative | None = Field(description="tokens per forward; null: an engine hides its forwards")
    acceptance_length: NonNegative | None = Field(
        description="tokens per forward, of the forwards that committed any; null: an engine hides it"
    )
    answer_length: NonNegative = Field(description="tokens per answer")
    tokens_per_s: NonNegative | None = Field(
        description="tokens per second of wall time over the run's own items; null: not measured. The runs are other "
        "sessions, so no ratio and no verdict follows"
    )


class CellFigures(Record):
    """A cell's results in both runs, and the comparison of the head run's answers with the base run's."""

    base: RunFigures = Field(description="the base run")
    head: RunFigures = Field(description="the head run")
    agreement: Agreement = Field(description="items with the same tokens; the baseline is the arm in the base run")
    accuracy: AccuracyComparison | None = Field(description="accuracy of head less that of base; null: not compared")
    accuracy_reason: str | None = Field(description="why accuracy is null")
    tokens_per_forward: Estimate = Field(
        description="tokens per forward, head over base, with its interval over the base run's blocks; the blocks of "
        "one conversation are one unit"
    )


class CellAcrossRuns(Record):
    """A cell that both runs planned."""

    cell: CellName = Field(description=CELL_ID)
    suite: str = Field(description="suite as requested, name or name:rest")
    arm: str = Field(description="arm: method:options@role/engine")
    batch_size: Size = Field(description="requests decoded side by side")
    batching: Batching = Field(description="static: one batch per block; refill: finished rows are refilled")
    demonstration: bool = Field(description="true: the family shows the mechanics and is no evidence on real models")
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

    schema_version: Literal[3] = Field(description="version of this format")
    runs: Annotated[list[ComparedRun], Field(min_length=2)] = Field(description="the runs; the first one is the base")
    comparisons: Annotated[list[RunComparison], Field(min_length=1)] = Field(
        description="one entry for each run after the first"
    )


def compare_runs(base: Stored, head: Stored) -> RunComparison:
    """Return every cell that both runs planned, with head compared with base; cells of one run only are named."""
    void_base, void_head = void_reasons(base), void_reasons(head)
    matched = [cell for cell in base.plan.cells if cell.cell in head.cells]
    return RunComparison(
        head=str(head.directory.path),
        differs=_differs(base, head, [cell.cell for cell in matched]),
        only_base=[cell.cell for cell in base.plan.cells if cell.cell not in head.cells],
        only_head=[cell.cell for cell in head.plan.cells if cell.cell not in base.cells],
        cells=[_compare_cell(base, head, cell.cell, void_base[cell.cell], void_head[cell.cell]) for cell in matched],
    )


def _compare_cell(base: Stored, head: Stored, name: str, void_base: list[str], void_head: list[str]) -> CellAcrossRuns:
    before, after = base.cells[name], head.cells[name]
    common = [item for item in before.lines if item in after.lines]
    reason = _not_comparable(base, head, name, common)
    doubt = Reason(kind="void", text="void in one of the runs") if void_base or void_head else None
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
        figures=None if reason else _figures(base, head, name, common, doubt),
        reason=reason,
    )


def _not_comparable(base: Stored, head: Stored, name: str, common: Collection[str]) -> str | None:
    """Return why a cell cannot be compared: it failed, or the runs share no item, or have other prompts; else None."""
    for stored in (base, head):
        error = stored.cells[name].error
        if error:
            return f"failed in {stored.directory.path}: {error}"
    before, after = base.cells[name], head.cells[name]
    if not common:
        return f"no item in common: {len(before.lines)} and {len(after.lines)} answers"
    base_prompts, head_prompts = _prompts(base, before, common), _prompts(head, after, common)
    changed = sum(base_prompts[item] != head_prompts[item] for item in common)
    return f"other prompts in {changed} of {len(common)} common items" if changed else None


def _prompts(stored: Stored, data: CellData, items: Collection[str]) -> dict[str, object]:
    """Return the prompt of each item. For a private suite only the length of a first turn is stored.

    The prompt of a later turn contains the arm's own answer, so its own tokens count, and the turn that it follows.
    """
    suite, wanted = stored.plan.suite(data.cell.suite), set(items)
    prompts: dict[str, object] = {}
    for item in suite.items:
        if item.item in wanted:
            before = None if item.follows is None else suite.items[item.follows].item
            if suite.withheld is None:
                prompts[item.item] = (before, item.shared, item.prompt_ids)
            else:
                prompts[item.item] = (before, None if before else data.lines[item.item].prompt_tokens)
    return prompts


def _figures(base: Stored, head: Stored, name: str, common: Collection[str], doubt: Reason | None) -> CellFigures:
    """Return a cell's results on the common items, and its speed in each run. doubt: why there is no verdict."""
    reason = _not_scored(base, head, name)
    before, after = (_on(stored.cells[name], common, base.cells[name], head.cells[name]) for stored in (base, head))
    metric = None if reason else base.plan.suite(before.cell.suite).metric
    max_loss = base.plan.request.max_loss
    accuracy = None if reason else accuracies([after], before, max_loss, [doubt], looks=1).get(after.cell.arm)
    return CellFigures(
        base=_of_run(before, base.cells[name], metric),
        head=_of_run(after, head.cells[name], metric),
        agreement=agreement(after, before),
        accuracy=accuracy,
        accuracy_reason=reason or (None if accuracy else "no common item is scored in both runs"),
        tokens_per_forward=_ratio_per_forward(after, before),
    )


def _on(data: CellData, items: Collection[str], base: CellData, head: CellData) -> CellData:
    """Return the data of the items only, without times, in the base run's blocks, with the scores that both have."""
    return dataclasses.replace(
        data,
        lines={item: data.lines[item].model_copy(update={"block": base.lines[item].block}) for item in items},
        unit_of=base.unit_of,
        timed_unit_of=base.timed_unit_of,
        valid=set(),
        scores={item: data.scores[item] for item in items if item in base.scores and item in head.scores},
        timings=data.timings if len(items) == len(data.lines) else [],  # an engine's own counters cover all items
    )


def _of_run(data: CellData, whole: CellData, metric: str | None) -> RunFigures:
    """Return a cell's results in one run. data: of the common items; whole: of all items, with the times."""
    summary = summarize(data, metric)
    return RunFigures(
        accuracy=summary.accuracy,
        tokens_per_forward=summary.tokens_per_forward,
        acceptance_length=None if summary.acceptance is None else summary.acceptance.length,
        answer_length=data.tokens / summary.items,
        tokens_per_s=summarize(whole, metric).tokens_per_s.value,
    )


def _ratio_per_forward(data: CellData, baseline: CellData) -> Estimate:
    """Return tokens per forward over the baseline's; all null if an engine hides its forwards."""
    ours, theirs = data.tokens_and_forwards(), baseline.tokens_and_forwards()
    if ours is None or theirs is None:
        return Estimate.of(None)
    (tokens, forwards), (tokens0, forwards0) = ours, theirs
    return Estimate.of(statistics.ratio_of_totals([tokens, forwards0], [forwards, tokens0]))


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
    return None if unscored is None else f"not scored; run `mtbench score {unscored.directory.path}`"


def _differs(base: Stored, head: Stored, names: Sequence[str]) -> list[Differs]:
    """Return the conditions with other values: machine and versions, options, checkpoints of the cells compared."""
    before, after = _conditions(base, names), _conditions(head, names)
    return [
        Differs(name=name, base=before.get(name), head=after.get(name))
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name)
    ]


def _conditions(stored: Stored, names: Sequence[str]) -> dict[str, str | None]:
    conditions = {name: _listed(read(session) for session in stored.sessions) for name, read in CONDITIONS.items()}
    request = stored.plan.request
    conditions |= {"protocol": request.protocol, "sampling": str(request.sampling), "seed": str(request.seed)}
    conditions["template options"] = _listed(f"{name}={value}" for name, value in request.chat_template_kwargs.items())
    conditions["chat template date"] = request.chat_template_date
    of_cells: dict[str, list[object]] = {}
    for cell in (stored.cells[name].cell for name in names):
        suite = cell.cell.partition(".")[0]  # the suite's name may hold a path, which differs between machines
        of_cells.setdefault(f"max new tokens of {suite}", []).append(stored.plan.suite(cell.suite).max_new_tokens)
        for role, source in cell.checkpoints.items():
            of_cells.setdefault(f"checkpoint {role}", []).append(source)
        options = ", ".join(f"{name}={value}" for name, value in cell.options.items())
        if options:
            of_cells.setdefault(f"options of {cell.arm}", []).append(options)
    return conditions | {name: _listed(values) for name, values in of_cells.items()}


def _listed(values: Iterable[object]) -> str | None:
    """Return the known values, each once; None if there is none."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None

"""How long a plan takes: modelled on a GPU whose figures are known, else measured.

Measured: each cell decodes a few tokens of its first block, and one arm of each suite decodes a whole block, whose
lengths stand for all answers. On a GPU this would load and compile every model, which takes minutes, so the time is
computed from the models' sizes instead (mtbench/hardware/step_time.py).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

import torch

from mtbench.hardware import step_time
from mtbench.hardware.probe import Shape, count
from mtbench.hardware.step_time import Gpu
from mtbench.models.drafts.loading import draft_config, draft_without_weights
from mtbench.models.loading import DTYPES, without_weights
from mtbench.runs.model_pool import ModelPool, method_of, resolve_device, resolve_dtype, with_dtype
from mtbench.runs.plan import Cell, Group, Plan, SuitePlan
from mtbench.runs.requests import requests_of
from mtbench.runs.workers import Done, LocalWorker, Task, Worker

FEW_TOKENS = 16
WARM_UP_CALLS = 2  # of each shape of a cell; more only while something is compiled
WHOLE_BUDGET = "if every answer takes its whole token budget"
Show = Callable[[int, int, str], None]  # how many of how many cells are measured, and which one is next


@dataclass(frozen=True, slots=True)
class Estimate:
    """The expected times of a plan."""

    blocks_s: Sequence[float]  # per group, one block in all its cells
    assumes: str
    warm_up_s: float = 0.0
    rescoring_s: float = 0.0  # of all answers of lossless arms
    loading_s: float = 0.0  # of the models
    failed: Mapping[str, str] = field(default_factory=dict)  # cell -> its error: it counts as 0
    first_calls_s: Mapping[str, float] = field(default_factory=dict)  # cell -> time of its first call beyond a warm one

    def timed_s(self, blocks: Sequence[int]) -> float:
        """Return the seconds of the timed rounds. `blocks`: per group, over all rounds."""
        return sum(number * block_s for number, block_s in zip(blocks, self.blocks_s, strict=True))

    def passes_s(self, blocks: Sequence[int]) -> dict[str, float]:
        """Return the seconds of each pass, by its name."""
        return {
            "timed rounds": self.timed_s(blocks),
            "warm-up": self.warm_up_s,
            "re-scoring": self.rescoring_s,
            "loading": self.loading_s,
        }

    def described(self, blocks: Sequence[int]) -> str:
        """Return the estimate in words, with the passes that it counts."""
        passes = self.passes_s(blocks)
        named = ", ".join(f"{name} {duration(seconds)}" for name, seconds in passes.items() if seconds)
        return f"about {duration(sum(passes.values()))} ({named}), {self.assumes}"


def all_blocks(plan: Plan) -> list[int]:
    """Return for each group its blocks over all rounds."""
    return [sum(group.rounds) for group in plan.groups]


def duration(seconds: float) -> str:
    """Return a duration in words.

    >>> duration(75), duration(600), duration(0.4), duration(9000)
    ('75 s', '10 min', '0.4 s', '2.5 h')
    """
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    if seconds > 90:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1f} s"


def estimate(plan: Plan, show: Show = lambda *_: None, worker: Worker | None = None) -> Estimate:
    """Return the expected times of a plan, computed or measured. `worker`: has the models; None: they are loaded."""
    gpu = modelled_gpu(plan)
    if gpu is not None:
        assumes = f"{WHOLE_BUDGET} and every forward pass gives one token; computed for an {gpu.name}, not measured"
        return Estimate(modelled_blocks_s(plan, gpu), assumes)
    if worker is not None:
        return measured(plan, worker, show)
    show(0, len(plan.cells), "loading the models")
    pool = ModelPool(with_dtype(plan).request)
    pool.load(plan.cells)
    return measured(plan, LocalWorker(pool, plan.cells), show, loading_s=pool.loading_s or 0.0)


def modelled_gpu(plan: Plan) -> Gpu | None:
    """Return the GPU that the plan's time is modelled for; None if it is measured.

    Measured are external engines, other GPUs, and mixtures of experts.
    """
    if resolve_device(plan.request.device) != "cuda" or any(cell.engine is None for cell in plan.cells):
        return None
    try:
        _shapes(plan)
    except ValueError:
        return None
    return step_time.named(torch.cuda.get_device_name())


def modelled_blocks_s(plan: Plan, gpu: Gpu) -> list[float]:
    """Return for each group the seconds of one block, from the models' sizes.

    Every forward pass commits one token, as if no draft token were accepted, so this is an upper bound for methods that
    draft.
    """
    shapes = _shapes(plan)
    return [sum(_block_s(plan, group, plan.cell(name), shapes, gpu) for name in group.cells) for group in plan.groups]


def _shapes(plan: Plan) -> dict[str, Shape]:
    """Return the sizes of every checkpoint by its source. Raises ValueError if one cannot be counted."""
    dtype = DTYPES[resolve_dtype(plan.request.dtype, "cuda")]
    pairs = {(source, cell.checkpoints[cell.on]) for cell in plan.cells for source in cell.checkpoints.values()}
    return {source: _shape(source, target, dtype, offline=plan.request.offline) for source, target in pairs}


@cache
def _shape(source: str, target: str, dtype: torch.dtype, *, offline: bool) -> Shape:
    """Return the sizes of a checkpoint, which may be a draft that reads the hidden states of a target."""
    if source == target or draft_config(source, offline=offline) is None:
        return count(without_weights(source, dtype, offline=offline))
    return count(draft_without_weights(source, without_weights(target, dtype, offline=offline), offline=offline))


def _block_s(plan: Plan, group: Group, cell: Cell, shapes: dict[str, Shape], gpu: Gpu) -> float:
    """Return the seconds of the first block in one cell."""
    suite, items = plan.suite(group.suite), group.blocks[0]
    rows = min(cell.batch_size, len(items))
    prompt = sum(len(suite.items[i].prompt_ids) for i in items) / len(items)
    context = prompt + suite.max_new_tokens / 2
    window = method_of(cell).variants[-1].window()
    fed, judged = (window.pending or 1) + window.guesses, window.guesses + 1
    assert cell.engine is not None
    batch_s = 0.0
    for role, source in cell.checkpoints.items():
        shape = shapes[source]
        positions, logits, forwards = (fed, judged, 1) if role == cell.on else (1, 1, window.drafts)
        each_s = step_time.step_s(
            shape, gpu, cell.engine, rows=rows, positions=positions, judged=logits, context=context
        )
        batch_s += step_time.prefill_s(shape, gpu, rows=rows, prompt=prompt) + suite.max_new_tokens * forwards * each_s
    return batch_s * len(items) / rows


def measured(plan: Plan, worker: Worker, show: Show = lambda *_: None, *, loading_s: float = 0.0) -> Estimate:
    """Return the expected times, measured on a worker whose models are loaded."""
    found = _Measurement(plan, worker, show)
    blocks_s = [found.block_s(group) for group in plan.groups]
    return Estimate(
        blocks_s,
        found.assumes(),
        warm_up_s=found.warm_up_s,
        rescoring_s=found.rescoring_s,
        loading_s=loading_s,
        failed=found.failed,
        first_calls_s=found.first_calls_s,
    )


class _Measurement:
    """Decodes parts of a plan and adds up what they say of the whole."""

    def __init__(self, plan: Plan, worker: Worker, show: Show) -> None:
        self.plan, self.worker, self.show = plan, worker, show
        self.warm_up_s = self.rescoring_s = 0.0
        self.failed: dict[str, str] = {}
        self.first_calls_s: dict[str, float] = {}
        self.lengths: dict[str, list[int]] = {}  # suite -> tokens of the answers of a block
        self.whose: dict[str, str] = {}  # suite -> arm that gave them
        self.prefill_s: dict[tuple[str, str], float] = {}  # suite, arm -> per prompt, in the smallest batch
        self.begun = 0

    def assumes(self) -> str:
        """Return what the answers are taken to be."""
        if not self.whose:
            return WHOLE_BUDGET
        arms = " and ".join(dict.fromkeys(self.whose.values()))
        return f"if answers are as long as those of {arms} in one block"

    def block_s(self, group: Group) -> float:
        """Return the seconds of a block in all cells of a group."""
        return sum(self._cell_s(group, self.plan.cell(name)) for name in group.cells)

    def _cell_s(self, group: Group, cell: Cell) -> float:
        self.show(self.begun, len(self.plan.cells), cell.arm)
        self.begun += 1
        if cell.fault:
            return 0.0
        suite = self.plan.suite(group.suite)
        few = min(FEW_TOKENS, suite.max_new_tokens)
        calls = [self._decoded(cell, suite, group.blocks[0], few) for _ in range(WARM_UP_CALLS)]
        last = calls[-1]
        if last is None or calls[0] is None:
            return 0.0
        wall_s, before_s = last.timing.wall_s, last.timing.prefill_s or 0.0
        self.first_calls_s[cell.cell] = max(0.0, calls[0].timing.wall_s - wall_s)
        self.warm_up_s += WARM_UP_CALLS * wall_s * len({len(block) for block in group.blocks})
        lengths = self._lengths(suite, cell)
        decoded = steps([len(g.token_ids) for g in last.generations], cell, len(last.generations))
        block_s = before_s + (wall_s - before_s) * steps(lengths, cell, len(last.generations)) / max(decoded, 1)
        prompt = last.timing.prompt_tokens / len(last.generations)
        each_s = self.prefill_s.setdefault((suite.suite, cell.arm), before_s / len(last.generations))
        if cell.claims == "lossless" and cell.lossless_reference is not None:
            answers = sum(map(len, group.blocks))
            self.rescoring_s += answers * each_s * (prompt + fmean(lengths)) / prompt
        return block_s

    def _lengths(self, suite: SuitePlan, cell: Cell) -> list[int]:
        """Return the tokens of the answers of one block: those of the first cell that is asked for them."""
        if cell.length == "fixed" or cell.accept is not None:
            return [suite.max_new_tokens]
        if suite.suite not in self.lengths:
            twins = {c.cell: c for c in self.plan.cells if (c.suite, c.arm) == (cell.suite, cell.arm)}
            largest = max((g for g in self.plan.groups if twins.keys() & g.cells), key=lambda group: group.batch_size)
            twin = next(twins[name] for name in largest.cells if name in twins)
            whole = self._decoded(twin, suite, largest.blocks[0], suite.max_new_tokens)
            if whole is None:
                return [suite.max_new_tokens]
            self.lengths[suite.suite] = [len(g.token_ids) for g in whole.generations]
            self.whose[suite.suite] = cell.arm
        return self.lengths[suite.suite]

    def _decoded(self, cell: Cell, suite: SuitePlan, block: Sequence[int], budget: int) -> Done | None:
        """Return the decoded block; None if the cell fails."""
        requests = requests_of(self.plan, suite, block, max_new_tokens=budget)
        outcome = self.worker.decode(Task(cell=cell.cell, requests=requests, room=suite.room))
        if isinstance(outcome, Done):
            return outcome
        self.failed[cell.cell] = outcome.error
        return None


def steps(lengths: Sequence[int], cell: Cell, items: int) -> float:
    """Return how many steps of one token a block of the cell takes if its answers are as long as these.

    A static block ends with its longest answer; in a refilled one no row waits.
    """
    rows = cell.batch_size
    if cell.batching == "refill":
        return fmean(lengths) * items / rows
    return fmean(max(lengths[i : i + rows]) for i in range(0, len(lengths), rows))

"""How long a plan takes, measured.

Each cell decodes a few tokens of its first block, and one arm of each suite decodes a whole block, whose lengths stand
for all answers. Of a serving engine one server is started, that of its first cell, which stands for its others.
"""

from collections.abc import Callable, Sequence
from statistics import fmean

from mtbench.decoding.arms import is_served
from mtbench.document.formatting import duration
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.time_budget import part_of, remember_start
from mtbench.measure.workers import Done, LocalWorker, Task, Worker
from mtbench.plan.plan import Cell, Group, Plan, SuitePlan

FEW_TOKENS = 16
WARM_UP_CALLS = 2  # of each shape of a cell; more only while something is compiled
Show = Callable[[int, int, str], None]  # how many of how many cells are measured, and which one is next


def estimate(plan: Plan, show: Show = lambda *_: None) -> "TimeEstimate":
    """Return the expected times of a plan, whose models are loaded for it."""
    show(0, len(plan.cells), "loading the models")
    pool = ModelPool(plan.request)
    pool.load(plan.cells)
    return TimeEstimate(plan, LocalWorker(pool, plan.cells), show, loading_s=pool.loading_s or 0.0)


class TimeEstimate:
    """The expected times of a plan in seconds: extrapolated from the parts that a worker decodes."""

    def __init__(self, plan: Plan, worker: Worker, show: Show = lambda *_: None, *, loading_s: float = 0.0) -> None:
        self.plan, self.worker, self.show = plan, worker, show
        self.loading_s = loading_s  # of the models
        self.warm_up_s = 0.0
        self.starts, self.starting_s = 0, 0.0  # of serving engines: one server for each arm and batch size
        self.rescoring_s = 0.0  # of all answers of lossless arms
        self.block_of: dict[str, float] = {}  # serving engine -> time of a block in its first cell
        self.failed: dict[str, str] = {}  # cell -> its error: it counts as 0
        self.lengths: dict[str, list[int]] = {}  # suite -> tokens of the answers of a block
        self.whose: dict[str, str] = {}  # suite -> arm that gave them
        self.prefill_s: dict[tuple[str, str], float] = {}  # suite, arm -> per prompt, in the smallest batch
        self.begun = 0
        each = [[self._cell_s(group, plan.cell(name)) for name in group.cells] for group in plan.groups]
        self.blocks_s = [*map(sum, each)]  # one block in all cells of a group

    @property
    def timed_s(self) -> float:
        """The timed rounds."""
        return sum(sum(group.rounds) * s for group, s in zip(self.plan.groups, self.blocks_s, strict=True))

    def described(self) -> str:
        """Return the estimate in words, with the passes that it counts."""
        passes = {
            "timed rounds": self.timed_s,
            "warm-up": self.warm_up_s,
            "re-scoring": self.rescoring_s,
            "loading": self.loading_s,
            f"{self.starts} starts of servers": self.starting_s,
        }
        named = ", ".join(f"{name} {duration(seconds)}" for name, seconds in passes.items() if seconds)
        return f"about {duration(sum(passes.values()))} ({named}), {self.assumes}"

    @property
    def assumes(self) -> str:
        """The assumption on the answers."""
        if not self.whose:
            return "if every answer takes its whole token budget"
        arms = " and ".join(dict.fromkeys(self.whose.values()))
        return f"if answers are as long as those of {arms} in one block"

    def _cell_s(self, group: Group, cell: Cell) -> float:
        self.show(self.begun, len(self.plan.cells), cell.arm)
        self.begun += 1
        if cell.fault:
            return 0.0
        visits = len(group.rounds) if self.plan.request.apart else 1
        if is_served(cell.engine):
            self.starts += visits
            if cell.engine in self.block_of:
                self.starting_s += visits * sum(part_of(group, [cell]).starts_s)
                return self.block_of[cell.engine]
        suite = self.plan.suite(group.suite)
        few = min(FEW_TOKENS, suite.max_new_tokens)
        calls = [self._decoded(cell, suite, group.blocks[0], few) for _ in range(WARM_UP_CALLS)]
        last = calls[-1]
        if last is None or calls[0] is None:
            return 0.0
        if is_served(cell.engine) and (start_s := calls[0].timing.preparation_s):
            remember_start(cell, start_s)
            self.starting_s += visits * start_s
        wall_s, before_s = last.timing.wall_s, last.timing.prefill_s or 0.0
        self.warm_up_s += visits * WARM_UP_CALLS * wall_s * len({len(block) for block in group.blocks})
        lengths = self._lengths(suite, cell)
        decoded = _steps([len(g.token_ids) for g in last.generations], cell, len(last.generations))
        block_s = before_s + (wall_s - before_s) * _steps(lengths, cell, len(last.generations)) / max(decoded, 1)
        prompt = last.timing.prompt_tokens / len(last.generations)
        each_s = self.prefill_s.setdefault((suite.suite, cell.arm), before_s / len(last.generations))
        if cell.claims == "lossless" and cell.lossless_reference is not None:
            answers = sum(map(len, group.blocks))
            self.rescoring_s += answers * each_s * (prompt + fmean(lengths)) / prompt
        if is_served(cell.engine):
            self.block_of[cell.engine] = block_s
        return block_s

    def _lengths(self, suite: SuitePlan, cell: Cell) -> list[int]:
        """Return the tokens of the answers of one block: those of the first cell that needs them."""
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
        requests = self.plan.requests(suite, block, max_new_tokens=budget)
        visit = self.begun if self.plan.request.apart else 0
        outcome = self.worker.decode(Task(cell=cell.cell, requests=requests, room=suite.room, visit=visit))
        if isinstance(outcome, Done):
            return outcome
        self.failed[cell.cell] = outcome.error
        return None


def _steps(lengths: Sequence[int], cell: Cell, items: int) -> float:
    """Return how many steps of one token a block of the cell takes if its answers are as long as these.

    A static block ends with its longest answer; in a refilled one no row waits.
    """
    rows = cell.batch_size
    if cell.batching == "refill":
        return fmean(lengths) * items / rows
    return fmean(max(lengths[i : i + rows]) for i in range(0, len(lengths), rows))

"""How long a plan takes, measured, and known better after each part that is decoded.

Each cell decodes a few tokens of its first block; the nearest cell that has done so stands for one that has not. Plain
decoding at the smallest batch size begins: it takes seconds. At last one arm of each suite decodes a whole block, whose
lengths stand for all answers; until then each answer counts with its whole token budget. Of a serving engine one server
is started, which stands for its others.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import fmean

from mtbench.decoding.arms import is_served
from mtbench.document.formatting import counted, duration
from mtbench.measure.block_runner import WARM_UP_TOKENS
from mtbench.measure.model_pool import ModelPool
from mtbench.measure.time_budget import part_of, remember_start
from mtbench.measure.workers import Done, LocalWorker, Task, Worker
from mtbench.plan.plan import Cell, Group, Plan

WARM_UP_CALLS = 2  # of each shape of a cell; more only while something is compiled


def estimate(plan: Plan) -> "TimeEstimate":
    """Return the time estimate of a plan, whose models are loaded for it."""
    pool = ModelPool(plan.request)
    pool.load(plan.cells)
    return TimeEstimate(plan, LocalWorker(pool, plan.cells), loading_s=pool.loading_s or 0.0)


class TimeEstimate:
    """The expected times of a plan in seconds: extrapolated from the parts that a worker has decoded so far."""

    def __init__(self, plan: Plan, worker: Worker, *, loading_s: float = 0.0) -> None:
        self.plan, self.worker = plan, worker
        self.loading_s = loading_s  # of the models
        self.cells = [(g, cell) for g in plan.groups for name in g.cells if not (cell := plan.cell(name)).fault]
        self.samples: dict[str, tuple[Cell, Done]] = {}  # cell -> a few tokens of its first block
        self.failed: dict[str, str] = {}  # cell -> its error: it counts as 0
        self.lengths: dict[str, list[int]] = {}  # suite -> tokens of the answers of a block
        self.whose: dict[str, str] = {}  # suite -> arm that gave them
        self.open = True  # something is yet to be decoded

    def measure(self) -> Iterator[str]:
        """Decode the parts one after the other. Yields the arm of each before that."""
        for group, cell in self._in_order():
            if is_served(cell.engine) and any(other.engine == cell.engine for other, _ in self.samples.values()):
                continue
            first = not self.samples
            for _ in range(WARM_UP_CALLS):
                yield cell.arm
                done = self._decoded(group, cell, WARM_UP_TOKENS)
                if done is None:
                    break
                self.samples[cell.cell] = cell, done
                if is_served(cell.engine) and done.timing.preparation_s:
                    remember_start(cell, done.timing.preparation_s)
                if not (first or done.timing.preparation_s):
                    break
        for suite in self.plan.suites:
            free = [(g, c) for g, c in self.cells if c.cell in self.samples and c.suite == suite.suite and _is_free(c)]
            if free:
                group, cell = max(free, key=lambda placed: (placed[1].arm == free[0][1].arm, placed[1].batch_size))
                yield cell.arm
                if whole := self._decoded(group, cell, suite.max_new_tokens):
                    self.lengths[suite.suite] = [len(g.token_ids) for g in whole.generations]
                    self.whose[suite.suite] = cell.arm
        self.open = False

    def passes(self) -> dict[str, float]:
        """Return the time of each pass."""
        timed_s = warm_up_s = starting_s = 0.0
        starts, rescoring_s = 0, dict[tuple[str, str], float]()
        for group, cell in self.cells:
            visits = len(group.rounds) if self.plan.request.apart else 1
            timed_s += sum(group.rounds) * self.block_s(group, cell)
            if is_served(cell.engine):  # a server for each arm and batch size
                starts += visits
                starting_s += visits * sum(part_of(group, [cell]).starts_s)
            else:
                shapes = len({len(block) for block in group.blocks})
                warm_up_s += visits * shapes * WARM_UP_CALLS * self.block_s(group, cell, WARM_UP_TOKENS)
            if cell.claims == "lossless" and cell.lossless_reference is not None:
                (prompt, prompt_s, _), answers = self._pace(cell), sum(map(len, group.blocks))
                read_s = answers * prompt_s * (prompt + fmean(self._lengths(cell))) / prompt
                source = cell.suite, cell.checkpoints[cell.on]  # answers of several cells to an item are read together
                rescoring_s[source] = max(read_s, rescoring_s.get(source, 0.0))
        named = {"timed rounds": timed_s, "warm-up": warm_up_s, "re-scoring": sum(rescoring_s.values())}
        named |= {"loading": self.loading_s, f"{starts} starts of servers": starting_s}
        return {name: s for name, s in named.items() if s}

    def total(self) -> str:
        """Return the time of all passes, and how many cells it rests on."""
        bound = "at least" if not self.samples else "at most" if self.open else "about"
        measured = f"{len({*self.samples, *self.failed})} of {counted(len(self.cells), 'cell')} measured"
        return f"{bound} {duration(sum(self.passes().values()))}{f' ({measured})' if self.open else ''}"

    def described(self) -> str:
        """Return the estimate in words, with its passes and the assumption on the answers."""
        named = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.passes().items())
        arms = " and ".join(dict.fromkeys(self.whose.values()))
        as_long = f"answers are as long as those of {arms} in one block"
        return f"{self.total()}, if {as_long if arms else 'every answer takes its whole token budget'}: {named}"

    def block_s(self, group: Group, cell: Cell, budget: int | None = None) -> float:
        """Return the time of a block of a cell. budget: tokens of each answer; None: as many as are expected."""
        (_, prompt_s, step_s), items = self._pace(cell), len(group.blocks[0])
        return items * prompt_s + step_s * _steps([budget] if budget else self._lengths(cell), cell, items)

    def longest_block_s(self) -> float | None:
        """Return the longest of the blocks of cells that were measured; None if none was."""
        measured = [(group, cell) for group, cell in self.cells if cell.cell in self.samples]
        return max((self.block_s(group, cell) for group, cell in measured), default=None)

    def _in_order(self) -> list[tuple[Group, Cell]]:
        """Return the cells as they are measured: of each group one first, which stands for its others.

        Small batches take less time. A server's start takes long, and its batch size hardly matters beside it.
        """
        before, keys = Counter[tuple[str, str | None]](), {}
        for group, cell in self.cells:
            size, served = cell.batch_size, is_served(cell.engine)
            keys[cell.cell] = before[group.name, cell.engine], served, -size if served else size
            before[group.name, cell.engine] += 1
        return sorted(self.cells, key=lambda placed: keys[placed[1].cell])

    def _pace(self, cell: Cell) -> tuple[float, float, float]:
        """Return the tokens of a prompt, the time to read it and that of a step, by the cell's sample or the nearest.

        More rows slow a step at most in proportion.
        """
        if cell.cell in self.failed or not self.samples:
            return 1.0, 0.0, 0.0
        known, done = self.samples.get(cell.cell) or min(self.samples.values(), key=lambda one: _distance(cell, one[0]))
        items, timing = len(done.generations), done.timing
        before_s = timing.prefill_s or 0.0
        steps = _steps([len(g.token_ids) for g in done.generations], known, items)
        step_s = (timing.wall_s - before_s) / max(steps, 1) * max(1.0, cell.batch_size / known.batch_size)
        return timing.prompt_tokens / items, before_s / items, step_s

    def _lengths(self, cell: Cell) -> list[int]:
        budget = [self.plan.suite(cell.suite).max_new_tokens]
        return self.lengths.get(cell.suite, budget) if _is_free(cell) else budget

    def _decoded(self, group: Group, cell: Cell, budget: int) -> Done | None:
        suite = self.plan.suite(group.suite)
        requests = self.plan.requests(suite, group.blocks[0], max_new_tokens=min(budget, suite.max_new_tokens))
        visit = self.cells.index((group, cell)) + 1 if self.plan.request.apart else 0
        outcome = self.worker.decode(Task(cell=cell.cell, requests=requests, room=suite.room, visit=visit))
        if isinstance(outcome, Done):
            return outcome
        self.failed[cell.cell] = outcome.error
        return None


def _distance(cell: Cell, other: Cell) -> tuple[bool, bool, int]:
    return other.engine != cell.engine, other.suite != cell.suite, abs(other.batch_size - cell.batch_size)


def _is_free(cell: Cell) -> bool:
    """Return whether its answers end by themselves."""
    return cell.length == "natural" and cell.accept is None


def _steps(lengths: Sequence[int], cell: Cell, items: int) -> float:
    """Return how many steps of one token a block of the cell takes if its answers are as long as these.

    A static block ends with its longest answer; in a refilled one no row waits.
    """
    rows = cell.batch_size
    if cell.batching == "refill":
        return fmean(lengths) * items / rows
    return fmean(max(lengths[i : i + rows]) for i in range(0, len(lengths), rows))

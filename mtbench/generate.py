"""The middle stage: run the plan's cells and write down what came out and how long it took.

Inside every block all arms run next to each other in random order, so that a drift of the machine meets them alike.
Needs torch and transformers only. What is on disk counts; what is missing is run.
"""

import dataclasses
import itertools
import random
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from mtbench import energy, lossless, machine, memory, roofline
from mtbench.contract import Faulty, whereabouts
from mtbench.decoding import Stuck
from mtbench.errors import UserError, first_line
from mtbench.generation import Generation, Timing
from mtbench.lab import Lab
from mtbench.models import DTYPES
from mtbench.plan import Cell, Group, Plan, SuitePlan
from mtbench.registry import METHODS
from mtbench.rundir import Record, RunDirectory
from mtbench.server import ServerError

WARM_UP_TOKENS = 16
WARM_UPS = 6  # an arm that moves shared memory makes another prepare once more


class Progress(Protocol):
    """Told what happens; shows it (mtbench/display.py)."""

    def begin(self, cells: int, work: int) -> None: ...
    def decoded(self, cell: Cell, index: int, rows: int, timing: Mapping[str, Any] | None) -> None: ...
    def note(self, text: str) -> None: ...


def generate(run: RunDirectory, progress: Progress, time_budget_s: float | None = None) -> None:
    """Run whatever of the plan is not on disk yet; `time_budget_s` is this session's, else the plan's.

    Raises UserError if nothing can be run at all, or if the run was begun on another kind of device or in another type.
    """
    plan = Plan.from_json(run.read_json("plan.json"))
    lab = Lab(plan.request)
    budget_s = plan.request["time_budget_s"] if time_budget_s is None else time_budget_s
    deadline = time.monotonic() + (float("inf") if budget_s is None else budget_s)
    run.keep_lines("failures.jsonl", run.lines("failures.jsonl"))
    broken = {cell.cell: cell.fault for cell in plan.cells if cell.fault}
    failed = {f["cell"] for f in run.lines("failures.jsonl") if f.get("stage") is None}
    run.append("failures.jsonl", [{"cell": c, "error": why} for c, why in broken.items() if c not in failed])
    failed |= broken.keys()
    stages = [Stage(run, plan, group, lab, failed, progress) for group in plan.groups]
    work = sum(stage.work for stage in stages)
    progress.begin(len(plan.cells), work)
    if work:
        lab.load(plan)
        session = _begin_session(run, lab)
        for stage in stages:
            stage.run_blocks(session, deadline)
    for cell in plan.cells:
        if cell.cell not in failed:
            lossless.check(run, cell, [i.item for i in plan.suite(cell.suite).items], lab, progress.note)
    energy.measure(run, plan, lab, failed, progress.note, deadline)
    memory.measure(run, plan, lab, failed, progress.note, deadline)
    lab.clear()


def _begin_session(run: RunDirectory, lab: Lab) -> int:
    """Note this process in environment.json and return its number, from 1."""
    environment = run.read_json("environment.json")
    sessions = environment.get("sessions", [])
    for name, here in (("device", lab.device), ("dtype", lab.dtype)):
        if sessions and sessions[0][name] != here:
            raise UserError(
                f"this run was begun with --{name} {sessions[0][name]}, here it would go on with {here}; "
                f"a cell must not mix them. Go on where it began, or start another run with `-o DIR`."
            )
    probed = roofline.describe(lab.device, DTYPES[lab.dtype], lab.checkpoints)
    sessions = [*sessions, {**machine.environment(sys.argv), **lab.describe(), **probed}]
    run.write_json("environment.json", {**environment, "sessions": sessions})
    return len(sessions)


class Stage:
    """One group of cells, block by block."""

    def __init__(
        self, run: RunDirectory, plan: Plan, group: Group, lab: Lab, failed: set[str], progress: Progress
    ) -> None:
        self.run, self.plan, self.group, self.lab, self.failed, self.progress = run, plan, group, lab, failed, progress
        self.suite: SuitePlan = plan.suite(group.suite)
        self.cells = [plan.cell(name) for name in group.cells]
        longest = max(len(item.prompt_ids) for item in self.suite.items)
        self.room = longest + self.suite.max_new_tokens  # of every batch: shapes are the same for all blocks
        self.done = self._mend()
        self.tokens: dict[tuple[str, str], list[int]] = {
            (cell.cell, line["item"]): line["token_ids"]
            for cell in self.cells
            for line in run.lines(f"generations/{cell.cell}.jsonl")
        }

    @property
    def todo(self) -> list[tuple[int, int]]:
        """(round, block) in the order they run; rounds count from 1."""
        rounds = enumerate(self.group.rounds, start=1)
        return [(r, b) for r, blocks in rounds for b in range(blocks) if (r, b) not in self.done]

    @property
    def work(self) -> int:
        """Batches to decode."""
        return len(self.todo) * len(self._live())

    def run_blocks(self, session: int, deadline: float) -> None:
        todo = self.todo
        self._warm_up(session, {len(self.group.blocks[block]): block for _, block in todo}.values())
        for round_, block in todo:
            if time.monotonic() > deadline:
                self.progress.note("time budget spent; what is missing runs with --resume")
                return
            order = self._live()
            random.Random(f"{self.plan.request['seed']}/{self.group.batch_size}/{round_}/{block}").shuffle(order)
            for place, cell in enumerate(order):
                self._run_batch(cell, session, round_, block, place)

    def _warm_up(self, session: int, blocks: Collection[int]) -> None:
        """Decode a little of a block of every shape until no arm has anything left to prepare for it.

        What the first calls took beyond the last, warm one is noted as the cell's preparation.
        """
        wall_s: dict[tuple[str, int], list[float]] = {}
        for call in range(WARM_UPS):
            preparing = call == 0
            for block, cell in itertools.product(blocks, self._live()):
                outcome = self._attempt(cell, block, WARM_UP_TOKENS)
                if outcome is not None:
                    wall_s.setdefault((cell.cell, block), []).append(outcome[1].wall_s)
                    preparing |= outcome[1].preparation_s > 0
            if not preparing:
                break
        for cell in self._live():
            calls = [w for (name, _), w in wall_s.items() if name == cell.cell]
            prepared_s = sum(max(0.0, sum(w) - len(w) * w[-1]) for w in calls)
            line = {"session": session, "cell": cell.cell, "preparation_s": prepared_s}
            self.run.append("preparation.jsonl", [line])

    def _run_batch(self, cell: Cell, session: int, round_: int, block: int, place: int) -> None:
        before = machine.sample(self.lab.device)
        outcome = self._attempt(cell, block, self.suite.max_new_tokens)
        after = machine.sample(self.lab.device)  # at once, while the device is as the batch left it
        index = self.plan.cells.index(cell) + 1
        if outcome is None:
            self.progress.decoded(cell, index, 0, None)
            return
        generations, timing = outcome
        items = [self.suite.items[i] for i in self.group.blocks[block]]
        identical = None
        if round_ == 1:
            self.tokens |= {(cell.cell, i.item): g.token_ids for i, g in zip(items, generations, strict=True)}
            lines = [_generation_line(i.item, i.prompt_ids, g, block) for i, g in zip(items, generations, strict=True)]
            self.run.append(f"generations/{cell.cell}.jsonl", lines)
        else:
            same = [self.tokens[cell.cell, i.item] == g.token_ids for i, g in zip(items, generations, strict=True)]
            identical = sum(same)
        line = {
            "session": session,
            "round": round_,
            "block": block,
            "order": place,
            **dataclasses.asdict(timing),
            **machine.window(before, after),
            "identical": identical,
        }
        if timing.preparation_s:
            line["dropped"] = line["dropped"] or "a shape was prepared inside the window"
        self.run.append(f"timings/{cell.cell}.jsonl", [line])
        self.progress.decoded(cell, index, len(items), line)

    def _attempt(self, cell: Cell, block: int, budget: int) -> tuple[list[Generation], Timing] | None:
        """Decode one block; a method that breaks, never commits or runs out of memory costs its own cell."""
        items = [self.suite.items[i] for i in self.group.blocks[block]]
        budget = min(budget, self.suite.max_new_tokens)
        try:
            return self.lab.decode(
                cell,
                [i.prompt_ids for i in items],
                budget,
                items=self.group.blocks[block],
                stop=[i.stop for i in items],
                room=self.room,
            )
        except UserError as error:
            where = whereabouts(error, METHODS[cell.method])
            if not where:  # not of the method but of the request: no cell would fare better
                raise
            self._fail(cell, f"{error}{where}")
        except (torch.OutOfMemoryError, MemoryError) as error:
            longest = max(len(i.prompt_ids) for i in items)
            self._fail(
                cell,
                f"out of memory at batch size {len(items)}, prompts of up to {longest} tokens and {budget} new ones "
                f"({first_line(error)})",
            )
        except (Stuck, Faulty, ServerError) as error:
            self._fail(cell, str(error))
        except (Exception, SystemExit) as error:  # a method's own fault, whatever it is
            where = whereabouts(error, METHODS[cell.method])
            self._fail(cell, f"{type(error).__name__}: {first_line(error)}{where}")
        return None

    def _fail(self, cell: Cell, error: str) -> None:
        self.run.append("failures.jsonl", [{"cell": cell.cell, "error": error}])
        self.failed.add(cell.cell)
        self.progress.note(f"{cell.cell} failed: {error}")

    def _live(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.cell not in self.failed]

    def _mend(self) -> set[tuple[int, int]]:
        """Keep the lines of blocks that every live arm has finished, drop the others; what is kept, (round, block)."""
        timings = {c.cell: self.run.lines(f"timings/{c.cell}.jsonl") for c in self.cells}
        live = [{(t["round"], t["block"]) for t in timings[c.cell]} for c in self._live()]
        done = set.intersection(*live) if live else set()
        for cell in self._live():
            name = f"{cell.cell}.jsonl"
            kept = [t for t in timings[cell.cell] if (t["round"], t["block"]) in done]
            self.run.keep_lines(f"timings/{name}", kept)
            lines = self.run.lines(f"generations/{name}")
            self.run.keep_lines(f"generations/{name}", [g for g in lines if (1, g["block"]) in done])
        return done


def _generation_line(item: str, prompt_ids: Sequence[int], generation: Generation, block: int) -> Record:
    return {
        "item": item,
        "prompt_ids": list(prompt_ids),
        "token_ids": generation.token_ids,
        "text": generation.text,
        "forwards": generation.forwards,
        "commits": generation.commits,
        "positions_fed": generation.positions_fed,
        "draft_forwards": generation.draft_forwards,
        "drafted": generation.drafted,
        "finish_reason": generation.finish_reason,
        "block": block,
    }


def estimate_s(plan: Plan) -> float:
    """Seconds the plan would take if every answer used its whole budget and every arm were as slow as the slowest.

    Measured: the first block of every group is decoded for a few tokens, once to warm up and once by the clock.
    """
    lab, total = Lab(plan.request), 0.0
    lab.load(plan)
    for group in plan.groups:
        suite = plan.suite(group.suite)
        items = [suite.items[i] for i in group.blocks[0]]
        few = min(WARM_UP_TOKENS, suite.max_new_tokens)
        for cell in map(plan.cell, group.cells):
            for _ in range(2):
                prompts = [i.prompt_ids for i in items]
                timing = lab.decode(cell, prompts, few, items=group.blocks[0], fixed_length=True)[1]
            before_s = timing.prefill_s or 0.0
            total += sum(group.rounds) * (before_s + (timing.wall_s - before_s) * suite.max_new_tokens / few)
    return total

"""A cell's stored lines, and the sums over them that count. What an outside engine hides is None in every sum.

A block × round counts only if every arm of the group has a clean line for it; per block the mean over its valid rounds
is taken.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mtbench import statistics
from mtbench.runs.directory import Record, RunDirectory
from mtbench.runs.plan import Cell, Plan
from mtbench.statistics import Totals


@dataclass(eq=False)
class Measured:
    """One cell's lines, and the samples of them that count."""

    cell: Cell
    lines: dict[str, Record]  # by item
    timings: list[Record]
    valid: set[tuple[int, int]]  # (round, block) clean for every arm of the group
    scores: Mapping[str, float]
    error: str | None

    @cached_property
    def samples(self) -> list[Record]:
        """The timing lines that count, ordered by block."""
        kept = [t for t in self.timings if (t["round"], t["block"]) in self.valid]
        return sorted(kept, key=lambda t: (t["block"], t["round"]))

    def by_block(self, name: str) -> npt.NDArray[np.float64]:
        """A quantity that no engine hides, per block, (K,)."""
        return statistics.mean_by([t["block"] for t in self.samples], [t[name] for t in self.samples])

    def total(self, name: str) -> float | None:
        """A quantity over all blocks; None without a sample, or where it is hidden, or not stored as in older lines."""
        if not self.samples or any(t.get(name) is None for t in self.samples):
            return None
        return float(self.by_block(name).sum())

    def by_round(self, name: str) -> list[float]:
        """A quantity per round over the blocks that every round has."""
        rounds = sorted({t["round"] for t in self.samples})
        shared = (
            set.intersection(*({t["block"] for t in self.samples if t["round"] == r} for r in rounds))
            if rounds
            else set()
        )
        return [sum(t[name] for t in self.samples if t["round"] == r and t["block"] in shared) for r in rounds]

    def counted(self, name: str) -> int | None:
        """A quantity over all answers; None where it is hidden, or not stored as in older lines."""
        return add(line.get(name) for line in self.lines.values())

    @cached_property
    def totals(self) -> Totals | None:
        """What the arm did on the blocks; None without a sample, or where a part of it is hidden."""
        names = ("tokens", "row_forwards", "batch_forwards", "device_s", "decode_s", "wall_s")
        total = {name: self.total(name) for name in names}
        if None in total.values():
            return None
        slots = [t["rows"] * t["batch_forwards"] for t in self.samples]
        row_slots = float(statistics.mean_by([t["block"] for t in self.samples], slots).sum())
        return Totals(row_slots=row_slots, **total)  # type: ignore[arg-type]

    @property
    def repeated(self) -> tuple[int, int]:
        """Of the requests run again in later rounds, those with round 1's tokens, and all."""
        again = [t for t in self.timings if t["identical"] is not None]
        return sum(t["identical"] for t in again), sum(served(t) for t in again)


def add(counts: Iterable[int | None]) -> int | None:
    """Their sum; None if one of them is hidden."""
    known = list(counts)
    return None if None in known else sum(filter(None, known))


def served(timing: Mapping[str, Any]) -> int:
    """Requests of a timing line; where nothing is refilled, older lines only count the rows."""
    return int(timing.get("items", timing["rows"]))


def read(run: RunDirectory, plan: Plan) -> dict[str, Measured]:
    """Every cell of the plan with what is stored of it."""
    errors = {f["cell"]: f["error"] for f in run.lines("failures.jsonl")}
    scores = run.read_json("scores.json") if run.has("scores.json") else {}
    measured = {}
    for group in plan.groups:
        order = {item.item: number for number, item in enumerate(plan.suite(group.suite).items)}
        timings = {name: run.lines(f"timings/{name}.jsonl") for name in group.cells}
        live = [name for name in group.cells if name not in errors]
        clean = [{(t["round"], t["block"]) for t in timings[name] if not t["dropped"]} for name in live]
        valid = set.intersection(*clean) if clean else set()
        for name in group.cells:
            stored = sorted(run.lines(f"generations/{name}.jsonl"), key=lambda g: order[g["item"]])
            lines = {g["item"]: g for g in stored}
            measured[name] = Measured(
                plan.cell(name), lines, timings[name], valid, scores.get(name, {}), errors.get(name)
            )
    return measured

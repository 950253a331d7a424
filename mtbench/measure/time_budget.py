"""What fits in a time budget: starts of servers, blocks of a decision, judging.

A decision needs MIN_BLOCKS blocks at each batch size. All arms count with the time of plain decoding's blocks.
"""

import math
import platform
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import RootModel

from mtbench.decoding.arms import is_served
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.formatting import counted, duration
from mtbench.errors import UserError
from mtbench.files import cache_home, write_json
from mtbench.plan.plan import MIN_BLOCKS, Cell, Group, Plan
from mtbench.records import StoredSeconds, read_json

JUDGED_SHARE = 0.1  # of a time budget, that is kept for re-scoring
MARGIN = 1.2  # that a decision needs beside the expected time
FEWEST_ARMS = 2  # of a decision: plain decoding and one more


class Part(NamedTuple):
    """What the cells of a group have yet to do."""

    starts_s: Sequence[float]  # of each cell's server; 0: it runs already, or there is none
    blocks: int
    needed: int  # of these, for a decision
    guessed: bool = False  # the time of a start was never measured here


class Starts(RootModel[dict[str, StoredSeconds]]):
    """A file of the cache: the time of the last start, by release, machine and checkpoint."""


def _starts_file() -> Path:
    return cache_home() / "engines" / "starts.json"


def _known_starts() -> dict[str, float]:
    with suppress(UserError):
        return read_json(_starts_file(), Starts).root
    return {}


def _key(cell: Cell) -> str:
    return f"{SERVING_ENGINES[str(cell.engine)].release()} on {platform.node()}: {cell.checkpoints[cell.on]}"


def remember_start(cell: Cell, seconds: float) -> None:
    """Store the time of the start of a cell's server, for the next command. A full disk does no harm."""
    with suppress(UserError):
        write_json(_starts_file(), _known_starts() | {_key(cell): seconds})


def part_of(group: Group, cells: Sequence[Cell], done: int = 0, started: Container[str] = ()) -> Part:
    """Return what these cells of a group have yet to do. done: blocks that have ended. started: cells with a server."""
    known, blocks = _known_starts(), sum(group.rounds) - done
    keys = {cell.cell: _key(cell) for cell in cells if is_served(cell.engine) and cell.cell not in started}
    return Part(
        starts_s=[
            known.get(keys[cell.cell], SERVING_ENGINES[str(cell.engine)].start_s) if cell.cell in keys else 0.0
            for cell in cells
        ],
        blocks=blocks,
        needed=min(blocks, max(1, MIN_BLOCKS - done)),
        guessed=not known.keys() >= {*keys.values()},
    )


def needs_s(parts: Sequence[Part], block_s: float | None, arms: int | None = None) -> float:
    """Return the time in which each part has a decision among its first `arms` cells; None: all. Times vary."""
    block_s = block_s or 0.0
    return MARGIN * sum(sum(part.starts_s[:arms]) + len(part.starts_s[:arms]) * part.needed * block_s for part in parts)


def fitting(left_s: float, parts: Sequence[Part], block_s: float | None) -> int:
    """Return the most arms with which each part gets a decision; 0 if it has no room for FEWEST_ARMS, or all."""
    most = max(len(part.starts_s) for part in parts)
    return next((n for n in range(most, min(most, FEWEST_ARMS) - 1, -1) if needs_s(parts, block_s, n) <= left_s), 0)


def blocks_within(rest_s: float, parts: Sequence[Part], block_s: float) -> int:
    """Return how many blocks of each part fit in the time that is left beside all starts."""
    all_s = block_s * sum(len(part.starts_s) for part in parts)
    return max(0, min(int(rest_s / max(all_s, 1e-9)), *(part.blocks for part in parts)))


class TimeBudget:
    """The time budget of a call, which begins now. `seconds`: None: there is none. `judged`: it covers judging, too."""

    def __init__(self, seconds: float | None, *, judged: bool = True, block_s: float | None = None) -> None:
        self.seconds, self.judged = seconds, judged
        self.judging_s = JUDGED_SHARE * seconds if seconds is not None and judged else 0.0
        self.deadline = time.monotonic() + (float("inf") if seconds is None else seconds)
        self.until = self.deadline - self.judging_s  # no block begins later
        self.block_s = block_s  # of plain decoding; None: not known yet

    @property
    def left_s(self) -> float:
        """The time for starts and blocks."""
        return self.until - time.monotonic()

    def refuse_too_short(self, parts: Sequence[Part]) -> None:
        """Raise UserError if the starts for a decision at the first batch size are known to take longer."""
        first = parts[:1]
        if not first[0].guessed and not fitting(self.left_s, first, self.block_s):
            enough = self._minutes(first, FEWEST_ARMS)
            raise UserError(f"{self.described(parts)}; give `--time-budget {enough}m` at least.")

    def room(self, parts: Sequence[Part]) -> tuple[int, str]:
        """Return with how many arms each part gets a decision, or 0; unless with all, what all need, in words."""
        arms, most = fitting(self.left_s, parts, self.block_s), max(len(part.starts_s) for part in parts)
        if arms == most:
            return arms, ""
        some, enough = arms or f"fewer than {FEWEST_ARMS}", self._minutes(parts)
        return arms, f"the time budget has room for {some} of {most} arms; all need `--time-budget {enough}m`"

    def described(self, parts: Sequence[Part]) -> str:
        """Return in words how long starts take, how many blocks there is time for, and how many a decision needs."""
        all_s = [start_s for part in parts for start_s in part.starts_s if start_s]
        guess = " (a guess: none was measured here)" if any(part.guessed for part in parts) else ""
        takes = f"{'takes' if len(all_s) == 1 else 'take'} about {duration(sum(all_s))}{guess}"
        starts = f"{counted(len(all_s), 'server start')} {takes}" if all_s else "no start"
        needed = (
            f"a decision needs {max(part.needed for part in parts)}{' at each batch size' if len(parts) > 1 else ''}"
        )
        if self.seconds is None:
            blocks = counted(sum(part.blocks for part in parts), "block")
            whole_s = needs_s(parts, self.block_s) / (1 - JUDGED_SHARE)
            in_all = "" if self.block_s is None else f", about {duration(whole_s)} in all"
            return f"{starts}; at most {blocks}, and {needed}{in_all}"
        rest_s = max(0.0, self.left_s - sum(all_s))
        fit = f"{duration(rest_s)} are left for blocks"
        if self.block_s is not None:
            n = blocks_within(rest_s, parts, self.block_s)
            fit = f"{counted(n, 'block')} {'fits' if n == 1 else 'fit'} in the rest"
        judging = f", judging {duration(self.judging_s)}" if self.judging_s else ""
        return f"time budget {duration(self.seconds)}: {starts}{judging}; {fit}, and {needed}"

    def _minutes(self, parts: Sequence[Part], arms: int | None = None) -> int:
        """Return the budget in which each part gets a decision. Until the time of blocks is known: all starts."""
        used_s = (self.seconds or 0.0) - self.judging_s - self.left_s
        return math.ceil((used_s + needs_s(parts, self.block_s, arms)) / (1 - JUDGED_SHARE) / 60)


def outlook(plan: Plan, block_s: float | None, budget_s: float | None) -> str:
    """Return whether the servers of a plan have time for a decision. block_s: of plain decoding; None: not known."""
    parts = [part_of(group, [plan.cell(name) for name in group.cells]) for group in plan.groups]
    budget = TimeBudget(budget_s, block_s=block_s)
    return "; ".join(filter(None, (budget.described(parts), budget.room(parts)[1])))

"""What fits in a time budget: starts of servers, blocks of a decision, judging.

A decision needs MIN_BLOCKS blocks at each batch size. All arms count with the time of plain decoding's blocks.
"""

import math
import platform
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    measured: bool = True  # the starts are as long as the last ones here; False: a guess
    engines: Sequence[str] = ()  # titles of those that start


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
    begin = [cell for cell in cells if is_served(cell.engine) and cell.cell not in started]
    known, engines = _known_starts(), {cell.cell: SERVING_ENGINES[str(cell.engine)] for cell in begin}
    took_s = {cell.cell: known.get(_key(cell), engines[cell.cell].start_s) for cell in begin}
    blocks = sum(group.rounds) - done
    return Part(
        starts_s=[took_s.get(cell.cell, 0.0) for cell in cells],
        blocks=blocks,
        needed=min(blocks, max(1, MIN_BLOCKS - done)),
        measured=all(_key(cell) in known for cell in begin),
        engines=[engine.title for engine in engines.values()],
    )


def starting_s(parts: Sequence[Part]) -> float:
    """Return the time of all starts."""
    return sum(sum(part.starts_s) for part in parts)


def needs_s(parts: Sequence[Part], block_s: float, arms: int | None = None) -> float:
    """Return the time in which each part has a decision among its first `arms` cells; None: all. Times vary."""
    return MARGIN * sum(sum(part.starts_s[:arms]) + len(part.starts_s[:arms]) * part.needed * block_s for part in parts)


def fitting(left_s: float, parts: Sequence[Part], block_s: float) -> int:
    """Return the most arms with which each part gets a decision; 0 if it has no room for FEWEST_ARMS."""
    most = max((len(part.starts_s) for part in parts), default=0)
    return next((n for n in range(most, FEWEST_ARMS - 1, -1) if needs_s(parts, block_s, n) <= left_s), 0)


def blocks_within(left_s: float, parts: Sequence[Part], block_s: float) -> int:
    """Return how many blocks of each part fit beside its starts."""
    rest_s, all_s = left_s - starting_s(parts), block_s * sum(len(part.starts_s) for part in parts)
    return max(0, min([int(rest_s / max(all_s, 1e-9)), *(part.blocks for part in parts)]))


def starts(parts: Sequence[Part]) -> str:
    """Return in words how many servers start, and how long that takes."""
    titles = [title for part in parts for title in part.engines]
    guess = "" if all(part.measured for part in parts) else " (a guess: none was measured here)"
    takes = f"{'takes' if len(titles) == 1 else 'take'} about {duration(starting_s(parts))}{guess}"
    return f"{counted(len(titles), 'start')} of {' and '.join(dict.fromkeys(titles))} {takes}" if titles else "no start"


def decision_needs(parts: Sequence[Part]) -> str:
    """Return in words how many blocks a decision needs."""
    each = " at each batch size" if len(parts) > 1 else ""
    return f"a decision needs {max(part.needed for part in parts)}{each}"


def outlook(plan: Plan, block_s: float | None, budget_s: float | None) -> str:
    """Return whether the servers of a plan have time for a decision. block_s: of plain decoding; None: not known."""
    parts = [part_of(group, [plan.cell(name) for name in group.cells]) for group in plan.groups]
    if budget_s is not None:
        judging_s = JUDGED_SHARE * budget_s
        budget = TimeBudget(budget_s, judging_s, time.monotonic() + budget_s - judging_s, block_s)
        return "; ".join(filter(None, (budget.described(parts), budget.room(parts)[1])))
    takes = "" if block_s is None else f", about {duration(needs_s(parts, block_s) / (1 - JUDGED_SHARE))} in all"
    blocks = counted(sum(part.blocks for part in parts), "block")
    return f"{starts(parts)}; at most {blocks}, and {decision_needs(parts)}{takes}"


@dataclass
class TimeBudget:
    """The time budget of one call."""

    seconds: float
    judging_s: float
    until: float  # by time.monotonic: no block begins later
    block_s: float | None = None  # of plain decoding; None: not known yet

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def minutes(self, parts: Sequence[Part], arms: int | None = None) -> int:
        """Return the budget in which each part gets a decision. Until the time of blocks is known: all starts."""
        used_s = self.seconds - self.judging_s - self.left_s
        return math.ceil((used_s + needs_s(parts, self.block_s or 0.0, arms)) / (1 - JUDGED_SHARE) / 60)

    def room(self, parts: Sequence[Part]) -> tuple[int, str]:
        """Return with how many arms each part gets a decision, or 0; unless with all, what all need, in words."""
        arms, most = fitting(self.left_s, parts, self.block_s or 0.0), max(len(part.starts_s) for part in parts)
        some = arms or f"fewer than {FEWEST_ARMS}"
        needs = f"the time budget has room for {some} of {most} arms; all need `--time-budget {self.minutes(parts)}m`"
        return arms, "" if arms == most else needs

    def described(self, parts: Sequence[Part]) -> str:
        """Return in a sentence what it has room for."""
        judging = f", judging {duration(self.judging_s)}" if self.judging_s else ""
        room = f"{duration(max(0.0, self.left_s - starting_s(parts)))} are left for blocks"
        if self.block_s is not None:
            blocks = blocks_within(self.left_s, parts, self.block_s)
            room = f"{counted(blocks, 'block')} {'fits' if blocks == 1 else 'fit'} in the rest"
        return f"time budget {duration(self.seconds)}: {starts(parts)}{judging}; {room}, and {decision_needs(parts)}"

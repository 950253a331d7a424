"""What fits in a time budget: starts of servers, blocks of a decision, judging, scores and page.

A decision needs MIN_BLOCKS blocks of each arm at each batch size. A block takes the median of those seen.
"""

import math
import platform
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from pydantic import RootModel

from mtbench.clients.serving_engine import ServingEngine
from mtbench.decoding.arms import is_served
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.formatting import counted, duration
from mtbench.errors import UserError
from mtbench.files import cache_home, write_json
from mtbench.options.engine_options import with_options
from mtbench.plan.plan import MIN_BLOCKS, Cell, Group, Plan
from mtbench.records import StoredSeconds, read_json

JUDGED_SHARE = 0.1  # of a time budget, that is kept for re-scoring
FINISH_SHARE, MOST_FINISH_S = 0.05, 15.0  # of a time budget, that scores and page take
LEAST_JUDGING_S = 1.0
EXPECTED_EVERY = 0.02  # of a time budget, after which the time of judging is computed again
MARGIN = 1.2  # that a decision needs beside the expected time
FEWEST_ARMS = 2  # of a decision: plain decoding and one more


class Part(NamedTuple):
    """What the cells of a group have yet to do. They decode the same blocks, side by side."""

    starts_s: Sequence[float]  # of each cell's server, or of its warm-up; 0: it has started
    needed: Sequence[int]  # blocks of each cell, for a decision
    blocks: int  # that are planned
    block_s: Sequence[float] = ()  # of each cell; empty: not known
    served: bool = False  # servers start
    guessed: bool = False  # the time of a start was never measured here

    def needs_s(self, arms: int | None = None) -> float:
        """Return the expected time of a decision among the first `arms` cells; None: all."""
        return sum(self.starts_s[:arms]) + max(self.needed[:arms], default=0) * sum(self.block_s[:arms])


class Starts(RootModel[dict[str, StoredSeconds]]):
    """A file of the cache: the time of the last start, by release, machine, device, checkpoint and server's options."""


def _starts_file() -> Path:
    return cache_home() / "engines" / "starts.json"


def _known_starts() -> dict[str, float]:
    with suppress(UserError):
        return read_json(_starts_file(), Starts).root
    return {}


def _key(cell: Cell) -> str:
    where = f"{platform.node()}{'' if cell.gpu_bytes is None else ', GPU'}"
    served = with_options(cell.checkpoints[cell.on], cell.engine_options)
    return f"{SERVING_ENGINES[str(cell.engine)].release()} on {where}: {served}"


def remember_start(cell: Cell, seconds: float) -> None:
    """Store the time of the start of a cell's server, for the next command. A full disk does no harm."""
    with suppress(UserError):
        write_json(_starts_file(), _known_starts() | {_key(cell): seconds})


def part_of(
    group: Group,
    cells: Sequence[Cell],
    block_s: Sequence[float] = (),
    *,
    ended: Mapping[str, int] = MappingProxyType({}),
    started: Container[str] = (),
    warm_up_s: float = 0.0,
) -> Part:
    """Return what these cells of a group have yet to do.

    block_s: time of a block of each cell; empty: not known. ended: blocks that each cell has decoded. started: cells
    with a server, or warm. warm_up_s: of a cell without a server.
    """
    known, blocks = _known_starts(), sum(group.rounds) - max(ended.values(), default=0)
    keys = {cell.cell: _key(cell) for cell in cells if is_served(cell.engine) and cell.cell not in started}

    def start_s(cell: Cell) -> float:
        if cell.cell in keys:
            engine: ServingEngine = SERVING_ENGINES[str(cell.engine)]()
            usual_s = engine.usual_start_s(cell.engine_options, gpu=cell.gpu_bytes is not None)
            return known.get(keys[cell.cell], usual_s)
        return 0.0 if cell.cell in started else warm_up_s

    return Part(
        starts_s=[*map(start_s, cells)],
        needed=[min(blocks, max(0, MIN_BLOCKS - ended.get(cell.cell, 0))) for cell in cells],
        blocks=blocks,
        block_s=block_s,
        served=bool(keys),
        guessed=not known.keys() >= {*keys.values()},
    )


def needs_s(parts: Sequence[Part], arms: int | None = None) -> float:
    """Return the time in which each part has a decision among its first `arms` cells; None: all. Times vary."""
    return MARGIN * sum(part.needs_s(arms) for part in parts)


def fitting(left_s: float, parts: Sequence[Part]) -> int:
    """Return the most arms with which each part gets a decision; 0 if it has no room for FEWEST_ARMS, or all."""
    most = max(len(part.starts_s) for part in parts)
    return next((n for n in range(most, min(most, FEWEST_ARMS) - 1, -1) if needs_s(parts, n) <= left_s), 0)


def blocks_within(rest_s: float, parts: Sequence[Part]) -> int:
    """Return how many blocks of each part fit in the time that is left beside all starts."""
    all_s = sum(sum(part.block_s) for part in parts)
    return max(0, min(int(rest_s / max(all_s, 1e-9)), *(part.blocks for part in parts)))


class TimeBudget:
    """The time budget of a call. `seconds`: None: there is none. `judged`: it covers judging, scores and page, too.

    `began`: by time.monotonic; None: now.
    """

    def __init__(self, seconds: float | None, *, judged: bool = True, began: float | None = None) -> None:
        self.seconds, self.judged = seconds, judged
        self.deadline = float("inf") if seconds is None else (time.monotonic() if began is None else began) + seconds
        covered_s = seconds if seconds is not None and judged else 0.0
        self.judging_s = JUDGED_SHARE * covered_s  # a first guess
        self._expected_at = time.monotonic()
        self.finish_s = min(FINISH_SHARE * covered_s, MOST_FINISH_S)

    @property
    def until(self) -> float:
        """The time at which the last block has ended, by time.monotonic."""
        return self.deadline - self.judging_s - self.finish_s

    @property
    def left_s(self) -> float:
        """The time for starts and blocks."""
        return self.until - time.monotonic()

    def expect_judging(self, seconds: Callable[[], float]) -> None:
        """Compute the time of judging again, now and then: it takes long for many answers."""
        if self.judging_s and self.seconds and time.monotonic() - self._expected_at > EXPECTED_EVERY * self.seconds:
            self._expected_at, self.judging_s = time.monotonic(), max(LEAST_JUDGING_S, seconds())

    def refuse_too_short(self, parts: Sequence[Part]) -> None:
        """Raise UserError if the starts for a decision at the first batch size are known to take longer."""
        first = parts[:1]
        if not first[0].guessed and not fitting(self.left_s, first):
            enough = self.minutes(first, FEWEST_ARMS)
            raise UserError(f"{self.described(parts)}; give `--time-budget {enough}m` at least.")

    def outlook(self, parts: Sequence[Part]) -> str:
        """Return `described`, and if some arms get no decision, for how many there is time."""
        arms, most = fitting(self.left_s, parts), max(len(part.starts_s) for part in parts)
        if arms == most:
            return self.described(parts)
        return f"{self.described(parts)}; {self.too_short(arms or f'fewer than {FEWEST_ARMS}', most, parts)}"

    def too_short(self, arms: int | str, most: int, parts: Sequence[Part]) -> str:
        """Return for how many arms the time suffices, and what all need."""
        return f"the time budget has room for {arms} of {most} arms; all need `--time-budget {self.minutes(parts)}m`"

    def described(self, parts: Sequence[Part]) -> str:
        """Return in words how long starts take, how many blocks there is time for, and how many a decision needs."""
        all_s = [start_s for part in parts for start_s in part.starts_s if start_s]
        guess = " (a guess: none was measured here)" if any(part.guessed for part in parts) else ""
        what = counted(len(all_s), "server start" if any(part.served for part in parts) else "warm-up")
        takes = f"{'takes' if len(all_s) == 1 else 'take'} about {duration(sum(all_s))}{guess}"
        starts = f"{what} {takes}; " if all_s else ""
        each = " at each batch size" if len(parts) > 1 else ""
        needed = f"a decision needs {max(max(part.needed) for part in parts)}{each}"
        known = all(part.block_s for part in parts)
        if self.seconds is None:
            blocks = counted(sum(part.blocks for part in parts), "block")
            in_all = f", about {duration(needs_s(parts) / (1 - JUDGED_SHARE))} in all" if known else ""
            return f"{starts}at most {blocks}, and {needed}{in_all}"
        rest_s = max(0.0, self.left_s - sum(all_s))
        fit = f"{duration(rest_s)} are left for blocks"
        if known:
            n = blocks_within(rest_s, parts)
            fit = f"{counted(n, 'block')} {'fits' if n == 1 else 'fit'} in the rest"
        judging = f"judging {duration(self.judging_s)}; " if self.judging_s else ""
        return f"time budget {duration(self.seconds)}: {starts}{judging}{fit}, and {needed}"

    def minutes(self, parts: Sequence[Part], arms: int | None = None) -> int:
        """Return the budget in which each part gets a decision. Until the time of blocks is known: all starts."""
        used_s = (self.seconds or 0.0) - self.judging_s - self.finish_s - self.left_s
        return math.ceil((used_s + needs_s(parts, arms)) / (1 - JUDGED_SHARE - FINISH_SHARE) / 60)


def outlook(plan: Plan, block_s: float | None, budget_s: float | None) -> str:
    """Return whether the servers of a plan have time for a decision. block_s: of plain decoding; None: not known."""
    each = () if block_s is None else (block_s,)
    parts = [part_of(group, [*map(plan.cell, group.cells)], each * len(group.cells)) for group in plan.groups]
    return TimeBudget(budget_s).outlook(parts)

"""Time several arms in one process: in every block of prompts they run one after another, in random order.

The rules are those of `mtbench run`. If one arm's batch is contaminated (mtbench/hardware/machine.py) or included
preparation, its block and round are dropped for all arms.
"""

import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

from mtbench.decoding.output import Generation, Timing
from mtbench.hardware import machine
from mtbench.measure.model_pool import ModelPool
from mtbench.plan.directory import JsonObject
from mtbench.plan.formats import GenerationLine, SessionRecord, TimingLine
from mtbench.plan.lines import generation_line, timing_line
from mtbench.plan.plan import Cell, Plan
from mtbench.records import dump
from mtbench.results import speed_factors, verdicts
from mtbench.results.roofline import fraction
from mtbench.results.samples import CellData
from mtbench.statistics import Ratio, ratio_of_totals

WARM_UPS = 6  # at most; when one arm reallocates shared memory, others must prepare again
LEFT_OUT = ("step_s", "identical")  # fields of a timing line that are not reported


@dataclasses.dataclass(frozen=True)
class Race:
    """The measurements, by arm, in the plan's order."""

    arms: dict[str, CellData]
    preparation_s: dict[str, float]  # seconds of the first calls beyond those of a warm call
    session: JsonObject  # as environment.json has it

    def ratio(self, arm: str, baseline: str, clock: str) -> Ratio:
        """Return the baseline's time over the arm's, by `decode_s` or `wall_s`."""
        return ratio_of_totals([self.arms[baseline].by_block(clock)], [self.arms[arm].by_block(clock)])

    def rate(self, arm: str, what: str, clock: str) -> Ratio:
        """Return the counter `what` per second of `clock`."""
        return ratio_of_totals([self.arms[arm].by_block(what)], [self.arms[arm].by_block(clock)])

    def doubt(self) -> str | None:
        """Return why the times cannot be compared, or None."""
        measured = list(self.arms.values())
        used, ran = len(measured[0].valid), len({(t.round, t.block) for t in measured[0].timings})
        if dropped := verdicts.too_many_dropped(used=used, dropped=ran - used):
            return dropped
        for arm in measured:
            if short := verdicts.too_short([t.wall_s for t in arm.samples], self.session["synchronisation_s"]):
                return short.text
        return None

    def dropped(self) -> Counter[str]:
        """Return the number of contaminated batches by reason; batches dropped because of them do not count."""
        return Counter(t.dropped for one in self.arms.values() for t in one.timings if t.dropped)

    def figures(self, arm: str) -> JsonObject:
        """Return the figures of one arm."""
        measured = self.arms[arm]
        cell, totals = measured.cell, measured.totals
        judged = 1 if cell.engine is None else cell.built.window().guesses + 1
        sessions = [SessionRecord(**self.session)]
        roofline, reason = fraction(cell, judged, measured.lines.values(), measured.samples, sessions)
        busy = self.rate(arm, "device_s", "decode_s").value
        step_s = self.rate(arm, "decode_s", "batch_forwards").value
        parts = speed_factors.parts(totals) if totals else None
        return {
            "batch_size": cell.batch_size,
            "batching": cell.batching,
            "simulated": cell.simulated,
            "blocks": len({t.block for t in measured.samples}),
            "tokens_per_s": {
                "decode": self.rate(arm, "tokens", "decode_s")._asdict(),
                "wall": self.rate(arm, "tokens", "wall_s")._asdict(),
            },
            "tokens_per_forward": self.rate(arm, "tokens", "row_forwards").value,
            "step_ms": None if step_s is None else 1000 * step_s,
            "host_gap": None if busy is None else 1 - busy,
            "parts": None if parts is None else parts._asdict(),
            "roofline_fraction": roofline,
            "roofline_reason": reason,
            "prefill_s": measured.total("prefill_s"),
            "preparation_s": self.preparation_s[arm],
            "samples": [{k: v for k, v in dump(t).items() if k not in LEFT_OUT} for t in measured.timings],
        }


def race(
    pool: ModelPool,
    plan: Plan,
    session: JsonObject,
    deadline: float,
    *,
    seconds: float = 0.0,
    warm_tokens: int = 16,
) -> Race:
    """Run all arms of a plan with one group: every block once, then again until `seconds` are over.

    A block starts only if it would end before `deadline` (time.monotonic) when it takes as long as the longest so far.
    Raises RuntimeError if forward passes were miscounted, or an engine does not run the layers by its own decoder.
    """
    [group], [suite] = plan.groups, plan.suites
    cells = [plan.cell(name) for name in group.cells]
    for cell in cells:
        _check_decoders(pool, cell)
    chosen = group.blocks
    decode = partial(_decode, pool, plan)
    preparation_s = _warm_up(decode, cells, chosen[0], min(warm_tokens, suite.max_new_tokens), deadline)

    timings: dict[str, list[TimingLine]] = {cell.arm: [] for cell in cells}
    lines: dict[str, dict[str, GenerationLine]] = {cell.arm: {} for cell in cells}
    shuffler, ends, longest_s = random.Random(group.batch_size), time.monotonic() + seconds, 0.0
    for round_, block in ((r, b) for r in itertools.count(1) for b in range(len(chosen))):
        started_at = time.monotonic()
        if started_at + longest_s > deadline or (round_ > 1 and started_at > ends):
            break
        for order, cell in enumerate(shuffler.sample(cells, len(cells))):
            before = machine.sample(pool.device)
            generations, timing = decode(cell, chosen[block], suite.max_new_tokens)
            window = machine.window(before, machine.sample(pool.device))
            timings[cell.arm].append(timing_line(1, round_, block, order, timing, window, None))
            for i, generation in zip(chosen[block], generations, strict=True):
                item = suite.items[i]
                line = generation_line(item.item, item.prompt_ids, generation, block, public=True)
                lines[cell.arm].setdefault(item.item, line)
        longest_s = max(longest_s, time.monotonic() - started_at)
    clean = ({(t.round, t.block) for t in of_arm if not t.dropped} for of_arm in timings.values())
    valid = set.intersection(*clean)
    units = {block: block for block in range(len(chosen))}
    arms = {
        c.arm: CellData(
            cell=c,
            lines=lines[c.arm],
            timings=timings[c.arm],
            valid=valid,
            repeated_blocks=len(units),
            unit_of=units,
            timed_unit_of=units,
            scores={},
            error=None,
        )
        for c in cells
    }
    return Race(arms=arms, preparation_s=preparation_s, session=session)


def _check_decoders(pool: ModelPool, cell: Cell) -> None:
    """Raise RuntimeError if an engine with its own decoder runs transformers' modules instead."""
    if cell.engine in (None, "eager"):
        return
    for role, runner in pool.runners_of(cell).items():
        if runner.decoder is None:
            raise RuntimeError(f"{cell.arm}: transformers' modules run the {role} checkpoint, not our decoder")


def _decode(
    pool: ModelPool, plan: Plan, cell: Cell, block: Sequence[int], budget: int
) -> tuple[list[Generation], Timing]:
    """Decode a block of prompts. Raises RuntimeError if forward passes were miscounted."""
    [suite] = plan.suites
    room = max(len(item.prompt_ids) for item in suite.items) + suite.max_new_tokens  # the same shapes in all blocks
    requests = plan.requests(suite, block, max_new_tokens=budget)
    generations, timing = pool.decode(cell, requests, room=room)
    if timing.miscounted:
        raise RuntimeError(f"{cell.arm}: {timing.miscounted} forward passes more than were counted")
    return generations, timing


def _warm_up(
    decode: Callable[..., tuple[list[Generation], Timing]],
    cells: Sequence[Cell],
    block: Sequence[int],
    budget: int,
    deadline: float,
) -> dict[str, float]:
    """Decode a block by every arm until nothing is prepared any more; return seconds beyond a warm call, by arm."""
    calls_s: dict[str, list[float]] = {cell.arm: [] for cell in cells}
    for call in range(WARM_UPS):
        preparing = call == 0
        for cell in reversed(cells):  # the widest window comes last in the plan; its memory suffices for the others
            if time.monotonic() < deadline:
                timing = decode(cell, block, budget)[1]
                calls_s[cell.arm].append(timing.wall_s)
                preparing |= timing.preparation_s > 0
        if not preparing:
            break
    return {arm: sum(max(0.0, wall_s - calls[-1]) for wall_s in calls) for arm, calls in calls_s.items()}

"""Arms next to each other: inside every block of prompts, in random order, in one process, by the rules of a run.

A contaminated batch (mtbench/hardware/machine.py), or one into which preparation fell, costs its block and round for
all arms.
"""

import dataclasses
import itertools
import random
import time
from collections import Counter
from collections.abc import Sequence

from mtbench import statistics
from mtbench.decoding.output import Generation, Timing
from mtbench.hardware import machine
from mtbench.results.roofline import fraction
from mtbench.results.samples import Measured
from mtbench.runs.directory import Record
from mtbench.runs.model_pool import ModelPool, method_of
from mtbench.runs.plan import Cell, Plan
from mtbench.runs.requests import requests_of
from mtbench.statistics import Ratio, ratio_of_totals

WARM_UPS = 6  # an arm that moves shared memory makes another prepare once more
PREPARED = "preparation fell into it"


@dataclasses.dataclass(frozen=True)
class Race:
    """What came of it, by arm, in the plan's order."""

    arms: dict[str, Measured]
    preparation_s: dict[str, float]  # what the first calls took beyond warm ones
    session: Record  # as environment.json has it

    def ratio(self, arm: str, baseline: str, clock: str) -> Ratio:
        """How much less time the arm takes than the baseline, by `decode_s` or `wall_s`."""
        return ratio_of_totals([self.arms[baseline].by_block(clock)], [self.arms[arm].by_block(clock)])

    def rate(self, arm: str, what: str, clock: str) -> Ratio:
        """How much of something per second; of `device_s` the share of the time."""
        return ratio_of_totals([self.arms[arm].by_block(what)], [self.arms[arm].by_block(clock)])

    def doubt(self) -> str | None:
        """Why the times prove nothing."""
        one = next(iter(self.arms.values()))
        used, ran = len(one.valid), len({(t["round"], t["block"]) for t in one.timings})
        windows = [[t["wall_s"] for t in arm.samples] for arm in self.arms.values()]
        short = (statistics.too_short(seconds, self.session["synchronisation_s"]) for seconds in windows)
        return statistics.too_many_dropped(used=used, dropped=ran - used) or next(filter(None, short), None)

    def dropped(self) -> Counter[str]:
        """Batches that were left out, by reason; the others of their block and round are left out with them."""
        return Counter(t["dropped"] for one in self.arms.values() for t in one.timings if t["dropped"])

    def figures(self, arm: str) -> Record:
        """One arm by itself."""
        one = self.arms[arm]
        cell, totals = one.cell, one.totals
        judged = 1 if cell.engine is None else method_of(cell).window().guesses + 1
        near, reason = fraction(cell, judged, one.lines.values(), one.samples, [self.session])
        busy = self.rate(arm, "device_s", "decode_s").value
        step_s = self.rate(arm, "decode_s", "batch_forwards").value
        parts = totals and statistics.parts(totals)
        return {
            "batch_size": cell.batch_size,
            "batching": cell.batching,
            "simulated": cell.simulated,
            "blocks": len({t["block"] for t in one.samples}),
            "tokens_per_s": {
                "decode": self.rate(arm, "tokens", "decode_s")._asdict(),
                "wall": self.rate(arm, "tokens", "wall_s")._asdict(),
            },
            "tokens_per_forward": self.rate(arm, "tokens", "row_forwards").value,
            "step_ms": step_s and 1000 * step_s,
            "host_gap": None if busy is None else 1 - busy,
            "parts": parts and parts._asdict(),
            "roofline_fraction": near,
            "roofline_reason": reason,
            "prefill_s": one.total("prefill_s"),
            "preparation_s": self.preparation_s[arm],
            "samples": [{k: v for k, v in t.items() if k != "step_s"} for t in one.timings],
        }


def race(
    pool: ModelPool,
    plan: Plan,
    session: Record,
    deadline: float,
    *,
    blocks: int | None = None,
    seconds: float = 0.0,
    warm_tokens: int = 16,
) -> Race:
    """All arms of a plan of one group: every block once, and again for as long as `seconds` are not over.

    No block begins that would not end before `deadline` (time.monotonic) if it took as long as the longest before it.
    Raises RuntimeError if forwards were miscounted, or layers are not run as the engine is there to run them.
    """
    [group], [suite] = plan.groups, plan.suites
    cells = [plan.cell(name) for name in group.cells]
    for cell in cells:
        runners = pool.runners_of(cell) if cell.engine not in (None, "eager") else {}
        if plain := [role for role, runner in runners.items() if runner.decoder is None]:
            raise RuntimeError(
                f"{cell.arm}: the {plain[0]} checkpoint is run by transformers' modules, not our decoder"
            )
    room = max(len(item.prompt_ids) for item in suite.items) + suite.max_new_tokens  # shapes are the same everywhere
    chosen = group.blocks[:blocks]

    def run(cell: Cell, block: Sequence[int], budget: int) -> tuple[list[Generation], Timing]:
        requests = requests_of(plan, suite, block, max_new_tokens=budget)
        generations, timing = pool.decode(cell, requests, room=room)
        if timing.miscounted:
            raise RuntimeError(f"{cell.arm}: {timing.miscounted} forwards more than were counted")
        return generations, timing

    warm: dict[str, list[float]] = {cell.arm: [] for cell in cells}
    for call in range(WARM_UPS):
        preparing = call == 0
        for cell in reversed(cells):  # the widest window is named last; memory sized for it need not move again
            if time.monotonic() < deadline:
                timing = run(cell, chosen[0], min(warm_tokens, suite.max_new_tokens))[1]
                warm[cell.arm].append(timing.wall_s)
                preparing |= timing.preparation_s > 0
        if not preparing:
            break

    timings: dict[str, list[Record]] = {cell.arm: [] for cell in cells}
    lines: dict[str, dict[str, Record]] = {cell.arm: {} for cell in cells}
    chance, ends, longest_s = random.Random(group.batch_size), time.monotonic() + seconds, 0.0
    for round_, number in ((r, b) for r in itertools.count(1) for b in range(len(chosen))):
        began = time.monotonic()
        if began + longest_s > deadline or (round_ > 1 and began > ends):
            break
        for place, cell in enumerate(chance.sample(cells, len(cells))):
            before = machine.sample(pool.device)
            generations, timing = run(cell, chosen[number], suite.max_new_tokens)
            window = machine.window(before, machine.sample(pool.device))
            window["dropped"] = window["dropped"] or (PREPARED if timing.preparation_s else None)
            told = {"session": 1, "round": round_, "block": number, "order": place}
            timings[cell.arm].append({**told, **dataclasses.asdict(timing), **window})
            for i, generation in zip(chosen[number], generations, strict=True):
                item = suite.items[i]
                line = {"prompt_ids": item.prompt_ids, "forwards": generation.forwards, "block": number}
                lines[cell.arm].setdefault(item.item, {**line, **dataclasses.asdict(generation)})
        longest_s = max(longest_s, time.monotonic() - began)
    valid = set.intersection(
        *({(t["round"], t["block"]) for t in of_arm if not t["dropped"]} for of_arm in timings.values())
    )
    return Race(
        arms={c.arm: Measured(c, lines[c.arm], timings[c.arm], valid, {}, None) for c in cells},
        preparation_s={arm: sum(max(0.0, wall_s - calls[-1]) for wall_s in calls) for arm, calls in warm.items()},
        session=session,
    )

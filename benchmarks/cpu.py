"""How fast the loop is on a CPU: against transformers' `generate`, against its own forwards, and MARS against AR.

    python benchmarks/cpu.py [--blocks 24] [--rounds 3] [--only tiny|0.5b] [--json FILE]

All arms run next to each other inside every block of prompts, in random order, in one process. Ratios are ratios of
total wall-clock, with the t interval over blocks. On the embedded checkpoints the factor "forward time" is held against
an isolated probe: the same forwards (rows, width, slots in view) replayed without the loop around them. Random weights
of Qwen2.5-0.5B show the same for a model whose forwards are no trifle. The last line is all figures as JSON.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mtbench.decoding.host_sync import Shape
from mtbench.decoding.loop import Batch, decode
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.run_state import RunState
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import ModelRunner
from mtbench.runs.model_pool import ModelPool
from mtbench.runs.plan import Cell, Plan, RunRequest
from mtbench.runs.planner import make_plan
from mtbench.runs.requests import requests_of
from mtbench.statistics import Ratio, Totals, factors, ratio_of_totals

GENERATE = "hf-generate@ar"
AGAINST_GENERATE = ("hf-generate", "ar:engine=eager|graph")
MARS_AGAINST_AR = ("ar:on=mars,engine=eager|graph", "mars:tau=0.95,engine=eager|graph")
THREADS = torch.get_num_threads()
Outcome = tuple[list[Generation], Timing]
Found = dict[str, list[Outcome]]  # arm -> by round and block


class Recorded(Batch):
    """A batch that remembers the shape of every step."""

    def advance(self, run: RunState, shape: Shape) -> None:
        self.shapes: list[tuple[int, int]] = getattr(self, "shapes", [])
        self.shapes.append((shape.pending + self.windows[shape.variant].guesses, shape.view))
        super().advance(run, shape)


def measure(pool: ModelPool, plan: Plan, rounds: int, seed: int) -> Found:
    """Every arm on every block, in random order."""
    [group], [suite] = plan.groups, plan.suites
    cells = [plan.cell(name) for name in group.cells]
    found: Found = {cell.arm: [] for cell in cells}

    def run(cell: Cell, block: Sequence[int]) -> Outcome:
        return pool.decode(cell, requests_of(plan, suite, block))

    for cell in cells:
        run(cell, group.blocks[0])
    shuffler = random.Random(seed)
    for _ in range(rounds):
        for block in group.blocks:
            for cell in shuffler.sample(cells, len(cells)):
                found[cell.arm].append(run(cell, block))
    return found


def ratio(found: Found, baseline: str, arm: str, blocks: int) -> Ratio:
    """Wall of the baseline over that of the arm, means over rounds per block."""

    def by_block(name: str) -> list[float]:
        walls = [timing.wall_s for _, timing in found[name]]
        return [sum(walls[b::blocks]) / len(walls[b::blocks]) for b in range(blocks)]

    return ratio_of_totals([by_block(baseline)], [by_block(arm)])


def totals(outcomes: Sequence[Outcome]) -> Totals:
    timings = [timing for _, timing in outcomes]
    names = ("tokens", "row_forwards", "batch_forwards", "device_s", "decode_s", "wall_s")
    slots = sum(t.rows * (t.batch_forwards or 0) for t in timings)
    return Totals(row_slots=slots, **{name: sum(getattr(t, name) for t in timings) for name in names})


def overhead(outcomes: Sequence[Outcome]) -> float:
    """What the loop takes beyond its own forwards, as a share of them."""
    total = totals(outcomes)
    return total.decode_s / total.device_s - 1


def same_tokens(found: Found, arm: str) -> list[int]:
    """Answers on which an arm says what `generate` says, and how many there are."""
    pairs = [
        (a.token_ids, b.token_ids)
        for (mine, _), (theirs, _) in zip(found[arm], found[GENERATE], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return [sum(a == b for a, b in pairs), len(pairs)]


def probed_forward_time(pool: ModelPool, plan: Plan) -> float:
    """The factor "forward time" of MARS over AR from isolated forwards of the shapes that the loop had."""
    [group], [suite] = plan.groups, plan.suites
    arms = ("ar@mars/eager", "mars:tau=0.95@mars/eager")
    seconds, forwards = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
    for block in group.blocks:
        requests = requests_of(plan, suite, block)
        for cell in (c for c in plan.cells if c.arm in arms):
            batches: list[Recorded] = []

            def record(*made: Any, batches: list[Recorded] = batches) -> Recorded:
                batches.append(Recorded(*made))
                return batches[-1]

            runners = pool.runners_of(cell)
            decode(pool.method(cell), runners, requests, make=record)
            shapes = batches[0].shapes
            seconds[cell.arm] += isolated_s(runners.target, len(block), shapes, pool.method(cell).window().guesses + 1)
            forwards[cell.arm] += len(shapes)
    baseline_s, mars_s = (seconds[arm] / forwards[arm] for arm in arms)
    return baseline_s / mars_s


@torch.inference_mode()
def isolated_s(runner: ModelRunner, rows: int, shapes: Sequence[tuple[int, int]], judged: int) -> float:
    """Seconds for the same forwards in isolation."""
    runner.reserve(rows, max(view for _, view in shapes) + 1)
    fed = []
    for width, view in shapes:
        slots = torch.arange(view - width, view).repeat(rows, 1)
        feed = AttentionMetadata(slots, slots, slots[:, 0], view, view_is_full=slots.numel() == 1)
        fed.append((torch.randint(0, 200, (rows, width)), feed))
    began = time.perf_counter()
    for ids, feed in fed:
        runner.forward(ids, feed, judged)
    return time.perf_counter() - began


def against_generate(found: Found, blocks: int) -> dict[str, Any]:
    """Of every engine's `ar`: over `generate`, same tokens, the loop's overhead."""
    figures: dict[str, Any] = {}
    for engine in ("eager", "graph"):
        arm = f"ar@ar/{engine}"
        over = ratio(found, GENERATE, arm, blocks)
        same = same_tokens(found, arm)
        figures[engine] = {
            "ar_over_generate": over._asdict(),
            "same_tokens": same,
            "overhead": overhead(found[arm]),
        }
        print(
            f"  ar by {engine} over transformers' generate {show(over)}; same tokens on {same[0]} of {same[1]}; "
            f"loop {overhead(found[arm]):+.1%} on its forwards"
        )
    return figures


def tiny(size: int, blocks: int, rounds: int) -> dict[str, Any]:
    """The embedded checkpoints at one batch size; prints the figures and returns them."""
    methods = AGAINST_GENERATE + MARS_AGAINST_AR
    plan = make_plan(RunRequest(method=methods, batch_size=(size,), limit=size * blocks))
    pool = ModelPool(plan.request)
    pool.load(plan.cells)
    found = measure(pool, plan, rounds, seed=size)
    print(f"tiny, batch size {size}, {blocks} blocks x {rounds} rounds, {torch.get_num_threads()} thread(s)")
    figures = against_generate(found, blocks)
    for engine in ("eager", "graph"):
        baseline, arm = f"ar@mars/{engine}", f"mars:tau=0.95@mars/{engine}"
        speedup = ratio(found, baseline, arm, blocks)
        where = factors(totals(found[arm]), totals(found[baseline]))
        assert where is not None
        per_token = (speedup.value or 0.0) / where.tokens_per_forward
        print(f"  mars:tau=0.95 over ar:on=mars by {engine} {show(speedup)}; / tokens per forward {per_token:.3f}")
        print("    factors:", ", ".join(f"{name} {value:.3f}" for name, value in where._asdict().items()))
        figures[engine] |= {
            "mars_over_ar": speedup._asdict(),
            "factors": where._asdict(),
            "mars_overhead": overhead(found[arm]),
        }
        if engine == "eager":
            probed = probed_forward_time(pool, plan)
            off = where.forward_time / probed - 1
            print(f"    forward time: loop {where.forward_time:.4f}, probe {probed:.4f}, {off:+.1%} apart")
            figures[engine]["forward_time_probed"] = probed
    return figures


def qwen(blocks: int, rounds: int) -> dict[str, Any]:
    """Random weights of Qwen2.5-0.5B at batch size 1. Our prefill commits nothing: an answer is one forward more."""
    plan = make_plan(
        RunRequest(
            suite=("synthetic:32x64",),
            weights="random:qwen2.5-0.5b",
            method=AGAINST_GENERATE,
            fixed_length=True,
            batch_size=(1,),
            limit=blocks,
        )
    )
    pool = ModelPool(plan.request)
    pool.load(plan.cells)
    found = measure(pool, plan, rounds, seed=0)
    print(f"random Qwen2.5-0.5B, batch size 1, {blocks} blocks x {rounds} rounds, {torch.get_num_threads()} thread(s)")
    return against_generate(found, blocks)


def show(ratio: Ratio) -> str:
    if ratio.ci_low is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} [{ratio.ci_low:.3f}, {ratio.ci_high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24, help="at least 6; of 0.5b a third")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("tiny", "0.5b"))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    figures: dict[str, Any] = {}
    if asked.only != "0.5b":
        figures |= {f"tiny b{size}": tiny(size, asked.blocks, asked.rounds) for size in (1, 8)}
    if asked.only != "tiny":
        torch.set_num_threads(THREADS)
        figures["0.5b b1"] = qwen(max(6, asked.blocks // 3), 1)
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

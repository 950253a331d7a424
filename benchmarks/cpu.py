"""Time the decode loop on a CPU: against transformers' `generate`, against its forward passes, and MARS against AR.

    python benchmarks/cpu.py [--blocks 24] [--rounds 3] [--only tiny|0.5b] [--json FILE]

In every block of prompts all arms run one after another, in random order, in one process. Ratios are ratios of total
wall time, with the t interval over blocks. On the embedded checkpoints the factor "forward time" is compared with an
isolated probe: the same forward passes (rows, width, slots in view) without the loop. Random weights of Qwen2.5-0.5B
give the figures of a larger model. The last line prints all figures as JSON.
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
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.models.attention import AttentionMetadata
from mtbench.models.runner import ModelRunner
from mtbench.plan.plan import Cell, Plan, RunRequest
from mtbench.results.speed_factors import Totals, factors
from mtbench.statistics import Ratio, ratio_of_totals

GENERATE = "hf-generate@ar"
AGAINST_GENERATE = ("hf-generate", "ar:engine=eager|graph")
MARS_AGAINST_AR = ("ar:on=mars,engine=eager|graph", "mars:tau=0.95,engine=eager|graph")
THREADS = torch.get_num_threads()
Outcome = tuple[list[Generation], Timing]
Outcomes = dict[str, list[Outcome]]  # arm -> its outcomes, ordered by round, then block


class Recorded(Batch):
    """A batch that records the width and the slots in view of every step."""

    def advance(self, run: RunState, shape: Shape) -> None:
        self.shapes: list[tuple[int, int]] = getattr(self, "shapes", [])
        self.shapes.append((shape.pending + self.windows[shape.variant].guesses, shape.view))
        super().advance(run, shape)


def measure(pool: ModelPool, plan: Plan, rounds: int, seed: int) -> Outcomes:
    """Decode every block by every arm, in random order."""
    [group], [suite] = plan.groups, plan.suites
    cells = [plan.cell(name) for name in group.cells]
    found: Outcomes = {cell.arm: [] for cell in cells}

    def run(cell: Cell, block: Sequence[int]) -> Outcome:
        return pool.decode(cell, plan.requests(suite, block))

    for cell in cells:
        run(cell, group.blocks[0])
    shuffler = random.Random(seed)
    for _ in range(rounds):
        for block in group.blocks:
            for cell in shuffler.sample(cells, len(cells)):
                found[cell.arm].append(run(cell, block))
    return found


def ratio(found: Outcomes, baseline: str, arm: str, blocks: int) -> Ratio:
    """Return the baseline's wall time over the arm's; a block's time is its mean over rounds."""

    def by_block(name: str) -> list[float]:
        walls = [timing.wall_s for _, timing in found[name]]
        return [sum(walls[b::blocks]) / len(walls[b::blocks]) for b in range(blocks)]

    return ratio_of_totals([by_block(baseline)], [by_block(arm)])


def totals(outcomes: Sequence[Outcome]) -> Totals:
    """Return the sums of the counters and times."""
    timings = [timing for _, timing in outcomes]
    names = ("tokens", "row_forwards", "batch_forwards", "device_s", "decode_s", "wall_s")
    slots = sum(t.rows * (t.batch_forwards or 0) for t in timings)
    return Totals(row_slots=slots, **{name: sum(getattr(t, name) for t in timings) for name in names})


def overhead(outcomes: Sequence[Outcome]) -> float:
    """Return the loop's time outside its forward passes, as a share of their time."""
    total = totals(outcomes)
    return total.decode_s / total.device_s - 1


def same_tokens(found: Outcomes, arm: str) -> list[int]:
    """Return the number of answers equal to those of `generate`, and the number of answers."""
    pairs = [
        (a.token_ids, b.token_ids)
        for (mine, _), (theirs, _) in zip(found[arm], found[GENERATE], strict=True)
        for a, b in zip(mine, theirs, strict=True)
    ]
    return [sum(a == b for a, b in pairs), len(pairs)]


def probed_forward_time(pool: ModelPool, plan: Plan) -> float:
    """Return the factor "forward time" of MARS over AR, from isolated forward passes of the loop's shapes."""
    [group], [suite] = plan.groups, plan.suites
    arms = ("ar@mars/eager", "mars:tau=0.95@mars/eager")
    seconds, forwards = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0)
    for block in group.blocks:
        requests = plan.requests(suite, block)
        for cell in (c for c in plan.cells if c.arm in arms):
            batches: list[Recorded] = []

            def record(*arguments: Any, batches: list[Recorded] = batches) -> Recorded:
                batches.append(Recorded(*arguments))
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
    """Return the seconds of forward passes of these shapes (width, slots in view) without the loop."""
    runner.reserve(rows, max(view for _, view in shapes) + 1)
    passes = []
    for width, view in shapes:
        slots = torch.arange(view - width, view).repeat(rows, 1)
        metadata = AttentionMetadata(slots, slots, slots[:, 0], view, view_is_full=slots.numel() == 1)
        passes.append((torch.randint(0, 200, (rows, width)), metadata))
    started_at = time.perf_counter()
    for ids, metadata in passes:
        runner.forward(ids, metadata, judged)
    return time.perf_counter() - started_at


def against_generate(found: Outcomes, blocks: int) -> dict[str, Any]:
    """Return, for `ar` on each engine: ratio to `generate`, answers with the same tokens, the loop's overhead."""
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
            f"  ar on {engine} over transformers' generate {show(over)}; "
            f"same tokens in {same[0]} of {same[1]} answers; "
            f"loop overhead {overhead(found[arm]):+.1%} of its forward passes"
        )
    return figures


def tiny(size: int, blocks: int, rounds: int) -> dict[str, Any]:
    """Measure the embedded checkpoints at one batch size; print and return the figures."""
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
        split = factors(totals(found[arm]), totals(found[baseline]))
        assert split is not None
        per_token = (speedup.value or 0.0) / split.tokens_per_forward
        print(f"  mars:tau=0.95 over ar:on=mars on {engine} {show(speedup)}; / tokens per forward {per_token:.3f}")
        print("    factors:", ", ".join(f"{name} {value:.3f}" for name, value in split._asdict().items()))
        figures[engine] |= {
            "mars_over_ar": speedup._asdict(),
            "factors": split._asdict(),
            "mars_overhead": overhead(found[arm]),
        }
        if engine == "eager":
            probed = probed_forward_time(pool, plan)
            difference = split.forward_time / probed - 1
            print(f"    forward time: loop {split.forward_time:.4f}, probe {probed:.4f}, difference {difference:+.1%}")
            figures[engine]["forward_time_probed"] = probed
    return figures


def qwen(blocks: int, rounds: int) -> dict[str, Any]:
    """Measure random weights of Qwen2.5-0.5B at batch size 1.

    Our prefill commits no token, so an answer takes one forward pass more than in `generate`.
    """
    plan = make_plan(
        RunRequest(
            suite=("synthetic:32x64",),
            weights="random:qwen2.5-0.5b",
            method=AGAINST_GENERATE,
            ignore_eos=True,
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
    parser.add_argument(
        "--blocks", type=int, default=24, help="blocks of prompts, at least 6; 0.5b runs a third of them"
    )
    parser.add_argument("--rounds", type=int, default=3, help="passes over the blocks; 0.5b runs one")
    parser.add_argument("--only", choices=("tiny", "0.5b"), help="measure only these checkpoints")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    if args.only != "0.5b":
        figures |= {f"tiny b{size}": tiny(size, args.blocks, args.rounds) for size in (1, 8)}
    if args.only != "tiny":
        torch.set_num_threads(THREADS)
        figures["0.5b b1"] = qwen(max(6, args.blocks // 3), 1)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

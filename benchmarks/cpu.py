"""How fast the loop is on a CPU: against transformers' `generate`, and MARS against its own tokens per forward.

    python benchmarks/cpu.py [--blocks 24] [--rounds 3] [--json FILE]

All contestants run next to each other inside every block of prompts, in random order, in one process, on the embedded
checkpoints. Ratios are ratios of total wall-clock, with the t interval over blocks. The factor "forward time" is held
against an isolated probe: the same forwards (rows, width, slots in view) replayed without the loop around them.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mtbench.decoding import Batch, Timing
from mtbench.lab import Lab, method_of
from mtbench.lane import Feed, Lane
from mtbench.plan import Cell, Plan, Request, make_plan
from mtbench.statistics import Ratio, Totals, factors, ratio_of_totals

Outcome = dict[str, Any]
ARMS = ("ar", "ar:on=mars", "mars:tau=0.95")


class Recorded(Batch):
    """A batch that remembers the shape of every step."""

    def step(self, pending: int, view: int) -> None:
        self.shapes: list[tuple[int, int]] = getattr(self, "shapes", [])
        super().step(pending, view)
        self.shapes.append((self.fed[-1] - self.fed[-2], view))


def ours(lab: Lab, cell: Cell, prompts: Sequence[list[int]], budget: int) -> Outcome:
    with torch.inference_mode():
        batch = Recorded(method_of(cell), lab.lanes_of(cell), prompts, budget)
        generations, timing = batch.run([()] * len(prompts))
    return {"timing": timing, "shapes": batch.shapes, "tokens": [g.token_ids for g in generations]}


def transformers_generate(model: Any, lane: Lane, prompts: Sequence[list[int]], budget: int) -> Outcome:
    """Greedy `generate` with its dynamic cache, prompts padded on the left, the same ids suppressed."""
    width, pad = max(map(len, prompts)), lane.checkpoint.tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=budget,
            suppress_tokens=lane.checkpoint.suppressed.tolist(),
            pad_token_id=pad,
        )
    wall_s = time.perf_counter() - began
    ends = set(lane.checkpoint.end_ids)
    answers = [row[width:].tolist() for row in out]
    cut = [a[: next((i + 1 for i, t in enumerate(a) if t in ends), len(a))] for a in answers]
    return {"wall_s": wall_s, "tokens": cut}


def probe(lane: Lane, rows: int, shapes: Sequence[tuple[int, int]], judged: int) -> float:
    """Seconds for the same forwards in isolation."""
    lane.reserve(rows, max(view for _, view in shapes) + 1)
    feeds = []
    for width, view in shapes:
        slots = torch.arange(view - width, view).repeat(rows, 1)
        feeds.append(
            (
                torch.randint(0, 200, (rows, width)),
                Feed(slots, slots, slots[:, 0], view, view_is_full=slots.numel() == 1),
            )
        )
    began = time.perf_counter()
    with torch.inference_mode():
        for ids, feed in feeds:
            lane.forward(ids, feed, judged)
    return time.perf_counter() - began


def measure(lab: Lab, plan: Plan, group_index: int, rounds: int, seed: int) -> dict[str, list[Outcome]]:
    """Every contestant on every block, in random order; outcomes by block, the mean wall over rounds."""
    group, suite = plan.groups[group_index], plan.suites[0]
    cells = {c.arm: c for c in map(plan.cell, group.cells)}
    lane = lab.lanes_of(cells["ar@ar/eager"]).target
    hf = AutoModelForCausalLM.from_pretrained(lane.checkpoint.source, dtype=torch.float32).eval()
    contestants: dict[str, Callable[[list[list[int]]], Outcome]] = {
        "generate": lambda p: transformers_generate(hf, lane, p, suite.max_new_tokens)
    }
    for arm, cell in cells.items():
        contestants[arm] = lambda p, c=cell: ours(lab, c, p, suite.max_new_tokens)  # type: ignore[misc]
    found: dict[str, list[Outcome]] = {name: [] for name in contestants}
    shuffler = random.Random(seed)
    blocks = [[suite.items[i].prompt_ids for i in block] for block in group.blocks]
    for run in contestants.values():
        run(blocks[0])
    for _ in range(rounds):
        for block in blocks:
            for name in shuffler.sample(sorted(contestants), len(contestants)):
                found[name].append(contestants[name](block))
    return found


def wall(outcomes: Sequence[Outcome], blocks: int) -> list[float]:
    """Mean wall per block over rounds, (K,)."""
    walls = [o["timing"].wall_s if "timing" in o else o["wall_s"] for o in outcomes]
    return [sum(walls[b::blocks]) / len(walls[b::blocks]) for b in range(blocks)]


def totals(outcomes: Sequence[Outcome]) -> Totals:
    timings: list[Timing] = [o["timing"] for o in outcomes]
    names = ("tokens", "row_forwards", "batch_forwards", "device_s", "decode_s", "wall_s")
    slots = sum(t.rows * t.batch_forwards for t in timings)
    return Totals(row_slots=slots, **{name: sum(getattr(t, name) for t in timings) for name in names})


def probed_forward_time(lane: Lane, found: dict[str, list[Outcome]], rows: int) -> float:
    """The factor "forward time" of MARS over AR from isolated forwards, replayed in turn."""
    judged = {"ar@mars/eager": 1, "mars:tau=0.95@mars/eager": 4}
    seconds, forwards = dict.fromkeys(judged, 0.0), dict.fromkeys(judged, 0)
    for outcomes in zip(*(found[arm] for arm in judged), strict=True):
        for arm, outcome in zip(judged, outcomes, strict=True):
            seconds[arm] += probe(lane, rows, outcome["shapes"], judged[arm])
            forwards[arm] += len(outcome["shapes"])
    baseline_s, mars_s = (seconds[name] / forwards[name] for name in judged)
    return baseline_s / mars_s


def same_tokens(found: dict[str, list[Outcome]]) -> tuple[int, int]:
    """Answers on which `generate` and `ar` agree, and how many there are."""
    pairs = zip(found["generate"], found["ar@ar/eager"], strict=True)
    same = [a == b for x, y in pairs for a, b in zip(x["tokens"], y["tokens"], strict=True)]
    return sum(same), len(same)


def benchmark(size: int, blocks: int, rounds: int) -> dict[str, Any]:
    """One batch size; prints its figures and returns them."""
    plan = make_plan(Request(method=ARMS, batch_size=(size,), limit=size * blocks))
    lab = Lab(plan.request)
    found = measure(lab, plan, 0, rounds, seed=size)
    walls = {name: wall(outcomes, blocks) for name, outcomes in found.items()}
    over_generate = ratio_of_totals([walls["generate"]], [walls["ar@ar/eager"]])
    speedup = ratio_of_totals([walls["ar@mars/eager"]], [walls["mars:tau=0.95@mars/eager"]])
    where = factors(totals(found["mars:tau=0.95@mars/eager"]), totals(found["ar@mars/eager"]))
    assert where is not None
    assert speedup.value is not None
    probed = probed_forward_time(lab.lanes_of(plan.cells[1]).target, found, size)
    same, answers = same_tokens(found)
    per_token = speedup.value / where.tokens_per_forward
    print(f"batch size {size}, {blocks} blocks x {rounds} rounds, {torch.get_num_threads()} thread(s)")
    print(f"  ar over transformers' generate {show(over_generate)}; same tokens on {same} of {answers}")
    print(f"  mars:tau=0.95 over ar:on=mars  {show(speedup)}")
    print(f"    tokens per forward {where.tokens_per_forward:.3f}; speedup / tokens per forward {per_token:.3f}")
    print("    factors:", ", ".join(f"{name} {value:.3f}" for name, value in where._asdict().items()))
    off = where.forward_time / probed - 1
    print(f"    forward time: loop {where.forward_time:.4f}, probe {probed:.4f}, {off:+.1%} apart")
    return {
        "ar_over_generate": over_generate._asdict(),
        "mars_over_ar": speedup._asdict(),
        "factors": where._asdict(),
        "forward_time_probed": probed,
        "same_tokens": [same, answers],
    }


def show(ratio: Ratio) -> str:
    return f"{ratio.value:.3f} [{ratio.ci_low:.3f}, {ratio.ci_high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=24, help="at least 6")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    written = {f"b{size}": benchmark(size, asked.blocks, asked.rounds) for size in (1, 8)}
    if asked.json:
        asked.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()

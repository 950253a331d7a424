"""Parts that time: methods and engines on random weights of published shapes."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from bars import number

from gpu_parts.bench import LARGE, MARS, REFILL, SMALL, Bench, interval
from gpu_parts.profile import captured_batches, captured_replay, decoded_block, profile
from mtbench import kernels, statistics
from mtbench.hardware import machine, probe
from mtbench.records import dump
from mtbench.runs import energy

SHAPES = {"7B": LARGE, "0.5B": SMALL}
LAUNCH_ROUNDS, REPLAYS = 12, 20  # of a step with dependent launch and one without


def _mean_s(device: torch.device, step: Callable[[], object]) -> float:
    """Return the mean seconds of a step."""
    laps = probe.laps_s(device, step, 1 if device.type == "cpu" else REPLAYS, warm_up_s=0.0)
    return sum(laps) / len(laps)


def static(bench: Bench, size: int, names: Sequence[str] = ("7B",)) -> None:
    """Static batches: AR and MARS, with a profile of one step of each."""
    for name in names:
        plan = bench.plan(SHAPES[name], ("ar", MARS), size)
        done, [ar, mars] = bench.race(f"{name} b{size} static", plan)
        bench.rate_bar(f"AR {name}, batch {size}", done, ar)
        bench.ratio_bar(f"MARS over AR {name}, batch {size}, static", done, mars, ar)
        bench.gap_bar(f"host gap, AR {name}, batch {size}", done, ar)
        profile(bench, f"{name} b{size} static", plan)


def blocks(bench: Bench, size: int) -> None:
    """7B shapes, static batches: MARS with its cache by cursor against the paper's block cache."""
    methods = (MARS, f"{MARS},cache=block,cache_block=8|16|32")
    done, [mars, *others] = bench.race(f"7B b{size} block cache", bench.plan(LARGE, methods, size))
    best = min(others, key=lambda arm: done.arms[arm].total("decode_s") or float("inf"))
    bench.say(f"  the best block has {done.arms[best].cell.options['cache_block']} positions")
    bench.ratio_bar(f"cursor over best block 7B, batch {size}, static", done, mars, best)


def refill(bench: Bench, size: int) -> None:
    """7B shapes, refilled slots: AR and MARS."""
    plan = bench.plan(LARGE, ("ar", MARS), size, prompt=512, new=96, batching=REFILL)
    # Few tokens per prompt, so that the warm-up ends a block and also prefills a single row.
    done, [ar, mars] = bench.race(f"7B b{size} refill", plan, warm_tokens=8)
    bench.ratio_bar(f"MARS over AR 7B, batch {size}, refill", done, mars, ar)


def selfspec(bench: Bench, size: int) -> None:
    """7B shapes, the cost of self-speculation's width: the same scripted acceptance at every K, beside AR and MARS."""
    plan = bench.plan(LARGE, ("ar", MARS, "mars-selfspec:ahead=1|2|3|4"), size)
    bench.race(f"{LARGE} b{size} self-speculation", plan)


def dependent_launch(bench: Bench, size: int) -> None:
    """AR on 7B shapes: the time of a captured step with dependent launch over that without, replayed in turn."""
    plan = bench.plan(LARGE, ("ar",), size, blocks=1)
    pool, [cell] = bench.pool(plan), plan.cells
    device = torch.device(bench.device)
    if not bench.cpu and not kernels.dependent_launch(device):
        bench.keep("dependent launch", kernels.dependent_launch_off() or "this GPU has none")
        return
    steps, kept = list[Callable[[], object]](), list[Any]()
    for within in (nullcontext, kernels.without_dependent_launch):
        with within():
            decode = decoded_block(pool, plan, cell, max_new_tokens=16)
            decode()
        step = decode if bench.cpu else captured_replay(pool, cell)
        if step is None:
            raise RuntimeError("no step was captured")
        steps.append(step)
        kept.append(dict(captured_batches(pool, cell)))  # a graph writes to the tensors of its batch
        captured_batches(pool, cell).clear()
    rounds = [[_mean_s(device, step) for step in steps] for _ in range(2 if bench.cpu else LAUNCH_ROUNDS)]
    early_s, apart_s = ([one[way] for one in rounds] for way in (0, 1))
    ratio = statistics.ratio_of_totals([early_s], [apart_s], unit="round")
    bench.keep(f"dependent launch b{size}", {"with_s": early_s, "without_s": apart_s, "ratio": ratio._asdict()})
    bench.say(f"  a step at batch {size} with dependent launch over one without: {interval(ratio)}")


def small(bench: Bench) -> None:
    """AR on 0.5B shapes at batch 1."""
    done, [ar] = bench.race("0.5B b1", bench.plan(SMALL, ("ar",), 1, prompt=512, new=384))
    bench.rate_bar("AR 0.5B, batch 1", done, ar)
    bench.gap_bar("host gap, AR 0.5B, batch 1", done, ar)


def external(bench: Bench, cache: str) -> None:
    """AR against transformers' `generate` with one of its caches. (It compiles the model for the static one.)"""
    done, [ar, theirs] = bench.race(f"hf {cache}", bench.plan(LARGE, ("ar", f"hf-generate:cache={cache}"), 4))
    what = f"ar graph over hf-generate {cache}, 7B batch 4, wall"
    bench.bar(what, done.ratio(ar, theirs, "wall_s"), beside="decode time unknown", doubt=done.doubt())


def prefill(bench: Bench) -> None:
    """Prefill of 8 prompts of 512 tokens on 7B shapes, against the matrix peak."""
    plan = bench.plan(LARGE, ("ar",), 8, prompt=512, new=2)
    done, [ar] = bench.race("prefill", plan, seconds=0 if bench.cpu else 3)
    [suite] = plan.suites
    shape = done.session["shapes"][plan.cells[0].checkpoints["ar"]]
    # The first decode step feeds the prompt's last token.
    fed = sum(len(item.prompt_ids) - 1 for item in suite.items) / len(plan.groups[0].blocks)
    seconds = done.arms[ar].by_block("prefill_s")
    peak = bench.probe[0].matmul_flop_per_s if bench.probe[0] else float("nan")
    share = statistics.ratio_of_totals([[2 * shape["body"] * fed / peak] * len(seconds)], [seconds])
    bench.bar("prefill 7B, 8 x 512, share of the matrix peak", share, doubt=done.doubt())


def joules(bench: Bench) -> None:
    """Energy per token on 7B shapes at batch 4, by the GPU's counter, ten seconds per arm."""
    plan = bench.plan(LARGE, ("ar", MARS), 4)
    found: dict[str, Any] = {}
    pool, gpu = bench.pool(plan), _one_watt() if bench.cpu else machine.gpu()
    if gpu is None:
        bench.keep("energy", energy.NO_NVML)
        return
    for cell in plan.cells:
        result = energy.window(gpu, plan, pool, cell)
        found[cell.arm] = dump(result)
        bench.keep("energy", found)
        bench.say(f"  {cell.arm}: {number(result.j_per_token)} J/token {result.energy_reason or ''}")


def _one_watt() -> Any:
    """Return a stand-in for a GPU with an energy counter, and shorten the windows of this process."""
    energy.WINDOW_S = 0.1
    sample = lambda: dataclasses.replace(machine.sample("cpu"), energy_j=time.perf_counter())  # noqa: E731
    return SimpleNamespace(sample=sample)


def sweep(bench: Bench) -> None:
    """MARS over AR by batch size, to find where MARS stops paying; two blocks each, so no intervals."""
    for name, weights in SHAPES.items():
        for size in (1, 2, 4, 8, 16, 32, 64, 128):
            if time.monotonic() < bench.deadline and (not bench.cpu or size <= 4):
                plan = bench.plan(weights, ("ar", MARS), size, prompt=512, new=48, blocks=2)
                done, [ar, mars] = bench.race(f"sweep {name} b{size}", plan)
                bench.say(f"  {name}, batch {size}: {number(done.ratio(mars, ar, 'decode_s').value)}, decode")

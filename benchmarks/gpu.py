"""Build, check and time the engines on a GPU within minutes, without network, lm-eval or datasets.

    python benchmarks/gpu.py [--minutes 9] [--json FILE] [--only PART]

It runs from a checkout, installed or not; it needs torch, triton, transformers, scipy, rich, typer and nvidia-ml-py.
Parts run in order of importance until the time is over; the output lists the parts not run, and `--only` runs them.
Results are written after every measurement. Ratios and rates are ratios of totals with the t interval over blocks
(benchmarks/race.py), and the interval decides whether a bar, a required figure, is met. Engines and methods are
compared by decode time; the wall time, with prefill, is shown beside it. External engines are compared by wall time.
Weights are random and acceptance is scripted (mtbench/runs/simulation.py), so this measures speed, not accuracy.
`--device cpu` runs the script on a small model, to test the script; it gives no verdicts.
"""

import argparse
import dataclasses
import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import checkout  # noqa: F401
import torch
from bars import Bar, number, verdict_of
from race import Race, race
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mtbench import statistics
from mtbench.hardware import machine, probe
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.models import kernels
from mtbench.models.loading import DTYPES
from mtbench.runs import energy, lossless_check, simulation
from mtbench.runs.directory import JsonObject
from mtbench.runs.model_pool import ModelPool
from mtbench.runs.plan import BATCHINGS, REFILLS, Plan, RunRequest
from mtbench.runs.planner import make_plan
from mtbench.runs.requests import requests_of
from mtbench.statistics import INCONCLUSIVE, Ratio

SMALL, LARGE, TOY = "random:qwen2.5-0.5b", "random:qwen2.5-7b", "random:embedded:tiny/ar"
ACCEPT = "0.424"  # 1 + p + p² + p³ = 1.68 tokens per forward, as in the MARS paper at 7B
SIMULATED = f"simulated: random weights, scripted acceptance ({simulation.Acceptance(ACCEPT).note})"
MARS = "mars:tau=0.95"
LOSSLESS = ("speculative", "prompt-lookup", "jacobi", "lookahead", "mars-speculative", "mars-selfspec")
STATIC, REFILL = BATCHINGS
BLOCKS = statistics.UNITS_NEEDED["block"]
RESERVE_S = 25.0  # before the end: every block of prompts must be done by then
LAST_S = 15.0  # before the end: a part that still runs is interrupted

# Required figures by batch size.
AR_ASKED = {1: 240, 4: 930, 16: 3500}  # tokens per second
MARS_ASKED = {STATIC: {4: 1.50, 8: 1.45, 16: 1.40}, REFILL: {4: 1.60, 8: 1.57, 16: 1.50}}  # over AR
CURSOR_ASKED = {4: 1.10, 16: 1.40}  # over MARS with a block cache

Call = Callable[[], Tensor]


class TimeUp(BaseException):
    """The time is over. A BaseException, so that no part catches it as an error of its own."""


class Bench:
    """Runs measurements, shows them, and writes each to the JSON file at once."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.cpu = args, args.device == "cpu"
        self.toy = "toy: " if self.cpu else ""
        self.ends = time.monotonic() + 60 * args.minutes
        self.deadline = self.ends - RESERVE_S
        self.dtype = "float32" if self.cpu else "bfloat16"
        self.console = Console(width=150, highlight=False)
        self.bars: list[Bar] = []
        self.found: JsonObject = {"toy": self.cpu, "simulated": SIMULATED, "bars": [], "errors": {}, "seconds": {}}
        self.probe: tuple[probe.Probe | None, str | None] = (None, "not probed")
        self.layers: JsonObject = {}  # the description of the layers that was printed last
        self._pool: ModelPool | None = None

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def keep(self, name: str, value: Any) -> None:
        """Store a result and write all results to the file."""
        self.found[self.toy + name] = value
        self.save()

    def save(self) -> None:
        self.args.json.write_text(json.dumps(self.found, indent=1, default=str) + "\n")

    def bar(
        self,
        what: str,
        asked: float,
        found: Ratio | float | None,
        *,
        most: bool = False,
        beside: str = "",
        doubt: str | None = None,
    ) -> None:
        """Compare a measurement with the required minimum or, with `most`, maximum.

        The interval of a ratio decides; a count or share decides by itself. `doubt`: why the verdict is inconclusive.
        """
        if isinstance(found, Ratio):
            value, low, high = found.value, found.ci_low, found.ci_high
            ci = (low, high)
            doubt = doubt or statistics.too_few(found.units)
        else:
            value = low = high = found
            ci = (None, None)
        verdict: str | None
        if self.cpu:
            verdict = None
        elif value is None:
            verdict = "not measured"
        elif doubt or low is None or high is None:
            verdict = f"{INCONCLUSIVE}: {doubt or 'no interval'}"
        else:
            verdict = verdict_of(low, high, asked, most=most)
        self.bars.append(Bar(self.toy + what, f"{'≤' if most else '≥'} {asked:g}", value, ci, beside, verdict))
        self.found["bars"] = [dataclasses.asdict(bar) for bar in self.bars]
        self.say("    " + "  ".join(filter(None, self.bars[-1].row())))
        self.save()

    def pool(self, plan: Plan) -> ModelPool:
        """Return a new pool of the plan's models. It takes over checkpoints that the last pool has loaded.

        The last pool is cleared, because captured batches hold memory.
        """
        pool = ModelPool(plan.request)
        sources = {source for cell in plan.cells for source in cell.checkpoints.values()}
        if self._pool is not None:
            if self._pool.dtype == pool.dtype:
                pool.checkpoints |= {s: c for s, c in self._pool.checkpoints.items() if s in sources}
            self._pool.clear()
            gc.collect()
            if not self.cpu:
                torch.cuda.empty_cache()
        self._pool = pool
        pool.load(plan.cells)
        return pool

    def plan(
        self,
        weights: str,
        methods: Sequence[str],
        size: int,
        *,
        prompt: int = 768,
        new: int = 128,
        batching: str = STATIC,
        blocks: int = BLOCKS,
    ) -> Plan:
        """Return a plan of random prompts on random weights; on a CPU a small one."""
        if self.cpu:
            weights, size, prompt, new = TOY, min(size, 4), 24, 8
        return make_plan(
            RunRequest(
                suite=(f"synthetic:{prompt}x{new}",),
                weights=weights,
                method=methods,
                engine="graph",
                batch_size=(size,),
                batching=(batching,),
                limit=blocks * size * (REFILLS if batching == REFILL else 1),
                accept=ACCEPT,
                device=self.args.device,
                dtype=self.dtype,
                rounds=1,
            )
        )

    def race(self, name: str, plan: Plan, **options: Any) -> tuple[Race, list[str]]:
        """Run a race, store and print its figures; return the race and its arms."""
        pool = self.pool(plan)
        described = pool.describe()
        if described["layers"] != self.layers:
            self.layers = described["layers"]
            self.say(f"  {described}")
        session = {**described, **probe.described(*self.probe, pool.checkpoints)}
        done = race(pool, plan, session, self.deadline, **options)
        arms = list(done.arms)
        figures = {arm: done.figures(arm) for arm in arms}
        for arm in arms[1:]:
            totals, first = done.arms[arm].totals, done.arms[arms[0]].totals
            factors = statistics.factors(totals, first) if totals and first else None
            figures[arm]["over"] = {
                "baseline": arms[0],
                "decode": done.ratio(arm, arms[0], "decode_s")._asdict(),
                "wall": done.ratio(arm, arms[0], "wall_s")._asdict(),
                "factors": None if factors is None else factors._asdict(),
            }
        self.keep(name, {"session": described, "dropped": done.dropped(), "doubt": done.doubt(), "arms": figures})
        for arm, found in figures.items():
            rates = [f"{number(found['tokens_per_s'][by]['value'])} tokens/s {by}" for by in ("decode", "wall")]
            shown = [f"{key} {number(found[key])}" for key in ("step_ms", "host_gap", "roofline_fraction")]
            self.say(f"  {name}  {arm}: " + ", ".join([*rates, *shown, f"preparation {found['preparation_s']:.1f} s"]))
        if done.dropped():
            self.say(f"  {name}: dropped batches: {dict(done.dropped())}")
        return done, arms

    def rate_bar(self, what: str, asked: float, done: Race, arm: str) -> None:
        """Compare the arm's tokens per second of decode time with the bar; show those of wall time beside it."""
        beside = "wall " + interval(done.rate(arm, "tokens", "wall_s"))
        self.bar(
            f"{what}, decode tokens/s", asked, done.rate(arm, "tokens", "decode_s"), beside=beside, doubt=done.doubt()
        )

    def ratio_bar(self, what: str, asked: float, done: Race, arm: str, baseline: str) -> None:
        """Compare the ratio of decode times with the bar; show that of wall times beside it."""
        ratio, beside = done.ratio(arm, baseline, "decode_s"), done.ratio(arm, baseline, "wall_s")
        self.bar(f"{what}, decode", asked, ratio, beside=f"wall {interval(beside)}", doubt=done.doubt())

    def gap_bar(self, what: str, asked: float, done: Race, arm: str) -> None:
        """Compare the host gap with the bar: the share of decode time in which the device waits for the host."""
        busy = done.rate(arm, "device_s", "decode_s")
        value, low, high = (None if v is None else 1 - v for v in (busy.value, busy.ci_high, busy.ci_low))
        self.bar(what, asked, busy._replace(value=value, ci_low=low, ci_high=high), most=True, doubt=done.doubt())


def interval(ratio: Ratio) -> str:
    if ratio.ci_low is None:
        return number(ratio.value)
    return f"{number(ratio.value)} [{number(ratio.ci_low)}, {number(ratio.ci_high)}]"


# ---- the parts


def probe_machine(bench: Bench) -> None:
    """The machine, and its GPU's copy and matrix product rates."""
    bench.probe = probed, reason = probe.probe(bench.args.device, DTYPES[bench.dtype])
    bench.keep("probe", dataclasses.asdict(probed) if probed else reason)
    bench.say(f"  {bench.found['environment']}")
    bench.say(f"  {probed or reason}")


def operations(bench: Bench) -> None:
    """Every kernel against its plain version in float64, and its microseconds."""
    checks = Operations(bench)
    for width in (1, 7):
        for rows in (1, 4, 8, 16, 32) if not bench.cpu else (2,):
            attention(checks, rows, width)
    argmaxes(checks)
    products(checks)
    bench.keep("operations", checks.found)
    worst = max(result["error"] for result in checks.found.values())
    bench.bar("kernels against float64, worst relative error", 1e-2, worst, most=True)


class Operations:
    """Makes random inputs, and records the errors and times of operations."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.cpu, self.device = bench, bench.cpu, torch.device(bench.args.device)
        self.generator = torch.Generator(self.device).manual_seed(0)
        self.found: dict[str, JsonObject] = {}

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(DTYPES[self.bench.dtype])

    def record(self, name: str, calls: Sequence[Call], expected: Tensor) -> Tensor:
        """Record the error of the first call and the time per call; return the first call's result."""
        result = calls[0]()
        error = float((result.double() - expected).norm() / expected.norm())
        self.found[name] = {"error": error, "us": micros(self.device, calls)}
        self.bench.say(f"  {name}: {self.found[name]['us']:.1f} us, relative error {error:.1g}")
        return result


def attention(checks: Operations, rows: int, width: int) -> None:
    """Check and time attention with Qwen2.5-7B's heads over rows of 512 to 1,024 tokens, with and without a split."""
    slots, heads, key_heads, size = 1024 if not checks.cpu else 64, 28, 4, 128
    # In a decode step the weights evict keys and values from the GPU's cache. Cycling over enough copies does the same.
    copies = max(2, (128 << 20) // (rows * slots * key_heads * size * 4)) if not checks.cpu else 2
    pairs = [[checks.noise(rows, slots, key_heads, size).transpose(1, 2) for _ in range(2)] for _ in range(copies)]
    query = checks.noise(rows, width, heads, size).transpose(1, 2)
    length = torch.randint(slots // 2, slots, (rows,), generator=checks.generator, device=checks.device)
    last = length[:, None] - width + torch.arange(width, device=checks.device)
    mask = torch.arange(slots, device=checks.device) <= last[:, :, None]
    bias = torch.zeros(mask.shape, device=checks.device, dtype=torch.float64).masked_fill_(~mask, float("-inf"))
    bias = bias.repeat(1, heads // key_heads, 1)[:, None]
    key, value = (t.double() for t in pairs[0])
    expected = kernels.attend_plain(query.double(), key, value, bias, size**-0.5)
    attends: dict[str, Callable[..., Tensor]] = {"plain": kernels.attend}
    if not checks.cpu:
        from mtbench.models import triton_kernels

        attends = {name: partial(triton_kernels.attend, split=name == "split") for name in ("split", "walked")}
    for name, attend in attends.items():
        calls = [partial(attend, query, *pair, mask, length, size**-0.5) for pair in pairs]
        checks.record(f"attend {rows}x{width} {name}", calls, expected)


def argmaxes(checks: Operations) -> None:
    """Raise RuntimeError if a choice is not the lowest id of the largest logits. (bfloat16 has many equal logits.)"""
    vocabulary = 152064 if not checks.cpu else 512
    for rows in (1, 16, 64):
        logits = checks.noise(rows, 1, vocabulary)
        choice, largest, _ = kernels.argmax_logsumexp(logits)
        best = logits == logits.amax(-1, keepdim=True)
        lowest = torch.where(best, torch.arange(vocabulary, device=checks.device), vocabulary).amin(-1)
        if not (torch.equal(choice, lowest) and torch.equal(largest, logits.amax(-1).float())):
            raise RuntimeError("argmax_logsumexp does not choose the lowest id of the largest logits")
        checks.record(f"argmax {rows}", [partial(_logsumexp, logits)], logits.double().logsumexp(-1))


def _logsumexp(logits: Tensor) -> Tensor:
    return kernels.argmax_logsumexp(logits)[2]


def products(checks: Operations) -> None:
    """Check and time the batch-invariant product and the library's. Raises RuntimeError if it is not invariant."""
    for name, outputs, inputs in (("up", 18944, 3584), ("down", 3584, 18944)):
        weight = checks.noise(outputs, inputs) if not checks.cpu else checks.noise(outputs // 64, inputs // 64)
        for rows in (1, 16, 112):
            x = checks.noise(rows, weight.shape[1])
            expected = x.double() @ weight.double().T
            result = checks.record(f"{name} {rows} invariant", [partial(kernels.linear, x, weight)], expected)
            checks.record(f"{name} {rows} library", [partial(torch.nn.functional.linear, x, weight)], expected)
            if not torch.equal(result[:1], kernels.linear(x[:1], weight)):
                raise RuntimeError("kernels.linear is not batch-invariant")


def micros(device: torch.device, calls: Sequence[Call], repetitions: int = 5) -> float:
    """Return the median microseconds per call; on a GPU in a CUDA graph, so without launch times."""
    calls = [*calls] * max(1, 20 // len(calls))

    def run_all() -> None:
        for call in calls:
            call()

    once: Callable[[], None] = run_all
    if device.type == "cuda":
        run_all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_all()
        once = graph.replay
    once()
    stopwatch = Stopwatch(device)
    stopwatch.now()
    stopwatch.mark()
    for _ in range(repetitions):
        once()
        stopwatch.mark()
    stopwatch.now()
    spans = sorted(stopwatch.laps())
    return 1e6 * spans[len(spans) // 2] / len(calls)


def equality(bench: Bench) -> None:
    """On the embedded model in float32, all engines, batch sizes and batchings give the same tokens.

    All lossless methods of one checkpoint are compared too.
    """
    engines = "engine=eager|graph|invariant"
    drafting = [f"{name}:on=mars,{engines}" for name in LOSSLESS]
    request = RunRequest(
        method=(
            *(f"ar:on=mars,{engines}", f"mars:tau=1|0.8,{engines}", "mars:tau=0.8,cache=block,engine=eager|graph"),
            *(*drafting, f"ar:on=medusa,{engines}", f"medusa:{engines}"),
        ),
        family="tiny",
        batch_size=(1, 4),
        batching=BATCHINGS,
        limit=8,
        device=bench.args.device,
        dtype="float32",
        rounds=1,
    )
    plan = make_plan(request)
    pool, [suite] = bench.pool(plan), plan.suites
    requests = requests_of(plan, suite, range(len(suite.items)), max_new_tokens=48)
    tokens: dict[str, list[list[list[int]]]] = {}  # policy -> cell -> prompt -> token ids
    for cell in plan.cells:
        together = len(requests) if cell.batching == REFILL else cell.batch_size
        answers = [
            generation.token_ids
            for begin in range(0, len(requests), together)
            for generation in pool.decode(cell, requests[begin : begin + together], room=256)[0]
        ]
        policy = f"{cell.claims} on {cell.on}"
        if cell.options.get("cache") == "block":  # its tokens depend on the batch, so only engines are compared
            policy = f"block cache, batch {cell.batch_size}, {cell.batching}"
        tokens.setdefault(policy, []).append(answers)
    different = {policy: sum(cell != cells[0] for cell in cells) for policy, cells in tokens.items()}
    bench.keep("equality", {"cells": {policy: len(cells) for policy, cells in tokens.items()}, "different": different})
    bench.bar("cells that differ in float32", 0, sum(different.values()), most=True)


def grade(bench: Bench) -> None:
    """In bfloat16 on 0.5B shapes: re-score tokens by transformers' modules; compare batch sizes 1 and 16."""
    found: dict[str, JsonObject] = {}
    prompts: list[list[int]] = []
    for engine in ("graph", "invariant"):
        plans = [bench.plan(SMALL, (f"ar:engine={engine}",), n, prompt=64, blocks=16 // n) for n in (1, 16)]
        count = min(len(plan.suites[0].items) for plan in plans)  # 16; on a CPU fewer
        tokens = []
        for plan in plans:
            pool, [cell], [suite] = bench.pool(plan), plan.cells, plan.suites
            first = plans[0].suites[0]
            requests = requests_of(plans[0], first, range(count), max_new_tokens=suite.max_new_tokens)
            prompts = [list(request.prompt_ids) for request in requests]
            begins = range(0, len(requests), cell.batch_size)
            batches = [requests[i : i + cell.batch_size] for i in begins]
            answers = [g for batch in batches for g in pool.decode(cell, batch, room=256)[0]]
            tokens.append([g.token_ids for g in answers])
        rescorer = pool.runner(cell.on, cell.checkpoints[cell.on], "eager")
        margins = [
            margin
            for pair in zip(prompts, tokens[1], strict=True)
            for margin in lossless_check.shortfalls(rescorer, lossless_check.Answer(*pair), 64).values()
        ]
        found[engine] = {
            "identical alone and in a batch": sum(a == b for a, b in zip(*tokens, strict=True)) / len(prompts),
            "near_ties": len(margins) / sum(map(len, tokens[1])),
            "worst_margin": max(margins, default=0.0),
        }
        bench.say(f"  {engine}: {found[engine]}")
    bench.keep("grade", found)
    invariant = found["invariant"]["identical alone and in a batch"]
    bench.bar("invariant: share identical at batch 1 and 16, bf16", 1.0, invariant)
    worst = max(result["worst_margin"] for result in found.values())
    bench.bar("bf16 tokens re-scored: worst margin", statistics.EPSILON_CAP, worst, most=True)


def static(bench: Bench, size: int) -> None:
    """7B shapes, static batches: AR, MARS and, at batch sizes with a bar for it, the paper's block cache."""
    methods = ["ar", MARS]
    if size in CURSOR_ASKED:
        methods.append(f"{MARS},cache=block,cache_block=8|16|32")
    done, [ar, mars, *others] = bench.race(f"7B b{size} static", bench.plan(LARGE, methods, size))
    if size in AR_ASKED:
        bench.rate_bar(f"AR 7B, batch {size}", AR_ASKED[size], done, ar)
    if size in MARS_ASKED[STATIC]:
        bench.ratio_bar(f"MARS over AR 7B, batch {size}, static", MARS_ASKED[STATIC][size], done, mars, ar)
    if others:
        best = min(others, key=lambda arm: done.arms[arm].total("decode_s") or float("inf"))
        what = f"cursor over best block (C={done.arms[best].cell.options['cache_block']}) 7B, batch {size}, static"
        bench.ratio_bar(what, CURSOR_ASKED[size], done, mars, best)
    if size == 4:
        bench.gap_bar("host gap, AR 7B, batch 4", 0.03, done, ar)


def refill(bench: Bench, size: int) -> None:
    """7B shapes, refilled slots: AR and MARS."""
    plan = bench.plan(LARGE, ("ar", MARS), size, prompt=512, new=96, batching=REFILL)
    # Few tokens per prompt, so that the warm-up ends a block and also prefills a single row.
    done, [ar, mars] = bench.race(f"7B b{size} refill", plan, warm_tokens=8)
    bench.ratio_bar(f"MARS over AR 7B, batch {size}, refill", MARS_ASKED[REFILL][size], done, mars, ar)


def selfspec(bench: Bench, weights: str, size: int) -> None:
    """The cost of self-speculation's width: the same scripted acceptance at every K, beside AR and MARS."""
    plan = bench.plan(weights, ("ar", MARS, "mars-selfspec:ahead=1|2|3|4"), size)
    bench.race(f"{weights} b{size} self-speculation", plan)


def small(bench: Bench) -> None:
    """AR on 0.5B shapes at batch 1."""
    done, [ar] = bench.race("0.5B b1", bench.plan(SMALL, ("ar",), 1, prompt=512, new=384))
    bench.rate_bar("AR 0.5B, batch 1", 1200, done, ar)
    bench.gap_bar("host gap, AR 0.5B, batch 1", 0.15, done, ar)


def external(bench: Bench, cache: str, asked: float) -> None:
    """AR against transformers' `generate` with one of its caches. (It compiles the model for the static one.)"""
    done, [ar, theirs] = bench.race(f"hf {cache}", bench.plan(LARGE, ("ar", f"hf-generate:cache={cache}"), 4))
    what = f"ar graph over hf-generate {cache}, 7B batch 4, wall (the engine's gain, no method's)"
    bench.bar(what, asked, done.ratio(ar, theirs, "wall_s"), beside="decode time unknown", doubt=done.doubt())


def prefill(bench: Bench) -> None:
    """Prefill of 8 prompts of 512 tokens on 7B shapes, against the matrix peak."""
    plan = bench.plan(LARGE, ("ar",), 8, prompt=512, new=2)
    done, [ar] = bench.race("prefill", plan, seconds=3)
    [suite] = plan.suites
    shape = done.session["shapes"][plan.cells[0].checkpoints["ar"]]
    # The first decode step feeds the prompt's last token.
    fed = sum(len(item.prompt_ids) - 1 for item in suite.items) / len(plan.groups[0].blocks)
    seconds = done.arms[ar].by_block("prefill_s")
    peak = bench.probe[0].matmul_flop_per_s if bench.probe[0] else float("nan")
    share = statistics.ratio_of_totals([[2 * shape["body"] * fed / peak] * len(seconds)], [seconds])
    bench.bar("prefill 7B, 8 x 512, share of the matrix peak", 0.5, share, doubt=done.doubt())


def joules(bench: Bench) -> None:
    """Energy per token on 7B shapes at batch 4, by the GPU's counter, ten seconds per arm."""
    plan = bench.plan(LARGE, ("ar", MARS), 4)
    found = {}
    pool, gpu = bench.pool(plan), None if bench.cpu else machine.gpu()
    if gpu is None:
        bench.keep("energy", energy.NO_GPU if bench.cpu else energy.NO_NVML)
        return
    for cell in plan.cells:
        found[cell.arm] = result = energy.window(gpu, plan, pool, cell)
        bench.keep("energy", found)
        bench.say(f"  {cell.arm}: {number(result['j_per_token'])} J/token {result['energy_reason'] or ''}")


def sweep(bench: Bench) -> None:
    """MARS over AR by batch size, to find where MARS stops paying; two blocks each, so no intervals."""
    for weights, name in ((LARGE, "7B"), (SMALL, "0.5B")):
        for size in (1, 2, 4, 8, 16, 32, 64, 128):
            if time.monotonic() < bench.deadline and (not bench.cpu or size <= 4):
                plan = bench.plan(weights, ("ar", MARS), size, prompt=512, new=48, blocks=2)
                done, [ar, mars] = bench.race(f"sweep {name} b{size}", plan)
                bench.say(f"  {name}, batch {size}: {number(done.ratio(mars, ar, 'decode_s').value)}, decode")


PARTS: dict[str, Callable[[Bench], None]] = {  # in order of importance
    "probe": probe_machine,
    "static-4": partial(static, size=4),
    "static-16": partial(static, size=16),
    "static-1": partial(static, size=1),
    "refill-4": partial(refill, size=4),
    "refill-16": partial(refill, size=16),
    "static-8": partial(static, size=8),
    "hf-dynamic": partial(external, cache="dynamic", asked=5.0),
    "prefill": prefill,
    "selfspec-1": partial(selfspec, weights=LARGE, size=1),
    "selfspec-8": partial(selfspec, weights=LARGE, size=8),
    "small": small,
    "equality": equality,
    "grade": grade,
    "operations": operations,
    "refill-8": partial(refill, size=8),
    "energy": joules,
    "hf-static": partial(external, cache="static", asked=1.3),
    "sweep": sweep,
}


def raise_time_up(_: int, __: FrameType | None) -> None:
    """Signal handler."""
    raise TimeUp("the time is over")


def run(bench: Bench, name: str) -> None:
    """Run one part. An error in it does not stop the others."""
    part, started_at = PARTS[name], time.monotonic()
    bench.say(f"{name}: {getattr(part, 'func', part).__doc__}")
    try:
        part(bench)
    except (Exception, TimeUp) as error:
        bench.found["errors"][name] = traceback.format_exc()
        bench.say(f"  failed: {type(error).__name__}: {error}")
    bench.found["seconds"][name] = time.monotonic() - started_at
    bench.say(f"  {bench.found['seconds'][name]:.0f} s")
    bench.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="time limit of the whole run")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"), help="file for the results")
    parser.add_argument("--only", choices=list(PARTS), action="append", help="run only this part; may be repeated")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu tests this script only")
    bench = Bench(parser.parse_args())
    bench.found["environment"] = machine.environment(sys.argv) | {"cuda": torch.version.cuda}
    signal.signal(signal.SIGALRM, raise_time_up)
    signal.setitimer(signal.ITIMER_REAL, max(1.0, bench.ends - LAST_S - time.monotonic()))
    chosen = [name for name in PARTS if not bench.args.only or name in ("probe", *bench.args.only)]
    with suppress(TimeUp):
        for name in chosen:
            if time.monotonic() < bench.deadline:
                run(bench, name)
            else:
                bench.say(f"{name}: no time left; --only {name} runs it")
    signal.setitimer(signal.ITIMER_REAL, 0)
    title = f"a small model on a CPU, whatever the rows say; {SIMULATED}" if bench.cpu else SIMULATED
    left = [name for name in chosen if name not in bench.found["seconds"] or name in bench.found["errors"]]
    caption = f"not finished: {', '.join(left)}" if left else None
    table = Table("what", "asked", "found", "95 % interval", "beside", "", title=title, caption=caption)
    for bar in bench.bars:
        table.add_row(*bar.row())
    bench.console.print(table)


if __name__ == "__main__":
    main()

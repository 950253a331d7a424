"""What every part of benchmarks/gpu.py uses: plans, races, and the table of bars."""

import argparse
import dataclasses
import gc
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from bars import Bar, number, verdict_of
from race import Race, race
from rich.console import Console

from gpu_parts import runner
from gpu_parts.required import REQUIRED
from mtbench import statistics
from mtbench.errors import UserError
from mtbench.hardware import machine, probe
from mtbench.results import verdict_words
from mtbench.runs import simulation
from mtbench.runs.directory import JsonObject
from mtbench.runs.model_pool import ModelPool
from mtbench.runs.options import Batching
from mtbench.runs.plan import Plan, RunRequest
from mtbench.runs.planner import make_plan
from mtbench.runs.run_request import REFILLS
from mtbench.statistics import INCONCLUSIVE, Ratio

SMALL, LARGE, TOY = "random:qwen2.5-0.5b", "random:qwen2.5-7b", "random:embedded:tiny/ar"
ACCEPT = "0.424"  # 1 + p + p² + p³ = 1.68 tokens per forward, as in the MARS paper at 7B
SIMULATED = f"simulated: random weights, scripted acceptance ({simulation.Acceptance.of(ACCEPT).note})"
MARS = "mars:tau=0.95"
STATIC: Batching = "static"
REFILL: Batching = "refill"
BLOCKS = statistics.UNITS_NEEDED["block"]
RESERVE_S = 25.0  # before the end: every block of prompts must be done by then


class Bench:
    """Runs the measurements of a part, shows them, and writes each to the part's file at once."""

    def __init__(self, args: argparse.Namespace, part: str) -> None:
        """Raises UserError without a GPU, and if other parts ran on another one."""
        self.args, self.cpu, self.file = args, args.dry_run, runner.file_of(args.out, part)
        self.toy, self.device = ("toy: ", "cpu") if self.cpu else ("", "cuda")
        if not self.cpu and not torch.cuda.is_available():
            raise UserError(f"torch {torch.__version__} finds no GPU; --dry-run tests the script on a CPU.")
        self.deadline = args.ends - RESERVE_S
        self.dtype: Literal["float32", "bfloat16"] = "float32" if self.cpu else "bfloat16"
        self.console = Console(width=150, highlight=False)
        self.bars: list[Bar] = []
        environment = machine.environment(sys.argv) | {"cuda": torch.version.cuda}
        self.found: JsonObject = {"toy": self.cpu, "simulated": SIMULATED, "environment": environment}
        self.found |= {"bars": [], "errors": {}}
        others = runner.read(args.out / "gpu.json")
        if "environment" in others and (theirs := _gpu(others)) != (ours := _gpu(self.found)):
            raise UserError(f"{args.out} has figures of {theirs}, and this is {ours}; name another folder by --out.")
        probed = runner.read(runner.file_of(args.out, "probe")).get(f"{self.toy}probe", "not probed")
        self.probe: tuple[probe.Probe | None, str | None] = (None, probed)
        if isinstance(probed, dict):
            self.probe = (probe.Probe(**probed), None)
        self.layers: JsonObject = {}  # the description of the layers that was printed last
        self._pool: ModelPool | None = None  # of the last race

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    def keep(self, name: str, value: Any) -> None:
        """Store a result and write all results to the file."""
        self.found[self.toy + name] = value
        self.save()

    def save(self) -> None:
        runner.write(self.file, self.found)

    def bar(self, what: str, found: Ratio | float | None, *, beside: str = "", doubt: str | None = None) -> None:
        """Compare a measurement with its required figure, if it has one.

        The interval of a ratio decides; a count or share decides by itself. `doubt`: why the verdict is inconclusive.
        """
        if what not in REQUIRED:
            return
        asked, most = REQUIRED[what]
        if isinstance(found, Ratio):
            value, low, high = found.value, found.ci_low, found.ci_high
            ci = (low, high)
            doubt = doubt or verdict_words.too_few(found.units)
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

    @property
    def current(self) -> ModelPool:
        """The pool of the last race."""
        assert self._pool is not None
        return self._pool

    def plan(
        self,
        weights: str,
        methods: Sequence[str],
        size: int,
        *,
        prompt: int = 768,
        new: int = 128,
        batching: Batching = STATIC,
        blocks: int = BLOCKS,
    ) -> Plan:
        """Return a plan of random prompts on random weights; on a CPU a small one."""
        if self.cpu:
            weights, size, prompt, new, blocks = TOY, min(size, 4), 24, 8, min(blocks, 2)
        return make_plan(
            RunRequest(
                suite=(f"synthetic:{prompt}x{new}",),
                weights=weights,
                method=methods,
                engine="graph",
                batch_size=(size,),
                batching=(batching,),
                limit=blocks * size * (REFILLS if batching == REFILL else 1),
                simulate_acceptance=ACCEPT,
                device=self.device,
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

    def rate_bar(self, what: str, done: Race, arm: str) -> None:
        """Compare the arm's tokens per second of decode time with the bar; show those of wall time beside it."""
        beside = "wall " + interval(done.rate(arm, "tokens", "wall_s"))
        self.bar(f"{what}, decode tokens/s", done.rate(arm, "tokens", "decode_s"), beside=beside, doubt=done.doubt())

    def ratio_bar(self, what: str, done: Race, arm: str, baseline: str) -> None:
        """Compare the ratio of decode times with the bar; show that of wall times beside it."""
        ratio, beside = done.ratio(arm, baseline, "decode_s"), done.ratio(arm, baseline, "wall_s")
        self.bar(f"{what}, decode", ratio, beside=f"wall {interval(beside)}", doubt=done.doubt())

    def gap_bar(self, what: str, done: Race, arm: str) -> None:
        """Compare the host gap with the bar: the share of decode time in which the device waits for the host."""
        busy = done.rate(arm, "device_s", "decode_s")
        value, low, high = (None if v is None else 1 - v for v in (busy.value, busy.ci_high, busy.ci_low))
        self.bar(what, busy._replace(value=value, ci_low=low, ci_high=high), doubt=done.doubt())


def _gpu(found: JsonObject) -> str:
    """Return what results were measured on."""
    if found["toy"]:
        return "stand-ins on a CPU"
    gpu = found["environment"]["gpu"]
    return "a GPU without a name" if gpu is None else str(gpu["name"])


def interval(ratio: Ratio) -> str:
    if ratio.ci_low is None:
        return number(ratio.value)
    return f"{number(ratio.value)} [{number(ratio.ci_low)}, {number(ratio.ci_high)}]"

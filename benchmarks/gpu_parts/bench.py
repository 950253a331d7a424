"""What the steps of benchmarks/gpu.py share: the models, plans, races, and the file of the step that runs."""

import argparse
import gc
import sys
from collections.abc import Sequence
from typing import Any, Literal

import torch
from race import Race, race

from gpu_parts import runner
from gpu_parts.figures import Figure, interval
from mtbench import statistics
from mtbench.errors import UserError
from mtbench.hardware import machine, probe
from mtbench.lineup import simulation
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.models.loading import DTYPES
from mtbench.options.common import Batching
from mtbench.plan.plan import Cell, Plan, RunRequest
from mtbench.plan.request import REFILLS
from mtbench.results import verdicts
from mtbench.statistics import Ratio

LARGE, TOY = "random:qwen2.5-7b", "random:embedded:tiny/ar"
ACCEPT = "0.424"  # 1 + p + p² + p³ = 1.68 tokens per forward, as in the MARS paper at 7B
SIMULATED = f"simulated: random weights, scripted acceptance ({simulation.Acceptance.of(ACCEPT).note})"
MARS = "mars:tau=0.95"
BLOCKS = statistics.UNITS_NEEDED["block"]
STAND_IN = probe.Probe(
    bandwidth_bytes_per_s=1e10, matmul_flop_per_s=1e11, copy_bytes=1, matmul_size=1, cache_bytes=1
)  # of a GPU, in a dry run


class Bench(runner.StepFile):
    """Runs the measurements of steps one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Raises UserError without a GPU, and if the folder has figures of another one."""
        super().__init__(args.out)
        self.toy = args.dry_run
        if not self.toy and not torch.cuda.is_available():
            raise UserError(f"torch {torch.__version__} finds no GPU; --dry-run tests the script on a CPU.")
        self.device = torch.device("cpu" if self.toy else "cuda")
        self.dtype: Literal["float32", "bfloat16"] = "float32" if self.toy else "bfloat16"
        environment = machine.environment(sys.argv) | {"cuda": torch.version.cuda, "simulated": SIMULATED}
        environment["name"] = "stand-ins on a CPU" if self.toy else torch.cuda.get_device_name()
        theirs = runner.read(args.out / "environment.json").get("name", environment["name"])
        if theirs != environment["name"]:
            raise UserError(f"{args.out} has figures of {theirs}, and this is {environment['name']}; see --out.")
        runner.write(args.out / "environment.json", environment)
        self._pool: ModelPool | None = None  # of all timed steps
        self.probed: tuple[probe.Probe | None, str | None] = (STAND_IN, None)

    def figure(self, what: str, found: Ratio | float | None, *, beside: str = "", doubt: str | None = None) -> None:
        """Store and say a figure of the closing table. `doubt`: why it meets or misses no bar."""
        figure = Figure(what, *(found[:3] if isinstance(found, Ratio) else (found,) * 3), beside)
        if isinstance(found, Ratio):
            few = verdicts.too_few(found.units)
            doubt = doubt or (few.text if few else None)
        if not self.toy:
            figure = figure.judged(doubt)
        self.step["figures"].append(figure._asdict())
        self.say(f"{what}: {interval(*figure[1:4])} {figure.verdict}".rstrip())

    # Models and plans.

    def load(self) -> None:
        """Load the model of all timed steps, and probe the GPU."""
        if not self.toy:
            self.probed = probe.probe("cuda", DTYPES[self.dtype])
        self.pool(self.plan(("ar", MARS), 1))

    def pool(self, plan: Plan) -> ModelPool:
        """Return the pool with the plan's models. It loads those that it lacks."""
        if self._pool is None:
            self._pool = ModelPool(plan.request)
        self._pool.load(plan.cells)
        return self._pool

    def free(self) -> None:
        """Free captured batches; their memory is large. Checkpoints and their decoders stay."""
        if self._pool is not None:
            self._pool.methods.clear()
            for engine in self._pool.engines.values():
                getattr(engine, "_batches", {}).clear()
        gc.collect()
        if not self.toy:
            torch.cuda.empty_cache()

    def plan(
        self,
        methods: Sequence[str],
        size: int,
        *,
        prompt: int = 768,
        new: int = 128,
        batching: Batching = "static",
        blocks: int = BLOCKS,
        weights: str = LARGE,
    ) -> Plan:
        """Return a plan of random prompts on random weights; on a CPU a small one."""
        if self.toy:
            size, prompt, new, blocks = min(size, 4), 24, 8, min(blocks, 2)
        return make_plan(
            RunRequest(
                suite=(f"synthetic:{prompt}x{new}",),
                weights=TOY if self.toy else weights,
                method=methods,
                engine=("graph",),
                batch_size=(size,),
                batching=(batching,),
                limit=blocks * size * (REFILLS if batching == "refill" else 1),
                simulate_acceptance=ACCEPT,
                device=self.device.type,
                dtype=self.dtype,
                rounds=1,
            )
        )

    # Races.

    def race(self, plan: Plan, **options: Any) -> tuple[Race, list[str], str | None]:
        """Run a race, store and print its figures; return the race, its arms, and why its figures decide nothing."""
        pool = self.pool(plan)
        described = pool.describe()
        if off := described["kernels_off"]:
            self.say(f"without mtbench's kernels ({off})")
        done = race(pool, plan, described | probe.described(*self.probed, pool.checkpoints), self.deadline, **options)
        arms, [group] = list(done.arms), plan.groups
        ran, planned = len(done.arms[arms[0]].timings), len(group.blocks)
        short = f"its time ended after {ran} of {planned} blocks" if ran < planned else None
        self.keep("session", described)
        self.keep("race", {"dropped": done.dropped(), "arms": {arm: done.figures(arm) for arm in arms}})
        if short:
            self.say(short)
        if done.dropped():
            self.say(f"dropped batches: {dict(done.dropped())}")
        return done, arms, short or done.doubt()

    def rate(self, what: str, done: Race, arm: str, doubt: str | None) -> None:
        """Store the arm's tokens per second of decode time, with those of wall time beside it."""
        beside = "wall " + interval(*done.rate(arm, "tokens", "wall_s")[:3])
        self.figure(f"{what}, decode tokens/s", done.rate(arm, "tokens", "decode_s"), beside=beside, doubt=doubt)

    def ratio(self, what: str, done: Race, arm: str, baseline: str, doubt: str | None) -> None:
        """Store the ratio of decode times, with that of wall times beside it."""
        ratio, beside = done.ratio(arm, baseline, "decode_s"), done.ratio(arm, baseline, "wall_s")
        self.figure(f"{what}, decode", ratio, beside=f"wall {interval(*beside[:3])}", doubt=doubt)

    def gap(self, what: str, done: Race, arm: str, doubt: str | None) -> None:
        """Store the host gap: the share of decode time in which the device waits for the host."""
        busy = done.rate(arm, "device_s", "decode_s")
        value, low, high = (None if v is None else 1 - v for v in (busy.value, busy.ci_high, busy.ci_low))
        self.figure(f"host gap, {what}", busy._replace(value=value, ci_low=low, ci_high=high), doubt=doubt)


def tokens(pool: ModelPool, plan: Plan, cell: Cell, count: int) -> list[list[int]]:
    """Return the tokens of a cell's first answers."""
    [suite], size = plan.suites, cell.batch_size
    requests = plan.requests(suite, range(count))
    batches = (requests[begin : begin + size] for begin in range(0, count, size))
    return [list(answer.token_ids) for batch in batches for answer in pool.decode(cell, batch, room=256)[0]]

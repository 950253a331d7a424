"""Build, check and time the engines on a GPU, within minutes, on a machine with no network, lm-eval or datasets.

    python benchmarks/gpu.py [--minutes 9] [--json FILE] [--only PART]

It runs from a checkout, installed or not, beside torch, triton, transformers, scipy, rich, typer and nvidia-ml-py.
Parts run in order of worth and stop when the time is up; what was not measured says so. Written as it goes, so that
what is done is kept. Arms run next to each other inside every block of prompts, in random order, in one process; ratios
are ratios of totals with the t interval over blocks. Weights are random, acceptance is scripted (mtbench/simulated.py):
speed, not accuracy. `--device cpu` runs the same script on a toy, to see that it works.
"""

import argparse
import dataclasses
import json
import random
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import checkout  # noqa: F401
import torch
from rich.console import Console
from rich.table import Table

from mtbench import energy, kernels, lossless, machine, roofline
from mtbench.generation import Generation, Timing
from mtbench.lab import Lab
from mtbench.models import DTYPES
from mtbench.plan import Cell, Group, Plan, Request, make_plan
from mtbench.statistics import Ratio, ratio_of_totals

SMALL, LARGE = "random:qwen2.5-0.5b", "random:qwen2.5-7b"
TOY = "random:embedded:tiny/ar"
ACCEPT = "0.424"  # 1 + p + p² + p³ = 1.68 tokens per forward, the paper's at 7B
MARS = "mars:tau=0.95"
BLOCKS = 6  # the fewest that have an interval
Race = dict[str, list[list[Timing]]]  # arm -> block -> rounds


@dataclasses.dataclass
class Bar:
    """One figure that somebody asked for."""

    what: str
    asked: str
    value: float | None = None
    ci: tuple[float | None, float | None] = (None, None)
    met: bool | None = None

    @classmethod
    def at_least(cls, what: str, asked: float, value: float | None, ratio: Ratio | None = None) -> "Bar":
        ci = (None, None) if ratio is None else (ratio.ci_low, ratio.ci_high)
        return cls(what, f"≥ {asked:g}", value, ci, None if value is None else value >= asked)

    @classmethod
    def at_most(cls, what: str, asked: float, value: float | None) -> "Bar":
        return cls(what, f"≤ {asked:g}", value, (None, None), None if value is None else value <= asked)


class Bench:
    """What is found, written down after every part."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked, self.began = asked, time.monotonic()
        self.cpu = asked.device == "cpu"
        self.dtype = "float32" if self.cpu else "bfloat16"
        self.bars: list[Bar] = []
        self.found: dict[str, Any] = {"environment": machine.environment(["benchmarks/gpu.py"])}
        self.probe: roofline.Probe | None = None
        self._lab: tuple[str, Lab] | None = None
        self._shape: tuple[str, roofline.Shape] | None = None

    @property
    def left_s(self) -> float:
        return float(60 * self.asked.minutes - (time.monotonic() - self.began))

    def lab(self, plan: Plan) -> Lab:
        """The plan's models, kept for the next plan with the same weights."""
        key = f"{plan.request['weights']}/{plan.request['family']}/{plan.request['dtype']}"
        if self._lab is None or self._lab[0] != key:
            if self._lab is not None:
                self._lab[1].clear()
            self._lab = (key, Lab(plan.request))
        self._lab[1].methods.clear()  # another plan's scripts
        self._lab[1].load(plan)
        return self._lab[1]

    def plan(self, weights: str, **request: Any) -> Plan:
        """A plan on random weights; the toy's on a CPU."""
        if self.cpu:
            weights, request["suite"] = TOY, ("synthetic:24x8",)
        asked: dict[str, Any] = {
            "suite": ("synthetic:768x128",),
            "engine": "graph",
            "accept": ACCEPT,
            "device": self.asked.device,
            "dtype": self.dtype,
            "rounds": 1,
        }
        return make_plan(Request(weights=weights, **{**asked, **request}))

    def race(self, plan: Plan, group: Group, limit_s: float, blocks: int = BLOCKS) -> Race:
        """Every arm on every block, in random order, at least once and then until the time is up; warmed up before."""
        lab, suite = self.lab(plan), plan.suites[0]
        cells = [plan.cell(name) for name in group.cells]
        room = max(len(i.prompt_ids) for i in suite.items) + suite.max_new_tokens
        found: Race = {cell.arm: [[] for _ in group.blocks[:blocks]] for cell in cells}

        def run(cell: Cell, block: Sequence[int], budget: int) -> Timing:
            prompts = [suite.items[i].prompt_ids for i in block]
            return lab.decode(cell, prompts, budget, items=block, room=room)[1]

        for _ in range(6):
            warm = [run(cell, group.blocks[0][: group.batch_size], min(16, suite.max_new_tokens)) for cell in cells]
            if not any(timing.preparation_s for timing in warm):
                break
            for cell, timing in zip(cells, warm, strict=True):
                prepared = self.found.setdefault("preparation_s", {})
                prepared[cell.cell] = prepared.get(cell.cell, 0.0) + timing.preparation_s
        ends, shuffler = time.monotonic() + limit_s, random.Random(group.batch_size)
        for round_ in range(3):
            for number, block in enumerate(group.blocks[:blocks]):
                if round_ and time.monotonic() > ends:
                    return {arm: [r for r in rounds if r] for arm, rounds in found.items()}
                for cell in shuffler.sample(cells, len(cells)):
                    found[cell.arm][number].append(run(cell, block, suite.max_new_tokens))
        return found

    def note(self, name: str, race: Race, weights: str, judged: dict[str, int]) -> dict[str, Any]:
        """Figures of every arm of a race."""
        noted = {arm: self._arm(blocks, weights, judged.get(arm, 1)) for arm, blocks in race.items()}
        self.found[name] = noted
        return noted

    def _arm(self, blocks: list[list[Timing]], weights: str, judged: int) -> dict[str, Any]:
        timings = [t for rounds in blocks for t in rounds]

        def total(name: str) -> float:
            return sum(getattr(t, name) or 0.0 for t in timings)

        decode_s, forwards = total("decode_s"), total("batch_forwards")
        figures: dict[str, Any] = {
            "rows": timings[0].rows,
            "items": timings[0].items,
            "tokens_per_s": total("tokens") / total("wall_s"),
            "blocks": len(blocks),
            "samples": len(timings),
        }
        if not forwards:
            return figures
        figures |= {
            "decode_tokens_per_s": total("tokens") / decode_s,
            "tokens_per_forward": total("tokens") / total("row_forwards"),
            "utilisation": total("row_forwards") / sum(t.rows * (t.batch_forwards or 0) for t in timings),
            "step_ms": 1000 * decode_s / forwards,
            "device_ms": 1000 * total("device_s") / forwards,
            "host_gap": 1 - total("device_s") / decode_s,
            "prefill_s": total("prefill_s") / len(timings),
            "miscounted": total("miscounted"),
        }
        if self.probe is not None and self._shape is not None:
            row = timings[0]
            context = row.prompt_tokens / row.items + row.tokens / row.items / 2
            live = figures["utilisation"] * row.rows
            fed = 2 * judged - 1
            least = roofline.floor_s(
                self._shape[1], self.probe, rows=live, positions=fed, judged=judged, context=context
            )
            figures["roofline"] = least / (decode_s / forwards)
        return figures

    def shape(self, lab: Lab, source: str) -> None:
        self._shape = (source, roofline.count(lab.checkpoint(source).model))

    def save(self) -> None:
        self.found["bars"] = [dataclasses.asdict(bar) for bar in self.bars]
        if self.asked.json:
            self.asked.json.write_text(json.dumps(self.found, indent=1, default=str) + "\n")


def decode_ratio(race: Race, arm: str, baseline: str, name: str = "decode_s") -> Ratio:
    """How much less time the arm takes than the baseline, by block."""

    def by_block(which: str) -> list[float]:
        return [sum(getattr(t, name) for t in rounds) / len(rounds) for rounds in race[which]]

    return ratio_of_totals([by_block(baseline)], [by_block(arm)])


# ---- the parts, in order of worth


def probe(bench: Bench) -> None:
    """What this GPU can do."""
    bench.probe, reason = roofline.probe(bench.asked.device, DTYPES[bench.dtype])
    bench.found["probe"] = dataclasses.asdict(bench.probe) if bench.probe else reason


def operations(bench: Bench) -> None:
    """Every kernel against its plain version in float64, and its microseconds."""
    device, dtype = bench.asked.device, DTYPES[bench.dtype]
    generator = torch.Generator(device).manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def apart(got: torch.Tensor, want: torch.Tensor) -> float:
        return float((got.double() - want).norm() / want.norm())

    found = {}
    for rows, width in ((1, 1), (16, 1), (16, 7)) if not bench.cpu else ((1, 1), (2, 7)):
        slots, heads, keys, size = 1024, 28, 4, 128
        key, value = (noise(rows, slots, keys, size).transpose(1, 2) for _ in range(2))
        query = noise(rows, width, heads, size).transpose(1, 2)
        length = torch.randint(slots // 2, slots, (rows,), generator=generator, device=device)
        last = length[:, None] - width + torch.arange(width, device=device)
        mask = torch.arange(slots, device=device) <= last[:, :, None]
        bias = torch.zeros(mask.shape, device=device, dtype=torch.float64).masked_fill_(~mask, float("-inf"))
        folded = bias.repeat(1, heads // keys, 1)[:, None]
        want = kernels.attend_plain(query.double(), key.double(), value.double(), folded, size**-0.5)
        if not bench.cpu:
            inputs = (query, key, value, mask, length, size**-0.5)
            found[f"attend {rows}x{width}"] = (apart(kernels.attend(*inputs), want), micros(kernels.attend, *inputs))
    for rows in (1, 16, 64):
        logits = noise(rows, 1, 152064 if not bench.cpu else 512)
        choice, _, total = kernels.judge(logits)
        assert torch.equal(choice, logits.argmax(-1)), "judge takes another token than argmax"
        want = logits.double().logsumexp(-1)
        found[f"judge {rows}"] = (apart(total, want), micros(kernels.judge, logits))
    weight = noise(18944 if not bench.cpu else 256, 3584 if not bench.cpu else 64)
    for rows in (1, 16, 112):
        x = noise(rows, weight.shape[1])
        got = kernels.linear(x, weight)
        assert torch.equal(got[:1], kernels.linear(x[:1], weight)), "linear depends on its neighbours"
        found[f"linear {rows}"] = (apart(got, x.double() @ weight.double().T), micros(kernels.linear, x, weight))
        found[f"library {rows}"] = (0.0, micros(torch.nn.functional.linear, x, weight))
    bench.found["operations"] = {name: {"error": error, "us": us} for name, (error, us) in found.items()}
    worst = max(error for error, _ in found.values())
    bench.bars.append(Bar.at_most("kernels against float64, worst relative error", 1e-2, worst))


def micros(function: Callable[..., Any], *args: Any) -> float:
    """Microseconds of device time, the median of several (on a CPU of wall time)."""
    spans = []
    for _ in range(20):
        if not args[0].is_cuda:
            began = time.perf_counter()
            function(*args)
            spans.append(time.perf_counter() - began)
            continue
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        function(*args)
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end) / 1000)
    return 1e6 * sorted(spans)[len(spans) // 2]


def equality(bench: Bench) -> None:
    """In float32, on the embedded model: every engine, batch size and batching says the same, token for token."""
    torch.backends.cuda.matmul.allow_tf32 = False
    arms = [f"ar:on=mars,engine={e}" for e in ("eager", "graph", "invariant")]
    arms += [f"mars:tau={t},engine={e}" for t in (1, 0.8) for e in ("eager", "graph", "invariant")]
    arms += [f"mars:tau=0.8,cache=block,engine={e}" for e in ("eager", "graph")]
    request = Request(
        method=arms,
        family="tiny",
        batch_size=(1, 8),
        batching=("static", "refill"),
        limit=16,
        device=bench.asked.device,
        dtype="float32",
        rounds=1,
    )
    plan = make_plan(request)
    lab, suite = bench.lab(plan), plan.suites[0]
    said: dict[Any, list[list[list[int]]]] = {}
    items = range(8)
    for cell in plan.cells:
        prompts = [suite.items[i].prompt_ids for i in items]
        step = len(prompts) if cell.batching == "refill" else cell.batch_size
        answers: list[Generation] = []
        for begin in range(0, len(prompts), step):
            some = prompts[begin : begin + step]
            answers += lab.decode(cell, some, 64, room=256)[0]
        policy = cell.options.get("cache"), cell.options.get("tau") if cell.options.get("tau") != 1 else None
        said.setdefault(policy if policy[0] == "block" else policy[1], []).append([g.token_ids for g in answers])
    different = {str(k): sum(a != v[0] for a in v) for k, v in said.items() if str(k) != "('block', 0.8)"}
    blocks = said[("block", 0.8)]  # the paper's cache answers otherwise in another batch: engines are compared alone
    different["block by engine"] = sum(a != b for a, b in zip(blocks[::2], blocks[1::2], strict=True))
    bench.found["equality"] = different
    bench.bars.append(Bar.at_most("cells that differ in float32", 0, sum(different.values())))


def grade(bench: Bench) -> None:
    """In bfloat16: tokens by every engine under teacher forcing by transformers' modules, and alone or in a batch."""
    plan = bench.plan(SMALL, suite=("synthetic:64x128",), method=("ar:engine=graph|invariant",), batch_size=(1, 16))
    lab, suite = bench.lab(plan), plan.suites[0]
    prompts = [i.prompt_ids for i in suite.items[: 16 if not bench.cpu else 4]]
    said: dict[tuple[str | None, int], list[list[int]]] = {}
    for cell in plan.cells:
        starts = range(0, len(prompts), cell.batch_size)
        batches = [prompts[i : i + cell.batch_size] for i in starts]
        answers = [g for b in batches for g in lab.decode(cell, b, suite.max_new_tokens, room=256)[0]]
        said[cell.engine, cell.batch_size] = [g.token_ids for g in answers]
    found: dict[str, dict[str, Any]] = {}
    for cell in (c for c in plan.cells if c.batch_size > 1):
        together = said[cell.engine, cell.batch_size]
        pairs = list(zip(prompts, together, strict=True))
        judge = lab.lane(cell.on, cell.checkpoints[cell.on], "eager")
        short = [v for pair in pairs for v in lossless.shortfalls(judge, *pair, 7).values()]
        found[str(cell.engine)] = {
            "identical alone and in a batch": sum(a == b for a, b in zip(said[cell.engine, 1], together, strict=True))
            / len(prompts),
            "near_ties": len(short) / sum(map(len, together)),
            "worst_margin": max(short, default=0.0),
        }
    bench.found["grade"] = found
    invariant = found["invariant"]["identical alone and in a batch"]
    bench.bars.append(Bar.at_least("invariant: share identical at batch 1 and 16, bf16", 1.0, invariant))
    worst = max(f["worst_margin"] for f in found.values())
    bench.bars.append(Bar.at_most("bf16 tokens judged by transformers' modules: worst margin", 0.5, worst))


def joules(bench: Bench) -> None:
    """Energy per token on 7B shapes at batch 4, by the GPU's counter, ten seconds an arm."""
    gpu = machine.gpu() if not bench.cpu else None
    plan = bench.plan(LARGE, suite=("synthetic:768x128",), method=("ar", MARS), batch_size=(4,), limit=24)
    lab = bench.lab(plan)
    if gpu is not None:
        bench.found["energy"] = {cell.arm: energy.window(gpu, plan, lab, cell) for cell in plan.cells}


def ar_small(bench: Bench) -> None:
    """AR on 0.5B shapes at batch 1."""
    plan = bench.plan(SMALL, method=("ar",), batch_size=(1,), limit=BLOCKS)
    bench.shape(bench.lab(plan), plan.cells[0].checkpoints["ar"])
    noted = bench.note("0.5B b1", bench.race(plan, plan.groups[0], 4), SMALL, {})
    ar = noted[plan.cells[0].arm]
    bench.bars.append(Bar.at_least("AR 0.5B, batch 1, tokens/s", 1200, ar["decode_tokens_per_s"]))
    bench.bars.append(Bar.at_most("host gap, 0.5B", 0.15, ar["host_gap"]))


ASKED = {1: 240, 4: 930, 16: 3500}
STATIC = {4: 1.50, 8: 1.45, 16: 1.40}
REFILL = {4: 1.60, 8: 1.57, 16: 1.50}
BLOCK = {4: 1.10, 16: 1.40}


def large_static(bench: Bench) -> None:
    """AR, MARS and the paper's block cache on 7B shapes, static batches."""
    for size in (1, 4, 8, 16):
        blocks = [f"{MARS},cache=block,cache_block={c}" for c in (8, 16, 32)] if size in BLOCK else []
        plan = bench.plan(LARGE, method=("ar", MARS, *blocks), batch_size=(size,), limit=BLOCKS * size)
        bench.shape(bench.lab(plan), plan.cells[0].checkpoints["ar"])
        race = bench.race(plan, plan.groups[0], 6)
        arms = [cell.arm for cell in plan.cells]
        noted = bench.note(f"7B b{size} static", race, LARGE, {arms[1]: 4})
        if size in ASKED:
            value = noted[arms[0]]["decode_tokens_per_s"]
            bench.bars.append(Bar.at_least(f"AR 7B, batch {size}, tokens/s", ASKED[size], value))
        if size in STATIC:
            ratio = decode_ratio(race, arms[1], arms[0])
            bench.bars.append(Bar.at_least(f"MARS over AR, batch {size}, static", STATIC[size], ratio.value, ratio))
        if size in BLOCK:
            ratio = min((decode_ratio(race, arms[1], arm) for arm in arms[2:]), key=lambda r: r.value or 0)
            bench.bars.append(Bar.at_least(f"cursor over best block, batch {size}", BLOCK[size], ratio.value, ratio))
        if size == 4:
            bench.bars.append(Bar.at_most("host gap, 7B", 0.03, noted[arms[0]]["host_gap"]))
        bench.save()


def large_refill(bench: Bench) -> None:
    """AR and MARS on 7B shapes with refilled slots."""
    for size in (16, 4, 8):
        if bench.left_s < 45:
            return
        limit = 2 * BLOCKS * size * 8 // 2
        plan = bench.plan(LARGE, method=("ar", MARS), batch_size=(size,), batching=("refill",), limit=limit)
        race = bench.race(plan, plan.groups[0], 0)
        arms = [cell.arm for cell in plan.cells]
        bench.note(f"7B b{size} refill", race, LARGE, {arms[1]: 4})
        ratio = decode_ratio(race, arms[1], arms[0])
        asked = REFILL[size]
        bench.bars.append(Bar.at_least(f"MARS over AR, batch {size}, refill", asked, ratio.value, ratio))
        bench.save()


def outside(bench: Bench, cache: str, asked: float, blocks: int) -> None:
    methods = ("ar", f"hf-generate:cache={cache}")
    plan = bench.plan(LARGE, suite=("synthetic:768x64",), method=methods, batch_size=(4,), limit=24)
    race = bench.race(plan, plan.groups[0], 0, blocks)
    arms = [cell.arm for cell in plan.cells]
    bench.note(f"hf-generate {cache}", race, LARGE, {})
    ratio = decode_ratio(race, arms[0], arms[1], "wall_s")
    bench.bars.append(Bar.at_least(f"ar graph over hf-generate {cache}, 7B batch 4", asked, ratio.value, ratio))


def outside_dynamic(bench: Bench) -> None:
    """transformers' own generate with its dynamic cache, the regime that papers measure in."""
    outside(bench, "dynamic", 5.0, BLOCKS)


def outside_static(bench: Bench) -> None:
    """transformers' own generate with its static cache, which it compiles."""
    outside(bench, "static", 1.3, BLOCKS)


def prefill(bench: Bench) -> None:
    """Prefill of 8 prompts of 512 tokens on 7B shapes, against the matrix peak."""
    plan = bench.plan(LARGE, suite=("synthetic:512x2",), method=("ar",), batch_size=(8,), limit=48)
    lab = bench.lab(plan)
    bench.shape(lab, plan.cells[0].checkpoints["ar"])
    race = bench.race(plan, plan.groups[0], 2)
    timings = [t for rounds in next(iter(race.values())) for t in rounds]
    seconds = sum(t.prefill_s or 0 for t in timings) / len(timings)
    assert bench._shape is not None
    flops = 2 * bench._shape[1].body * 8 * 511
    share = flops / seconds / bench.probe.matmul_flop_per_s if bench.probe else None
    bench.found["prefill"] = {"seconds": seconds, "share_of_matmul_peak": share}
    bench.bars.append(Bar.at_least("prefill 7B, 8 x 512, share of the matrix peak", 0.5, share))


def sweep(bench: Bench) -> None:
    """At which batch size MARS stops paying, on 7B and 0.5B shapes."""
    for weights, name in ((LARGE, "7B"), (SMALL, "0.5B")):
        for size in (1, 2, 4, 8, 16, 32, 64, 128):
            if bench.left_s < 30:
                return
            methods = ("ar", MARS)
            plan = bench.plan(weights, suite=("synthetic:512x48",), method=methods, batch_size=(size,), limit=2 * size)
            lab = bench.lab(plan)
            bench.shape(lab, plan.cells[0].checkpoints["ar"])
            race = bench.race(plan, plan.groups[0], 0, blocks=2)
            arms = [cell.arm for cell in plan.cells]
            noted = bench.note(f"sweep {name} b{size}", race, weights, {arms[1]: 4})
            noted["speedup"] = decode_ratio(race, arms[1], arms[0]).value
            bench.save()


ORDER = (
    probe,
    operations,
    equality,
    ar_small,
    grade,
    large_static,
    outside_dynamic,
    prefill,
    large_refill,
    joules,
    sweep,
    outside_static,
)
PARTS = {part.__name__: part for part in ORDER}


@contextmanager
def reported(bench: Bench, name: str, console: Console) -> Iterator[None]:
    """A part that breaks costs itself."""
    began = time.monotonic()
    console.print(f"{name}: {PARTS[name].__doc__}")
    try:
        yield
    except Exception as error:
        bench.found.setdefault("errors", {})[name] = traceback.format_exc()
        console.print(f"  failed: {type(error).__name__}: {error}", markup=False)
    console.print(f"  {time.monotonic() - began:.0f} s")
    bench.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--only", choices=list(PARTS), action="append", help="one part; repeats")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    bench, console = Bench(parser.parse_args()), Console(width=110)
    for name, part in PARTS.items():
        if bench.asked.only and name not in (*bench.asked.only, "probe"):
            continue
        if bench.left_s < 10:
            console.print(f"{name}: no time left")
            continue
        with reported(bench, name, console):
            part(bench)
    title = "a toy on a CPU: what these figures are called is not what they are" if bench.cpu else "bars"
    table = Table("what", "asked", "found", "95 % interval", "", title=title)
    for bar in bench.bars:
        found = "not measured" if bar.value is None else f"{bar.value:.4g}"
        interval = f"{bar.ci[0]:.3f} – {bar.ci[1]:.3f}" if bar.ci[0] is not None and bar.ci[1] is not None else ""
        table.add_row(bar.what, bar.asked, found, interval, {True: "met", False: "missed", None: ""}[bar.met])
    console.print(table)


if __name__ == "__main__":
    main()

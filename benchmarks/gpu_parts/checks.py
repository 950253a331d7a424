"""Parts that check: the machine, kernels against float64, engines against each other, tokens against transformers."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from gpu_parts.bench import SMALL, Bench
from mtbench import kernels, sampling
from mtbench.doctor.decoding import decoded
from mtbench.doctor.products import SHAPES
from mtbench.errors import first_line, loses_device
from mtbench.hardware import probe
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.doctor.cases import SMALL as TINY
from mtbench.doctor.cases import Noise, Sizes, cases
from mtbench.models.loading import DTYPES
from mtbench.runs import lossless_check
from mtbench.runs.directory import JsonObject
from mtbench.runs.plan import RunRequest
from mtbench.runs.planner import make_plan

LOSSLESS = ("speculative", "prompt-lookup", "jacobi", "lookahead", "mars-speculative", "mars-selfspec")
QWEN_7B = SHAPES["7B"]._replace(slots=1024)
POSITIONS = (1, 16, 112)
STAND_IN = probe.Probe(
    bandwidth_bytes_per_s=1e10, matmul_flop_per_s=1e11, copy_bytes=1, matmul_size=1, cache_bytes=1
)  # of a GPU, in a dry run

Call = Callable[[], Any]


def probe_machine(bench: Bench) -> None:
    """The machine, and its GPU's copy and matrix product rates."""
    probed, reason = (STAND_IN, None) if bench.cpu else probe.probe(bench.device, DTYPES[bench.dtype])
    bench.keep("probe", dataclasses.asdict(probed) if probed else reason)
    bench.say(f"  {bench.found['environment']}")
    bench.say(f"  {probed or reason}")


def operations(bench: Bench) -> None:
    """Every kernel against its plain version in float64, and its microseconds.

    Raises RuntimeError with what is wrong, and with what there was no time for, at the end.
    """
    checks, wrong = Operations(bench), []
    sizes, rows = (TINY, (2,)) if bench.cpu else (QWEN_7B, (1, 4, 8, 16, 32))
    todo: dict[str, Call] = {"products": partial(products, checks)}
    todo |= {f"layer {count}": partial(layer, checks, count, sizes) for count in POSITIONS}
    todo |= {f"attention {n}x{width}": partial(attention, checks, n, width) for width in (1, 7) for n in rows}
    todo["choices"] = partial(choices, checks)
    for head in (64, 80, 96, 256):
        todo[f"heads of {head}"] = partial(layer, checks, 16, sizes._replace(head=head), ("attend", "rotate"))
    for name, check in todo.items():
        try:
            check()
        except Exception as error:
            if loses_device(error):
                raise
            wrong.append(f"{name}: {first_line(error)}")
        bench.keep("operations", checks.found)
    worst = max((result["error"] for result in checks.found.values()), default=math.inf)
    bench.bar("kernels against float64, worst relative error", worst)
    if wrong:
        raise RuntimeError("; ".join(wrong))


class Operations:
    """Makes random inputs, and records the errors and times of operations."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.cpu, self.device = bench, bench.cpu, torch.device(bench.device)
        self.dtype, self.generator = DTYPES[bench.dtype], torch.Generator(self.device).manual_seed(0)
        self.found: dict[str, JsonObject] = {}

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device).to(self.dtype)

    def record(self, name: str, calls: Sequence[Call], expected: Any) -> Any:
        """Record the largest error of the first call's tensors and the time per call; return the first call's result.

        `expected`: as the result, in float64. Raises TimeoutError if the part's time is over.
        """
        if time.monotonic() > self.bench.deadline:
            raise TimeoutError("the time is over")
        result = calls[0]()
        error = max(map(_error, tree_leaves(result), tree_leaves(expected)))
        self.found[name] = {"error": error, "us": micros(self.device, calls)}
        self.bench.say(f"  {name}: {self.found[name]['us']:.1f} us, relative error {error:.1g}")
        return result


def _error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error; of a NaN and of a wrong token, infinity."""
    error = float((found.double() - expected).norm() / expected.norm())
    wrong = error > 0 and not found.is_floating_point()
    return math.inf if wrong or math.isnan(error) else error


def layer(checks: Operations, count: int, sizes: Sizes, names: tuple[str, ...] = ("",)) -> None:
    """Check and time the operations of a layer whose names begin so, on `count` positions.

    Raises RuntimeError if a GPU has no kernels for these heads.
    """
    run = kernels.PLAIN if checks.cpu else kernels.operations(checks.noise(1), sizes.head)
    if run is None:
        raise RuntimeError(f"no kernels: {kernels.off() or 'not supported'}")
    for case in cases(run, Noise(checks.dtype, checks.device), count, sizes):
        if case.name.startswith(names):
            checks.record(f"{case.name} d{sizes.head}", [case.call], case.expected)


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
        from mtbench.kernels import triton_kernels

        attends = {name: partial(triton_kernels.attend, split=name == "split") for name in ("split", "walked")}
    for name, attend in attends.items():
        calls = [partial(attend, query, *pair, mask, length, size**-0.5) for pair in pairs]
        checks.record(f"attend {rows}x{width} {name}", calls, expected)


def choices(checks: Operations) -> None:
    """Check and time the choice of tokens, greedy and sampled. Greedy, it is the lowest id of the largest logits.

    (bfloat16 has many equal logits.)
    """
    ids = torch.arange(152064 if not checks.cpu else 512, device=checks.device)
    for rows in (1, 16, 64):
        logits, keys = checks.noise(rows, 1, len(ids)), (ids[:rows], ids[:rows, None])
        largest, logsumexp = logits.double().amax(-1), logits.double().logsumexp(-1)
        lowest = torch.where(logits == largest[..., None], ids, len(ids)).amin(-1)
        temperature = torch.linspace(0.5, 1.5, rows, dtype=torch.double, device=checks.device)
        drawn = sampling.sampled(logits, temperature, *keys).argmax(-1)
        for name, at, token in (("greedy", None, lowest), ("sampled", temperature, drawn)):
            call = partial(kernels.choose_logsumexp, logits, at, *keys)
            checks.record(f"{name} {rows} of {len(ids)}", [call], (token.double(), largest, logsumexp))


def products(checks: Operations) -> None:
    """Check and time the batch-invariant product and the library's. Raises RuntimeError if it is not invariant."""
    for name, outputs, inputs in (("up", 18944, 3584), ("down", 3584, 18944)):
        weight = checks.noise(outputs, inputs) if not checks.cpu else checks.noise(outputs // 64, inputs // 64)
        for rows in POSITIONS:
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

    All lossless methods of one checkpoint are compared too. Raises TimeoutError if the part's time is over.
    """
    engines = "engine=eager|graph|invariant"
    drafting = [f"{name}:on=mars,{engines}" for name in LOSSLESS]
    request = RunRequest(
        method=(
            *(f"ar:on=mars,{engines}", f"mars:tau=1|0.8,{engines}", "mars:tau=0.8,cache=block,engine=eager|graph"),
            *(*drafting, f"ar:on=medusa,{engines}", f"medusa:{engines}"),
            *(f"ar:{engines}", f"eagle:tree=1|3x2,{engines}", f"dflash:{engines}"),
        ),
        family="tiny",
        batch_size=(1, 4),
        batching=("static", "refill"),
        limit=2 if bench.cpu else 8,
        device=bench.device,
        dtype="float32",
        rounds=1,
    )
    plan = make_plan(request)
    tokens: dict[str, list[list[Sequence[int]]]] = {}  # policy -> cell -> prompt -> token ids
    for number, (cell, answers) in enumerate(decoded(plan, bench.pool(plan), 6 if bench.cpu else 48), start=1):
        if time.monotonic() > bench.deadline:
            raise TimeoutError(f"the time was over after {number} of {len(plan.cells)} cells")
        policy = f"{cell.claims} on {cell.on}"
        if cell.options.get("cache") == "block":  # its tokens depend on the batch, so only engines are compared
            policy = f"block cache, batch {cell.batch_size}, {cell.batching}"
        tokens.setdefault(policy, []).append(answers)
    different = {policy: sum(cell != cells[0] for cell in cells) for policy, cells in tokens.items()}
    bench.keep("equality", {"cells": {policy: len(cells) for policy, cells in tokens.items()}, "different": different})
    bench.bar("cells that differ in float32", sum(different.values()))


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
            requests = plans[0].requests(first, range(count), max_new_tokens=suite.max_new_tokens)
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
    bench.bar("invariant: share identical at batch 1 and 16, bf16", invariant)
    worst = max(result["worst_margin"] for result in found.values())
    bench.bar("bf16 tokens re-scored: worst margin", worst)

"""Parts that check: the machine, kernels against float64, engines against each other, tokens against transformers."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from gpu_parts.bench import REFILL, SMALL, Bench
from mtbench import kernels
from mtbench.hardware import probe
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.models.loading import DTYPES
from mtbench.runs import lossless_check
from mtbench.runs.directory import JsonObject
from mtbench.runs.plan import RunRequest
from mtbench.runs.planner import make_plan

LOSSLESS = ("speculative", "prompt-lookup", "jacobi", "lookahead", "mars-speculative", "mars-selfspec")

Call = Callable[[], Tensor]


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
    bench.bar("kernels against float64, worst relative error", worst)


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
        from mtbench.kernels import triton_kernels

        attends = {name: partial(triton_kernels.attend, split=name == "split") for name in ("split", "walked")}
    for name, attend in attends.items():
        calls = [partial(attend, query, *pair, mask, length, size**-0.5) for pair in pairs]
        checks.record(f"attend {rows}x{width} {name}", calls, expected)


def argmaxes(checks: Operations) -> None:
    """Raise RuntimeError if a choice is not the lowest id of the largest logits. (bfloat16 has many equal logits.)"""
    vocabulary = 152064 if not checks.cpu else 512
    for rows in (1, 16, 64):
        logits = checks.noise(rows, 1, vocabulary)
        choice, largest, _ = _greedy(logits)
        best = logits == logits.amax(-1, keepdim=True)
        lowest = torch.where(best, torch.arange(vocabulary, device=checks.device), vocabulary).amin(-1)
        if not (torch.equal(choice, lowest) and torch.equal(largest, logits.amax(-1).float())):
            raise RuntimeError("choose_logsumexp does not choose the lowest id of the largest logits")
        checks.record(f"argmax {rows}", [partial(_logsumexp, logits)], logits.double().logsumexp(-1))


def _greedy(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    none = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return kernels.choose_logsumexp(logits, None, none, none[:, None])


def _logsumexp(logits: Tensor) -> Tensor:
    return _greedy(logits)[2]


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
            *(f"ar:{engines}", f"eagle:tree=1|3x2,{engines}", f"dflash:{engines}"),
        ),
        family="tiny",
        batch_size=(1, 4),
        batching=("static", "refill"),
        limit=2 if bench.cpu else 8,
        device=bench.args.device,
        dtype="float32",
        rounds=1,
    )
    plan = make_plan(request)
    pool, [suite] = bench.pool(plan), plan.suites
    requests = plan.requests(suite, range(len(suite.items)), max_new_tokens=6 if bench.cpu else 48)
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

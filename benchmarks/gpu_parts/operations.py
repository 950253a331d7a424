"""The step `operations`: every kernel and product against its definition in float64, and its microseconds."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_parts.bench import Bench
from gpu_parts.figures import FIRST_CONTACT
from mtbench import kernels
from mtbench.doctor.cases import SMALL, Noise, Sizes, cases
from mtbench.errors import first_line, loses_device
from mtbench.hardware import probe
from mtbench.models.loading import DTYPES

QWEN_7B = Sizes(3584, 18944, 28, 4, 128, slots=1024)
PRODUCTS = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}  # outputs, inputs
PRODUCTS |= {"head": (152064, 3584)}
POSITIONS = (1, 16, 112)
OTHER_HEADS = (64, 80, 96, 256)  # sizes of a head; those of a 7B model have 128
BEYOND_CACHE = 400_000_000  # bytes of a product's weights, so that none is read from the GPU's cache
CALLS, REPETITIONS = 12, 5  # of an operation that is timed, in a CUDA graph

Call = Callable[[], Any]
Operation = tuple[str, Sequence[Call], Callable[[], float]]  # name, calls to time one after the other, error


def check(bench: Bench) -> None:
    """Check and time the operations, row by row; name wrong ones. Raises RuntimeError on a GPU without our kernels."""
    noise, rows, wrong = Noise(DTYPES[bench.dtype], bench.device), dict[str, Any](), list[str]()
    missing: str | None = "operations are missing"
    if not bench.toy and not kernels.ours(noise(1)):
        raise RuntimeError(f"mtbench's kernels do not run: {kernels.off()}")
    try:
        for name, calls, error in _operations(noise, toy=bench.toy):
            bench.in_time(f"{len(rows)} operations")
            row = rows[name] = {"error": math.inf, "us": None, "first_contact_us": FIRST_CONTACT["us"].get(name)}
            try:
                row["error"] = error()
                row["us"] = micros(bench.device, calls)
            except Exception as failure:
                if loses_device(failure):
                    raise
                wrong.append(f"{name}: {first_line(failure)}")
            bench.keep("operations", rows)
        missing = None
    finally:
        worst = max((math.inf if math.isnan(row["error"]) else row["error"] for row in rows.values()), default=None)
        bench.say(f"{len(rows)} operations")
        bench.figure("kernels against float64, worst relative error", worst, doubt=missing)
        if wrong:
            bench.say(f"wrong: {'; '.join(wrong)}")


def _operations(noise: Noise, *, toy: bool) -> Iterator[Operation]:
    """Yield the operations of a layer at each number of positions, products, and what depends on the size of heads."""
    sizes = SMALL if toy else QWEN_7B
    for count in POSITIONS:
        for case in cases(noise, count, sizes):
            yield f"{case.name} d{sizes.head}", [case.once], case.error
    for name, (outputs, inputs) in PRODUCTS.items():
        yield from _products(noise, name, *((outputs // 64, inputs // 64) if toy else (outputs, inputs)), toy=toy)
    for head in OTHER_HEADS:
        for case in cases(
            noise, 16, SMALL._replace(heads=sizes.heads, key_heads=sizes.key_heads, head=head, slots=sizes.slots)
        ):
            if case.name.startswith(("attend", "rotate")):
                yield f"{case.name} d{head}", [case.once], case.error


def _products(noise: Noise, name: str, outputs: int, inputs: int, *, toy: bool) -> Iterator[Operation]:
    """Yield a product by the library and by the batch-invariant kernel. Weights take turns, as in a model."""
    weights = [noise(outputs, inputs) for _ in range(1 if toy else max(1, BEYOND_CACHE // (2 * outputs * inputs)))]

    def error(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> float:
        found, wide = linear(x, weights[0]), x.double() @ weights[0].double().T
        if linear is kernels.linear and not torch.equal(found[:1], linear(x[:1], weights[0])):
            raise RuntimeError("the product of a row depends on the other rows")
        return float((found.double() - wide).norm() / wide.norm())

    for count in POSITIONS:
        x = noise(count, inputs)
        for kind, linear in (("library", torch.nn.functional.linear), ("invariant", kernels.linear)):
            yield (
                f"{name} {count} {kind}",
                [partial(linear, x, weight) for weight in weights],
                partial(error, linear, x),
            )


def micros(device: torch.device, calls: Sequence[Call]) -> float:
    """Return the median microseconds of a call; on a GPU in a CUDA graph of several, so without launches."""
    several = [*calls] * max(1, CALLS // len(calls))

    def run() -> None:
        for call in several:
            call()

    run()
    once: Callable[[], None] = run
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        once = graph.replay
    laps = sorted(probe.laps_s(device, once, REPETITIONS, warm_up_s=0.0))
    return 1e6 * laps[len(laps) // 2] / len(several)

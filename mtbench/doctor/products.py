"""The check of the products that read a model's weights: how close each is to what the GPU could do.

The roofline (mtbench/hardware/probe.py) is the measured speed of memory or of arithmetic, whichever takes longer. A
kernel starts some time after the one before it; the small products of a small model take hardly longer than that.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mtbench import kernels
from mtbench.doctor import gpu
from mtbench.doctor.checks import REPORT, Figures, Finding, Subject, check
from mtbench.document.formatting import listed, percent
from mtbench.hardware import probe
from mtbench.kernels import Norm, Operations
from mtbench.kernels.cases import EPS, Noise, Sizes
from mtbench.models.loading import DTYPES
from mtbench.runs.model_pool import resolve_dtype

SHAPES: Mapping[str, Sizes] = {  # Qwen2.5 (arXiv 2412.15115, table 1)
    "0.5B": Sizes(896, 4864, 14, 2, 64),
    "7B": Sizes(3584, 18944, 28, 4, 128),
}
POSITIONS = (1, 16, 128)
START_S = 2e-6  # from the end of one kernel to the start of the next one
LEAST_SHARE = 0.5  # of the roofline
BEYOND_CACHE = 4  # caches that the copies of a weight fill, so that each is read from memory, as in a model
REPETITIONS, WARM_UP_S = 5, 0.02

Multiply = Callable[[Tensor], object]  # of a weight


class Product(NamedTuple):
    """A product with the copies of its weight, one after the other."""

    name: str
    calls: Sequence[Callable[[], object]]
    moved_bytes: int  # of one call: weight, input and output
    flop: int

    def least_s(self, probed: probe.Probe) -> float:
        """Return the least time of a call by the roofline, with the start of its kernel."""
        return max(self.moved_bytes / probed.most_bytes_per_s, self.flop / probed.matmul_flop_per_s) + START_S


def _of_layer(run: Operations, noise: Noise, sizes: Sizes, cache_bytes: int) -> Iterator[Product]:
    """Yield the products of a layer, each at each number of positions."""
    hidden, inner, heads, key_heads, head, *_ = sizes
    norm, ids = Norm.make(noise(hidden), EPS), torch.arange(max(POSITIONS), device=noise.device)
    table = noise(len(ids), hidden)

    def qkv(count: int, _: int) -> Multiply:
        entering = run.embed(ids[:count], table, norm)[1]
        return lambda weight: run.norm_product(entering, norm, weight)

    def gate_up(count: int, _: int) -> Multiply:
        entering = run.embed(ids[:count], table, norm)[1]
        return lambda weight: run.norm_swiglu(entering, norm, weight)

    def add(count: int, inputs: int) -> Multiply:
        residual, x = noise(count, hidden), noise(count, inputs)
        return lambda weight: run.add_product(residual, x, weight, None, norm)

    shapes: Mapping[str, tuple[int, int, int, Callable[[int, int], Multiply]]] = {  # rows, columns, outputs
        "qkv": ((heads + 2 * key_heads) * head, hidden, (heads + 2 * key_heads) * head, qkv),
        "o": (hidden, heads * head, hidden, add),
        "gate_up": (2 * inner, hidden, inner, gate_up),
        "down": (hidden, inner, hidden, add),
    }
    for name, (rows, columns, outputs, made) in shapes.items():
        element = noise.dtype.itemsize
        weights = noise(1 + math.ceil(BEYOND_CACHE * cache_bytes / (rows * columns * element)), rows, columns)
        weights *= columns**-0.5
        for count in POSITIONS:
            calls = [partial(made(count, columns), weight) for weight in weights]
            moved_bytes = element * (rows * columns + count * (columns + outputs))
            yield Product(f"{name} {count}", calls, moved_bytes, 2 * count * rows * columns)


def _call_s(product: Product, device: torch.device) -> float:
    """Return the seconds of a call, in a CUDA graph of all."""
    for call in product.calls:
        call()  # the first one compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in product.calls:
            call()
    graph.replay()
    laps = sorted(probe.laps_s(device, graph.replay, REPETITIONS, WARM_UP_S))
    return laps[len(laps) // 2] / len(product.calls)


def _products(subject: Subject) -> Figures | str:
    dtype, device = DTYPES[resolve_dtype("auto", subject.device)], torch.device(subject.device)
    probed, reason = gpu.under_load()[1:]
    if probed is None:
        return str(reason)
    found, late = dict[str, dict[str, float]](), False
    for model, sizes in SHAPES.items():
        run = kernels.operations(torch.empty(0, dtype=dtype, device=device), sizes.head)
        if run is None:
            return "mtbench's kernels do not run here: see `operations`"
        for product in _of_layer(run, Noise(dtype, device), sizes, probed.cache_bytes):
            if late := time.monotonic() > subject.until_s:
                break
            spent_s = _call_s(product, device)
            rate, share = product.moved_bytes / spent_s, product.least_s(probed) / spent_s
            found[f"{model} {product.name}"] = {"bytes_per_s": rate, "of_roofline": share}
    if not found:
        return "no time was left; run it again: what is compiled by now need not be compiled again"
    return {"products": found, "memory_bytes_per_s": probed.most_bytes_per_s, "late": late}


@check("products", _products, gpu=True)
def products(products: Mapping[str, Mapping[str, float]], memory_bytes_per_s: float, late: bool) -> Finding:
    """`products`: of each, at so many positions, the bytes moved in a second and the least time over its time."""
    shares = {name: figures["of_roofline"] for name, figures in products.items()}
    fastest = max(figures["bytes_per_s"] for figures in products.values()) / memory_bytes_per_s
    text = f"{len(products)} products reach {percent(min(shares.values()), 0)} to {percent(max(shares.values()), 0)} % "
    text += f"of the roofline, and up to {percent(fastest, 0)} % of the speed of memory"
    text += "; no time was left for the others" if late else ""
    slow = [f"{name} {percent(share, 0)} %" for name, share in shares.items() if share < LEAST_SHARE]
    if slow:
        text += f"; below {percent(LEAST_SHARE, 0)} %: {listed(slow)}"
        return Finding("warn", text, f"figures are right, and mtbench is slower than it should be: {REPORT}")
    return Finding("pass", text)

"""The time of a decode step on a named GPU, estimated part by part from what the step reads, computes and launches.

The roofline (probe.py) is the least time. A step takes longer for reasons that the generated code shows
(benchmarks/codegen.py counts kernels and instructions) and that a profile of one step can confirm or refute
(benchmarks/gpu.py). No GPU has measured these figures yet: expect ±12 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mtbench.hardware.probe import Shape
from mtbench.models import fused_decoder


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What a GPU does at most; rates as probe.py would measure them."""

    name: str
    bandwidth_bytes_per_s: float
    matmul_flop_per_s: float


GPUS: Mapping[str, Gpu] = {  # SXM modules; 90 % of the data sheet's bandwidth, 80 % of its dense bfloat16 rate
    "H100": Gpu(name="H100", bandwidth_bytes_per_s=3.0e12, matmul_flop_per_s=790e12),
    "H200": Gpu(name="H200", bandwidth_bytes_per_s=4.3e12, matmul_flop_per_s=790e12),
}


def named(device: str) -> Gpu | None:
    """Return the GPU with this name, as the driver gives it; None if there are no figures for it."""
    return next((gpu for name, gpu in GPUS.items() if name in device), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """What an engine launches for a step, and how well its kernels use the GPU."""

    layer_kernels: int  # per layer
    other_kernels: int  # outside the layers: embedding, head, acceptance, cursors
    kernel_s: float  # from the end of one kernel's work to the start of the next one's
    product_share: float  # of the bandwidth that a product reaches
    attention_share: float = 0.5  # of the bandwidth at which attention reads keys and values
    launched_by_host: bool = False  # not a graph: the device waits for launches, or launches hide behind its work


# Own products with norm, SwiGLU and residual in them; they ask for weights while they wait for the kernel before.
FEW = Code(layer_kernels=7, other_kernels=15, kernel_s=1.3e-6, product_share=0.93, attention_share=0.8)
WIDE = Code(layer_kernels=10, other_kernels=15, kernel_s=2.0e-6, product_share=0.78)  # the library's products
EAGER = Code(layer_kernels=40, other_kernels=49, kernel_s=22e-6, product_share=0.78, launched_by_host=True)


def code_of(engine: str, fed: int) -> Code:
    """Return the code of an engine for a step of `fed` positions in all."""
    if engine == "eager":
        return EAGER
    return FEW if fed <= fused_decoder.FEW or engine == "invariant" else WIDE


def parts(
    shape: Shape, gpu: Gpu, code: Code, *, rows: float, positions: float, judged: float, context: float
) -> dict[str, float]:
    """Return the seconds of each part of a step; their sum is its estimate.

    It feeds `positions` to each of `rows`, each after `context` cached tokens, and computes the logits of the last
    `judged` positions, as in `probe.floor_s`.
    """
    bandwidth, speed = gpu.bandwidth_bytes_per_s, gpu.matmul_flop_per_s
    fed, logits = rows * positions, rows * judged
    reached = bandwidth * code.product_share
    body_s, head_s = shape.body_bytes / reached, shape.head_bytes / reached
    flop_s = 2 * (shape.body * fed + shape.head * logits) / speed
    kv_bytes = (rows * shape.seen(context) + 2 * fed) * shape.kv_bytes_per_token
    logit_bytes = 2 * logits * shape.vocabulary * shape.logit_bytes  # written and read once
    found = {
        "layers' weights": body_s,
        "LM head's weights": head_s,
        "FLOPs": max(0.0, flop_s - body_s - head_s),  # beyond the time of the weights
        "keys and values": kv_bytes / (bandwidth * code.attention_share),
        "logits": logit_bytes / bandwidth,
    }
    launches_s = (code.layer_kernels * shape.layers + code.other_kernels) * code.kernel_s
    if code.launched_by_host:
        launches_s = max(0.0, launches_s - sum(found.values()))  # beyond the work
    return {**found, "launches": launches_s}

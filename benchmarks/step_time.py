"""The time of a decode step on a named GPU, estimated part by part from what the step reads, computes and launches.

    python benchmarks/step_time.py [--gpu H200] [--context 768]

The roofline (probe.py) is the least time. A step takes longer for reasons that the generated code shows
(benchmarks/codegen.py counts kernels and instructions), that the division of products shows
(mtbench/kernels/product_plan.py: L2 cache, parts to add), and that a profile of one step can confirm or refute
(benchmarks/gpu.py). No GPU has measured these figures yet: expect ±12 %. Weights that a product asks for while the
kernel before it ends are not credited.

The table is of Qwen2.5: rows decode one token (autoregressive) or feed 7 or 8 positions (a method that drafts).
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import checkout  # noqa: F401
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from mtbench.hardware.probe import Probe, Shape, count, floor_s
from mtbench.kernels.product_plan import L2_BYTES_PER_S, Plan, plan
from mtbench.models import fused_decoder

MODELS = {
    "Qwen2.5-7B": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 152064},
    "Qwen2.5-0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    | {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
}
STEPS = ((1, 1), (1, 8), (16, 1), (16, 7), (16, 8))  # rows, and positions of each
TOKENS_PER_FORWARD = 1.68  # of MARS-7B with blocks of 4 (arXiv 2604.07023, table 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What a GPU does at most; rates as probe.py would measure them."""

    name: str
    bandwidth_bytes_per_s: float
    matmul_flop_per_s: float
    processors: int = 132
    l2_bytes_per_s: float = L2_BYTES_PER_S


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
    planned: bool = False  # products are ours: mtbench/kernels/product_plan.py divides them


# Own products with norm, SwiGLU and residual in them; they ask for weights while they wait for the kernel before.
FEW = Code(layer_kernels=7, other_kernels=15, kernel_s=1.3e-6, product_share=0.93, attention_share=0.8, planned=True)
WIDE = Code(layer_kernels=10, other_kernels=15, kernel_s=2.0e-6, product_share=0.78)  # the library's products
EAGER = Code(layer_kernels=40, other_kernels=49, kernel_s=22e-6, product_share=0.78, launched_by_host=True)


def code_of(engine: str, fed: int) -> Code:
    """Return the code of an engine for a step of `fed` positions in all."""
    if engine == "eager":
        return EAGER
    return FEW if fed <= fused_decoder.FEW or engine == "invariant" else WIDE


def parts(
    shape: Shape,
    gpu: Gpu,
    code: Code,
    products: Sequence[tuple[int, int]] = (),
    *,
    rows: float,
    positions: float,
    judged: float,
    context: float,
) -> dict[str, float]:
    """Return the seconds of each part of a step; their sum is its estimate.

    It feeds `positions` to each of `rows`, each after `context` cached tokens, and computes the logits of the last
    `judged` positions, as in `probe.floor_s`. `products`: outputs and inputs of a layer's, and of the head's at last.
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
    if code.planned and products:
        *layer, head = (plan(*product, gpu.processors) for product in products)
        beyond_s = shape.layers * sum(_beyond_s(one, fed, gpu, reached) for one in layer)
        found["L2 cache, parts of sums"] = beyond_s + _beyond_s(head, logits, gpu, reached)
    launches_s = (code.layer_kernels * shape.layers + code.other_kernels) * code.kernel_s
    if code.launched_by_host:
        launches_s = max(0.0, launches_s - sum(found.values()))  # beyond the work
    return {**found, "launches": launches_s}


def _beyond_s(divided: Plan, fed: float, gpu: Gpu, reached: float) -> float:
    """Return what a product takes beyond the time in which memory gives its weight."""
    padded = next(width for width in (*fused_decoder.PADDED, float("inf")) if fed <= width)
    positions = int(min(padded, fused_decoder.FEW))
    taken_s = divided.time_s(positions, gpu.processors, reached, gpu.l2_bytes_per_s)
    return max(0.0, taken_s - 2 * divided.outputs * divided.inputs / reached)


def products_of(model: Any) -> list[tuple[int, int]]:
    """Return outputs and inputs of the products of a layer, in order, and of the head."""
    layer, head = model.get_decoder().layers[0], model.get_output_embeddings()
    attention, mlp = layer.self_attn, layer.mlp
    joined = ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj))
    groups = (joined[0], (attention.o_proj,), joined[1], (mlp.down_proj,), (head,))
    return [(sum(one.out_features for one in group), group[0].in_features) for group in groups]


def table(gpu: Gpu, context: int) -> Table:
    """Return the estimates of `MODELS` at `STEPS`."""
    head = ("model", "rows × positions", "roofline ms", "estimate ms", "of roofline", "parts, ms")
    shown = Table(*head, title=f"{gpu.name}, {context} cached tokens a row", caption="not measured: ±12 %")
    rates = Probe(
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        matmul_flop_per_s=gpu.matmul_flop_per_s,
        copy_bytes=0,
        matmul_size=0,
        cache_bytes=0,
    )
    for name, sizes in MODELS.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(Qwen2Config(**sizes), dtype=torch.bfloat16)
        shape, products, taken = count(model), products_of(model), {}
        for rows, positions in STEPS:
            step = {"rows": rows, "positions": positions, "judged": positions, "context": context}
            found = parts(shape, gpu, FEW, products, **step)
            taken[rows, positions] = sum(found.values())
            times = floor_s(shape, rates, **step), taken[rows, positions]
            words = ", ".join(f"{what} {1e3 * s:.2f}" for what, s in found.items() if s >= 5e-6)
            figures = (*(f"{1e3 * s:.2f}" for s in times), f"{times[0] / times[1]:.0%}")
            shown.add_row(name, f"{rows} × {positions}", *figures, words)
        ratio = TOKENS_PER_FORWARD * taken[16, 1] / taken[16, 7]
        words = f"MARS at {TOKENS_PER_FORWARD} tokens a forward: {ratio:.2f} times as fast as AR"
        shown.add_row(name, "16", "", "", "", words)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=list(GPUS), default="H200")
    parser.add_argument("--context", type=int, default=768, help="cached tokens of a row")
    args = parser.parse_args()
    Console(width=170, highlight=False).print(table(GPUS[args.gpu], args.context))


if __name__ == "__main__":
    main()

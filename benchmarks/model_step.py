"""Print the estimated time of a decode step line by line, beside the floor.

    python benchmarks/model_step.py [--gpu H200|H100] [--lines]

The model is mtbench/hardware/step_time.py. In parentheses stands an estimate made by hand from the code, where there is
one; both claim ±12 %. A profile of one step (benchmarks/gpu.py, part static-4) can be held against `--lines`.
"""

import argparse
import json

import checkout  # noqa: F401
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

from mtbench.hardware.probe import Probe, Shape, count, floor_s
from mtbench.hardware.step_time import FEW, GPUS, Gpu, lines
from mtbench.models.random_shapes import SHAPES

STEPS = {  # case: model, rows, positions, judged, and an estimate by hand in ms, on an H200
    "AR 7B, batch 1": ("qwen2.5-7b", 1, 1, 1, 3.74),
    "AR 7B, batch 16": ("qwen2.5-7b", 16, 1, 1, 4.2),
    "MARS B=4 7B, batch 16": ("qwen2.5-7b", 16, 7, 4, 4.2),
    "AR 0.5B, batch 1": ("qwen2.5-0.5b", 1, 1, 1, None),
}
CONTEXT = 832


def shape_of(model: str) -> Shape:
    """Return the sizes of a published shape."""
    with torch.device("meta"):
        return count(AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[model]), dtype=torch.bfloat16))


def floor_ms(shape: Shape, gpu: Gpu, rows: int, positions: int, judged: int) -> float:
    probe = Probe(
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        matmul_flop_per_s=gpu.matmul_flop_per_s,
        copy_bytes=0,
        matmul_size=0,
        cache_bytes=0,
    )
    return 1e3 * floor_s(shape, probe, rows=rows, positions=positions, judged=judged, context=CONTEXT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=list(GPUS), default="H200")
    parser.add_argument("--lines", action="store_true", help="also show each line of each step")
    args = parser.parse_args()
    gpu, console = GPUS[args.gpu], Console(width=150, highlight=False)
    shapes = {model: shape_of(model) for model in {case[0] for case in STEPS.values()}}
    table = Table("step", "floor, ms", "estimate, ms", title=f"{gpu.name}: in parentheses an estimate by hand")
    found: dict[str, float] = {}
    for case, (model, rows, positions, judged, by_hand) in STEPS.items():
        shape = shapes[model]
        parts = lines(shape, gpu, FEW, rows=rows, positions=positions, judged=judged, context=CONTEXT)
        found[case] = total = 1e3 * sum(part.s for part in parts)
        other = by_hand if gpu.name == "H200" else None
        estimate = f"{total:.2f}" + ("" if other is None else f" ({other:g}, {total / other - 1:+.0%})")
        if args.lines:
            console.print(f"{case}: {total:.2f} ms")
            for part in parts:
                console.print(f"  {1e3 * part.s:6.3f}  {part.what}: {part.because}")
        table.add_row(case, f"{floor_ms(shape, gpu, rows, positions, judged):.2f}", estimate)
    console.print(table)
    print(json.dumps({"gpu": gpu.name, "step_ms": found}))


if __name__ == "__main__":
    main()

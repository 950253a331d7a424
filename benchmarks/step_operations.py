"""Count what a decode step computes outside its forward, by method: operations as written, kernels after compilation.

    python benchmarks/step_operations.py

It needs no GPU. Operations are counted by a dispatch mode, without views. The compiled step is counted in the code that
Inductor generates for a CPU, where one function may hold several loops; a GPU's kernels are a few more.
A last line shows the bytes that sampling moves per logit.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import checkout  # noqa: F401
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch._inductor import compile_fx, config
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode

from mtbench import sampling
from mtbench.decoding import fused_ops
from mtbench.decoding.cuda_graph import PLAIN_STEPS, Captured
from mtbench.decoding.engines import ENGINES
from mtbench.decoding.method import ModelRunners, TargetOutput
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.models.families import EMBEDDED, locate
from mtbench.models.loading import load
from mtbench.runs.simulation import Scripted

COUNTED: dict[str, dict[str, Any]] = {
    "ar": {},
    "mars": {"tau": 0.95},
    "mars, scripted": {"tau": 0.95},
    "mars auto": {"tau": 0.95, "block_size": "auto"},
    "jacobi": {},
    "prompt-lookup": {"ahead": 4},
    "lookahead": {},
    "mars-selfspec": {"ahead": 2},
}
PARTS = ("propose", "feed", "accept")


class Operations(TorchDispatchMode):
    """Counts operations that compute something, and the bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.bytes = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ not in ("lift_fresh", "detach"):
            self.count += 1
            self.bytes += sum(tensor.nbytes for tensor in (*args, out) if isinstance(tensor, Tensor))
        return out


class _Generated(Exception):
    """Ends a compilation once its code is generated."""


def kernels_of(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> int:
    """Return the number of kernels that Inductor's code for a graph calls."""
    codes: list[str] = []

    def stop(lowering: GraphLowering) -> None:
        code = lowering.codegen()[0]
        codes.append(str(getattr(code, "value", code)))
        raise _Generated

    with patch.object(GraphLowering, "compile_to_module", stop), config.patch(fx_graph_cache=False):
        try:
            compile_fx.compile_fx(graph, inputs)
        except Exception as error:
            if not codes:
                raise RuntimeError("Inductor generated no code") from error
    return len(re.findall(r"^ +(?:\w+ = )?(?:cpp_fused\w*\(|extern_kernels\.|torch\.ops\.|aten\.)", codes[0], re.M))


@torch.inference_mode()
def count(name: str, options: dict[str, Any], rows: int = 2) -> tuple[list[int], list[int]]:
    """Return the operations and the kernels of each part of a step."""
    torch._dynamo.reset()
    checkpoint = load(locate(EMBEDDED + ("mars" if "mars" in name else "ar")))
    method = METHODS[re.split("[ ,]", name)[0]](**options)
    if name.endswith("scripted"):
        method = Scripted(method, [[4, 2, 3]] * rows, torch.device("cpu"))
    runners = ModelRunners("any", {"any": ENGINES["graph"]().runner(checkpoint)})
    batch = Captured(method, runners, rows, 64)
    batch.fuses = True
    requests = [Request(prompt_ids=list(range(5 + row, 15 + row)), max_new_tokens=30) for row in range(rows)]
    shape = batch.shape(batch.begin(requests))
    batch.runners.view, batch.runners.tight = shape.view, False
    operations = []
    with Operations() as counted:
        guess = batch.propose(shape)
        operations.append(counted.count)
        ids, metadata = batch.feed(guess, shape)
        metadata.mask()
        metadata.length  # noqa: B018
        operations.append(counted.count)
    out = batch.target.forward(ids, metadata, guess.shape[1] + 1)
    output = TargetOutput(batch.rows, guess, metadata.positions[:, shape.pending - 1 :] + 1, out.logits)
    output = replace(output, one_pass=batch.rows.choose_in_one_pass(out.logits, output.position))
    with counted:
        batch.accept(output, shape)
    operations.append(counted.count)
    kernels: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        kernels.append(kernels_of(graph, inputs))
        return graph.forward

    fused_ops.compile_graph = lambda graph: torch.compile(graph, fullgraph=True, dynamic=False, backend=backend)
    batch._prepared[shape] = PLAIN_STEPS
    for _ in range(2):
        guess = batch.propose(shape)
        batch.feed(guess, shape)
        batch.accept(output, shape)
    return [b - a for a, b in pairwise([0, *operations])], kernels


def sampling_bytes() -> float:
    """Return the bytes that the definition of sampling reads and writes per bfloat16 logit."""
    logits, seed = torch.randn(4, 3, 9000).bfloat16(), torch.arange(4)
    with Operations() as counted:
        sampling.choose(sampling.sampled(logits, 0.7, seed, torch.arange(12).view(4, 3)))
    return float(counted.bytes / logits.numel())


def main() -> None:
    table = Table("method", *PARTS, "together", title="operations of a step outside its forward, as written → compiled")
    for name, options in COUNTED.items():
        operations, kernels = count(name, options)
        cells = [f"{before} → {after}" for before, after in zip(operations, kernels, strict=True)]
        table.add_row(name, *cells, f"{sum(operations)} → {sum(kernels)}")
    console = Console(width=120)
    console.print(table)
    console.print(f"sampling, bytes per bfloat16 logit: {sampling_bytes():.0f} in PyTorch, 2 in the kernels")


if __name__ == "__main__":
    main()

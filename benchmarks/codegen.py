"""Count the kernels of a decoder layer and the instructions of its products on a Hopper GPU, without a GPU.

    python benchmarks/codegen.py [--model 7b|0.5b] [--positions 1,4,16,112] [--binaries]

`Decoder.forward` runs on the meta device, where tensors have a shape and no values, and takes it for a GPU. What it
would launch is recorded: functions compiled by torch.compile (their CUDA source is generated with the decoder's
options, and its launches are counted), our own Triton kernels, and other operations of PyTorch. A layer launches what a
decoder of three layers launches more than one of two. A table shows the launches; the last line is JSON. `--binaries`
also compiles the kernels and shows registers, spills, shared memory and, of products, instructions per weight.

It needs the versions of torch and triton named in benchmarks/cuda_codegen.py.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import checkout  # noqa: F401
import cuda_codegen
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import AutoModelForCausalLM, Qwen2Config
from triton.runtime.jit import JITFunction

from mtbench import kernels
from mtbench.models import fused_decoder
from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import Attention, Decoder, compiled
from mtbench.models.kv_cache import KVCache

MODELS = {  # Qwen2.5; two layers, and a third one to see what a layer adds
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2},
}
FED = {1: (1, 1), 4: (1, 4), 16: (16, 1), 112: (16, 7)}  # positions: rows, and positions of each
SLOTS = 1024
CUDA, META = torch.device("cuda", 0), torch.device("meta")
BLOCKS = ((1, 2048, 8), (2, 2048, 8), (4, 1024, 8))  # outputs and inputs per step of a product, and its warps


@dataclass(frozen=True)
class Compiled:
    """A function that torch.compile compiles, and its source for CUDA, generated when it is asked for."""

    name: str
    graph: fx.GraphModule
    inputs: list[Any]
    options: Mapping[str, Any]

    @cached_property
    def source(self) -> str:
        return cuda_codegen.generate(self.graph, self.inputs, self.options)

    def launches(self) -> list[str]:
        return cuda_codegen.launches(self.source)


@dataclass(frozen=True)
class Own:
    """A launch of one of our own Triton kernels."""

    kernel: Any
    grid: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def launches_early(self) -> bool:
        return bool(self.options.get("launch_pdl"))

    def launches(self) -> list[str]:
        return [self.name]

    def build(self) -> cuda_codegen.Binary:
        """Compile it for this launch's arguments."""
        return cuda_codegen.inspect(
            _triton_launch(self.kernel, *self.args, grid=self.grid, warmup=True, **self.options)
        )


@dataclass(frozen=True)
class Operation:
    """An operation of PyTorch outside compiled functions; it launches one kernel."""

    name: str

    def launches(self) -> list[str]:
        return [self.name]


Launch = Compiled | Own | Operation


class Recorder:
    """Records what forward passes on the meta device would launch on a GPU, while it is entered."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._patches = ExitStack()

    def __enter__(self) -> "Recorder":
        compiled.cache_clear()
        self._patches.enter_context(cuda_codegen.hopper())
        for owner, name, value in (
            (torch, "compile", self._compile),
            (JITFunction, "run", lambda kernel, *args, **options: self._launch(kernel, *args, **options)),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, value))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()
        compiled.cache_clear()

    def forward(self, decoder: Decoder, rows: int, width: int) -> list[Launch]:
        """Return the launches of one forward pass of `width` positions in each of `rows` rows."""
        slots = torch.zeros(rows, width, dtype=torch.long, device="meta")
        metadata = AttentionMetadata(slots, slots, slots[:, 0], SLOTS)
        cache = KVCache()
        cache.shape(rows, SLOTS)
        cache.set_batch(metadata)
        decoder.reserve(SLOTS)
        with torch.no_grad(), _taken_for(True, CUDA), _Operations(self.launches):
            decoder(slots, metadata, cache, 1)  # allocates the KV cache
            self.launches.clear()
            decoder(slots, metadata, cache, 1)
        return list(self.launches)

    def _compile(self, function: Callable[..., Any], *, options: Mapping[str, Any], **arguments: Any) -> Any:
        """Stand in for torch.compile. Dynamo traces and guards; each call of the result is recorded."""

        def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
            inputs = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
            recorded = Compiled(function.__name__, graph, inputs, options)

            def run(*args: Any) -> Any:
                self.launches.append(recorded)
                return graph(*args)

            return run

        traced = _torch_compile(function, backend=backend, **arguments)

        def call(*args: Any) -> Any:
            with _disable_current_modes(), _taken_for(*_META):
                return traced(*args)

        return call

    def _launch(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Stand in for the launch of a Triton kernel."""
        self.launches.append(Own(kernel, grid, args, options))


_torch_compile, _triton_launch = torch.compile, JITFunction.run
_META = (Tensor.is_cuda, Tensor.device)


@contextmanager
def _taken_for(is_cuda: Any, device: Any) -> Iterator[None]:
    """Replace what tensors answer about their device."""
    with mock.patch.object(Tensor, "is_cuda", is_cuda), mock.patch.object(Tensor, "device", device):
        yield


class _Operations(TorchDispatchMode):
    """Records operations that launch a kernel: those that return neither a view nor unwritten memory.

    Tensors pass for CUDA tensors to the caller only; what a caller makes on that device is on the meta device.
    """

    def __init__(self, launches: list[Launch]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches = launches

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not any(word in func.__name__ for word in ("empty", "detach", "view")):
            self.launches.append(Operation(func.__name__))
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0  # a decoder may read its weights when it is built
        kwargs = {name: META if value == CUDA else value for name, value in (kwargs or {}).items()}
        with _taken_for(*_META):
            return func(*args, **kwargs)


def decoder(model: str, layers: int, *, own: bool) -> Decoder:
    """Return a decoder of a model's shapes with some layers, on the meta device. `own`: with our own products."""
    config = Qwen2Config(**MODELS[model], num_hidden_layers=layers, vocab_size=152064)
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    attention = [Attention(None, None, None)] * layers
    checks: dict[str, Any] = {"_mismatch": lambda *_: None, "_attention_arguments": lambda _: attention}
    checks["Check"] = lambda _: SimpleNamespace(fault=lambda *_: None)  # there is no GPU to compile for
    at_rest = mock.patch.object(kernels, "at_rest", return_value=True)
    with mock.patch.multiple(fused_decoder, **checks), at_rest, _taken_for(True, CUDA), _Operations([]):
        built = fused_decoder.build(weights)
    built.operations = built.operations if own else None
    return built


def layer(recorder: Recorder, model: str, positions: int, *, own: bool) -> list[Launch]:
    """Return the launches of one layer: those that a decoder of three layers has more than one of two."""
    fewer, more = (recorder.forward(decoder(model, layers, own=own), *FED[positions]) for layers in (2, 3))
    names = [[launch.name for launch in launches] for launches in (fewer, more)]
    begin = next((i for i, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]), len(fewer))
    return more[begin : begin + len(more) - len(fewer)]


# ---- what is read from the launches


def described(launches: Sequence[Launch]) -> dict[str, Any]:
    """Return what each Triton kernel of a layer does."""
    found: dict[str, Any] = {}
    for launch in launches:
        if isinstance(launch, Own):
            found[launch.name] = {"launches_early": launch.launches_early}
        elif isinstance(launch, Compiled):
            for name, kernel in cuda_codegen.kernels(launch.source).items():
                found[name] = {"launches_early": kernel.launches_early, "rounds_products": kernel.rounds_products}
                if kernel.is_product:
                    found[name]["functions_per_weight"] = kernel.functions_per_weight
    return found


def built(launches: Sequence[Launch]) -> dict[str, Any]:
    """Compile a layer's products and our own kernels; return what each uses, by kernel and block sizes."""
    found: dict[str, Any] = {}
    for launch in launches:
        if isinstance(launch, Own):
            variants = found.setdefault(launch.name, [])
            if (used := own_usage(launch)) not in variants:
                variants.append(used)
        elif isinstance(launch, Compiled):
            for name, kernel in cuda_codegen.kernels(launch.source).items():
                if kernel.is_product:
                    found[name] = [product_usage(kernel, *blocks) for blocks in BLOCKS]
    return found


def usage(binary: cuda_codegen.Binary) -> dict[str, Any]:
    in_loop = sum(bool(re.search(r"\b(LDL|STL)\b", instruction)) for instruction in binary.loop())
    found = {"registers": binary.registers, "spills": binary.spills, "spills_in_loop": in_loop}
    return found | {"shared_bytes": binary.shared_bytes}


def own_usage(launch: Own) -> dict[str, Any]:
    """Compile one of our own kernels; return what it uses. A product's step multiplies TILE outputs by STEP inputs."""
    binary = launch.build()
    outputs, inputs = launch.options.get("TILE"), launch.options.get("STEP")
    if outputs is None or inputs is None or launch.name != "_product":
        return usage(binary)
    instructions = len(binary.loop()) * binary.threads / (outputs * inputs)
    block = {"block": [outputs, inputs], "warps": binary.threads // 32}
    return block | usage(binary) | {"instructions_per_weight": instructions}


def product_usage(kernel: cuda_codegen.Source, outputs: int, inputs: int, warps: int) -> dict[str, Any]:
    """Compile a product that computes `outputs` at once, `inputs` per step; return what it uses."""
    binary = cuda_codegen.build(kernel, num_warps=warps, XBLOCK=outputs, R0_BLOCK=inputs)
    loop = binary.loop()
    weights = outputs * (inputs if loop else kernel.reduced)  # without a loop, one pass computes its outputs
    instructions = len(loop or binary.sass) * binary.threads / weights
    return {"block": [outputs, inputs], "warps": warps, **usage(binary), "instructions_per_weight": instructions}


def table(counts: Mapping[str, Mapping[str, Any]], layers: Mapping[tuple[str, int], Sequence[Launch]]) -> Table:
    """Return the launches of a layer as a table."""
    shown = Table("model", "positions", "kernels", "in order", title="kernels of one layer on a Hopper GPU")
    for (model, positions), launches in layers.items():
        names = " · ".join(name for launch in launches for name in launch.launches())
        shown.add_row(model, str(positions), str(counts[model][str(positions)]), names)
    return shown


def binaries_table(binaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return what compiled kernels use as a table."""
    head = ("model, positions", "kernel", "block", "warps", "registers", "spills", "shared bytes", "instr./weight")
    shown = Table(*head, title="compiled kernels")
    for where, by_name in binaries.items():
        for name, variants in by_name.items():
            for one in variants:
                per_weight = one.get("instructions_per_weight")
                block, warps = one.get("block", ""), one.get("warps", "")
                numbers = (one["registers"], one["spills"], one["shared_bytes"])
                last = "" if per_weight is None else f"{per_weight:.1f}"
                shown.add_row(where, name, *map(str, (block, warps, *numbers)), last)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), action="append", help="only this model; may be repeated")
    parser.add_argument("--positions", default=",".join(map(str, FED)), help=f"some of {', '.join(map(str, FED))}")
    parser.add_argument("--binaries", action="store_true", help="compile the products and our own kernels, too")
    parser.add_argument("--compiled", action="store_true", help="layers that our own products do not support")
    args = parser.parse_args()
    if reason := cuda_codegen.supported():
        raise SystemExit(f"No code for a GPU can be generated here: {reason}.")
    models, positions = args.model or list(MODELS), [int(n) for n in args.positions.split(",")]
    with Recorder() as recorder:
        layers = {(model, n): layer(recorder, model, n, own=not args.compiled) for model in models for n in positions}
    counts = {
        model: {str(n): sum(len(launch.launches()) for launch in layers[model, n]) for n in positions}
        for model in models
    }
    found: dict[str, Any] = {"kernels_per_layer": counts}
    found["launches"] = {
        f"{model}, {n}": [name for launch in launches for name in launch.launches()]
        for (model, n), launches in layers.items()
    }
    found["kernels"] = {f"{model}, {n}": described(launches) for (model, n), launches in layers.items()}
    console = Console(width=150, highlight=False)
    console.print(table(counts, layers))
    if args.binaries:
        found["binaries"] = {f"{model}, {n}": built(launches) for (model, n), launches in layers.items()}
        console.print(binaries_table(found["binaries"]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

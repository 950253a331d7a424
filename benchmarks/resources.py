"""Shared memory, registers and spills of our kernels on GPUs of six architectures, without a GPU.

    python benchmarks/resources.py [--architectures 80,86,89,90,100,120] [--quick]

Each kernel is compiled for each architecture: attention at head sizes, types, tiles of queries and parts; products at
each padding with the shapes of Qwen2.5; and the other kernels of a step. A program that needs more shared memory or
registers than a multiprocessor has cannot be launched: the script names it and exits with 1. Spills cost time only. The
table has the most of each row's variants; the last line is JSON. The whole takes a quarter of an hour, as Triton
compiles some 250 kernels for each architecture, and seconds when repeated, as Triton keeps them.
"""

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import checkout
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

HERE, HELPERS = str(Path(__file__).parent), str(Path(checkout.ROOT) / "tests" / "helpers")
sys.path.insert(0, HELPERS)

from hopper import compiled  # noqa: E402

REGISTERS = 65_536  # of a multiprocessor


class Architecture(NamedTuple):
    """Limits of a GPU, by the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"."""

    gpu: str
    shared_bytes: int  # that a program may have
    processors: int
    from_shared: bool = False  # the matrix unit reads its large side there


ARCHITECTURES = {
    80: Architecture("A100", 166_912, 108),
    86: Architecture("A10", 101_376, 72),
    89: Architecture("L40S", 101_376, 142),
    90: Architecture("H100", 232_448, 132, from_shared=True),
    100: Architecture("B200", 232_448, 148, from_shared=True),
    120: Architecture("RTX 5090", 101_376, 170),
}
MODELS = {  # Qwen2.5: hidden size, MLP's inner size, heads, key heads, head size, vocabulary
    "7B": (3584, 18944, 28, 4, 128, 152064),
    "0.5B": (896, 4864, 14, 2, 64, 151936),
}
HEAD_SIZES, GROUP = (64, 80, 96, 128, 256), 7
WIDTHS = (1, 4)  # positions, with GROUP query heads: a tile of 16 queries, and one of 32 where there are such
PARTS = (0, 1, 4)  # blocks of a part of attention in memory; 0: a program walks over all blocks
PADDED = {"bfloat16": (16, 32, 64, 128), "float32": (16, 32)}


class Kernel(NamedTuple):
    """What a compiled kernel uses, in a program."""

    architecture: int
    name: str
    case: str  # what it was compiled for
    shared_bytes: int
    registers: int  # of a thread
    threads: int
    spilled_bytes: int  # of a thread
    stages: int  # of its loop's loads, in use or in flight

    @property
    def exceeds(self) -> bool:
        """Whether a program cannot be launched."""
        limit = ARCHITECTURES[self.architecture].shared_bytes
        return self.shared_bytes > limit or self.registers * self.threads > REGISTERS


def resources(architectures: Sequence[int], *, quick: bool = False, change: str = "") -> list[Kernel]:
    """Compile the kernels in another process, and return what they use. `change`: code that runs there before."""
    runs = f"for ARCHITECTURE in {tuple(architectures)}: resources.launch_all(ARCHITECTURE, {quick})"
    [done] = compiled(f"import sys\nsys.path[:0] = {[HERE]}\nimport resources\n{change}\n{runs}\n")
    case, found = "", []
    for line in done.kernels:
        case = line.get("case", case)
        if "case" not in line:
            used = line["shared"], line["REG"], line["threads"], line["STACK"] + line["LOCAL"], line["stages"]
            found.append(Kernel(line["architecture"], line["name"], case, *used))
    return found


# ---- In the process where a launch only compiles (tests/helpers/hopper.py).


def launch_all(architecture: int, quick: bool) -> None:
    """Launch each case for a GPU of the architecture, and print its name before."""
    from mtbench.kernels import triton_attention, triton_kernels, triton_products

    limits = ARCHITECTURES[architecture]
    answers = {
        "shared_memory": (limits.shared_bytes, limits.from_shared),
        "multiprocessors": limits.processors,
        "has_wgmma": architecture == 90,
        "dependent_launch": architecture >= 90,
    }
    for module, (name, answer) in product((triton_attention, triton_kernels, triton_products), answers.items()):
        if hasattr(module, name):
            setattr(module, name, lambda device, answer=answer: answer)
    for case, launch in quick_cases(triton_kernels) if quick else all_cases(triton_kernels):
        print(json.dumps({"case": case}))
        launch()


Case = tuple[str, Callable[[], object]]


def quick_cases(kernels: ModuleType) -> Iterator[Case]:
    """Yield an attention and a product, each with much shared memory and many registers."""
    yield from attention(kernels, "bfloat16", 256, widths=(4,), parts=(4,))
    *_, down, _ = products(kernels, "7B", "bfloat16", 128)
    yield down


def all_cases(kernels: ModuleType) -> Iterator[Case]:
    for dtype, size in product(("bfloat16", "float16", "float32"), HEAD_SIZES):
        yield from attention(kernels, dtype, size)
    yield from attention(kernels, "bfloat16", 256, softcap=30.0)
    for (dtype, padded), model in product(PADDED.items(), MODELS):
        for count in padded:
            yield from products(kernels, model, dtype, count)
        yield from around(kernels, model, dtype)


def attention(
    kernels: ModuleType,
    dtype: str,
    size: int,
    *,
    widths: Sequence[int] = WIDTHS,
    parts: Sequence[int] = PARTS,
    softcap: float | None = None,
) -> Iterator[Case]:
    """Yield attention at each tile of queries and for each part."""
    from mtbench.kernels import triton_attention

    divide = triton_attention._division
    for width, part in product(widths, parts):
        query = empty(dtype, 2, width, 2 * GROUP, size).transpose(1, 2)
        cache = empty(dtype, 2, 1024, 2, size).transpose(1, 2)
        mask, length = empty("bool", 2, width, 1024), empty("int64", 2)
        assert kernels.attends(query, cache, cache)

        def launch(*inputs: Tensor, part: int = part) -> None:
            triton_attention._division = lambda *_: (part, part)
            kernels.attend(*inputs, 0.1, softcap, split=part > 0)
            triton_attention._division = divide

        inputs = query, cache, cache, mask, length
        name = f"attention {dtype} {size}" + (" softcap" if softcap else "")
        yield name, partial(launch, *inputs)


def products(kernels: ModuleType, model: str, dtype: str, count: int) -> Iterator[Case]:
    """Yield the products of a layer, in order, and the head's, over `count` positions."""
    from mtbench.kernels import Norm, NormInput

    hidden, inner, heads, key_heads, size, vocabulary = MODELS[model]
    qkv, attended, name = (heads + 2 * key_heads) * size, heads * size, f"product {dtype} {count}"
    norm, residual = Norm(empty(dtype, hidden), 1e-6, 2.0), empty(dtype, count, hidden)
    x = NormInput(residual, empty("float32", 28, count))

    def added(inputs: int) -> Callable[[], object]:
        weight = empty(dtype, hidden, inputs)
        return lambda: kernels.add_product(residual, empty(dtype, count, inputs), weight, None, norm)

    yield name, lambda: kernels.norm_product(x, norm, empty(dtype, qkv, hidden), empty(dtype, qkv))
    yield name, added(attended)
    yield name, lambda: kernels.norm_swiglu(x, norm, empty(dtype, 2 * inner, hidden))
    yield name, added(inner)
    yield name, lambda: kernels.norm_product(x, norm, empty(dtype, vocabulary, hidden))


def around(kernels: ModuleType, model: str, dtype: str) -> Iterator[Case]:
    """Yield the kernels around products and attention."""
    from mtbench.kernels import Norm

    hidden, _, heads, key_heads, size, vocabulary = MODELS[model]
    norm, ids = Norm(empty(dtype, hidden), 1e-6, 2.0), empty("int64", 4)
    store, weight = empty(dtype, 9, key_heads, size), empty(dtype, size)
    qkv = empty(dtype, 4, (heads + 2 * key_heads) * size)
    rotated = qkv, ids, store[:, :1], store[:, :1], store, store, ids
    logits, temperature = empty(dtype, 1, 4, vocabulary), empty("float64", 1)
    yield f"rotation {dtype}", lambda: kernels.rotate(*rotated)
    yield f"rotation {dtype}", lambda: kernels.rotate(*rotated, weight, weight, 1e-6)
    yield f"embedding {dtype}", lambda: kernels.embed(ids, empty(dtype, 9, hidden), norm)
    yield f"norm {dtype}", lambda: kernels.norm(empty(dtype, 4, hidden), empty(dtype, hidden), 1e-6)
    for heat in (None, temperature):
        yield f"choice {dtype}", partial(kernels.choose_logsumexp, logits, heat, ids[:1], ids[None])


def empty(dtype: str, *shape: int) -> Tensor:
    """Return a tensor without memory: a launch that only compiles reads none."""
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")


# ---- Tables.


def most(found: Sequence[Kernel]) -> dict[tuple[str, str], dict[int, Kernel]]:
    """Return by case and kernel, and by architecture, the most that any variant uses."""
    groups: dict[tuple[str, str], dict[int, list[Kernel]]] = defaultdict(lambda: defaultdict(list))
    for kernel in found:
        groups[kernel.case, kernel.name][kernel.architecture].append(kernel)
    return {row: {one: _most(same) for one, same in by.items()} for row, by in groups.items()}


def _most(same: Sequence[Kernel]) -> Kernel:
    """Return the most of each figure; threads are those of the most registers of a program."""
    largest = max(same, key=lambda kernel: kernel.registers * kernel.threads)
    shared, spilled = (max(getattr(kernel, name) for kernel in same) for name in ("shared_bytes", "spilled_bytes"))
    return largest._replace(shared_bytes=shared, spilled_bytes=spilled)


def table(rows: dict[tuple[str, str], dict[int, Kernel]], architectures: Sequence[int]) -> Table:
    title = "shared bytes / registers of a thread × threads / + spilled bytes of a thread"
    shown = Table("case", "kernel", *(f"sm_{one} {ARCHITECTURES[one].gpu}" for one in architectures), title=title)
    for (case, name), by in rows.items():
        shown.add_row(case, name, *(_words(by[one]) if one in by else "" for one in architectures))
    return shown


def _words(kernel: Kernel) -> str:
    spilled = f" +{kernel.spilled_bytes}" if kernel.spilled_bytes else ""
    words = f"{kernel.shared_bytes} / {kernel.registers}×{kernel.threads}{spilled}"
    return f"[bold red]{words}[/]" if kernel.exceeds else words


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", default=",".join(map(str, ARCHITECTURES)), help="of GPUs, such as 90,120")
    parser.add_argument("--quick", action="store_true", help="only the largest kernels")
    args = parser.parse_args(arguments)
    names = args.architectures.split(",")
    if unknown := [name for name in names if name not in map(str, ARCHITECTURES)]:
        parser.error(f"--architectures {unknown[0]!r}; choose from {', '.join(map(str, ARCHITECTURES))}")
    chosen = [int(name) for name in names]
    found = resources(chosen, quick=args.quick)
    rows = most(found)
    Console(width=60 + 32 * len(chosen), highlight=False).print(table(rows, chosen))
    exceeding = [kernel for kernel in found if kernel.exceeds]
    for kernel in exceeding:
        print(f"{kernel.name} of {kernel.case} exceeds sm_{kernel.architecture}: {kernel}")
    figures = [kernel._asdict() for by in rows.values() for kernel in by.values()]
    print(json.dumps({"exceeding": [kernel._asdict() for kernel in exceeding], "most": figures}))
    return 1 if exceeding else 0


if __name__ == "__main__":
    sys.exit(main())

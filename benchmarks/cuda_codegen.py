"""Generate and compile code for a Hopper GPU on a machine without one. Nothing runs; sources and binaries are read.

- `generate`: a graph of torch operations to Inductor's source for CUDA.
- `build`: a Triton kernel to a Hopper binary, with its registers, spills, shared memory and machine code (SASS).

PyTorch asks the CUDA driver for the device, and Inductor generates no CUDA code where there is none. `hopper` answers
in the driver's place. It replaces functions of torch for the whole process while code is generated, and Triton's driver
for good, so use this module in a process of its own. It depends on internals of the versions in TESTED.
"""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._guards import TracingContext, tracing
from torch._inductor import compile_fx, config, scheduler
from torch._inductor.fx_passes import joint_graph
from torch._inductor.graph import GraphLowering
from torch.fx.experimental.proxy_tensor import make_fx
from triton.backends.compiler import GPUTarget

TESTED = ("2.13", "3.7")  # of torch and triton
TARGET = GPUTarget("cuda", 90, 32)
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
DEVICE = SimpleNamespace(  # an H200, as torch.cuda.get_device_properties describes it
    name="NVIDIA H200",
    type="cuda",
    index=0,
    major=9,
    minor=0,
    warp_size=32,
    multi_processor_count=132,
    max_threads_per_block=1024,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    gcnArchName="",
    L2_cache_size=50 << 20,
    total_memory=141 << 30,
)


def supported() -> str | None:
    """Return why this module cannot work here, or None."""
    versions = torch.__version__, triton.__version__
    if not all(found.startswith(tested) for found, tested in zip(versions, TESTED, strict=True)):
        return f"torch {versions[0]} and triton {versions[1]}; tested with {' and '.join(TESTED)}"
    return None if TOOL.exists() else "triton has no cuobjdump"


# ---- sources


class _Generated(Exception):
    """Ends a compilation once its source exists."""


def generate(graph: fx.GraphModule, inputs: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return the source that Inductor generates for a graph on a Hopper GPU, with the options of torch.compile.

    `inputs`: fake tensors on the meta device (and symbolic sizes) as Dynamo gives them to a backend.
    """
    sources: list[str] = []

    def keep_source(self: GraphLowering) -> None:
        source: Any = self.codegen()[0]
        sources.append(source.value)
        raise _Generated

    fakes = [value for value in inputs if isinstance(value, Tensor)]
    mode: Any = fakes[0].fake_mode  # type: ignore[attr-defined]
    with mode, torch.no_grad():
        # First to ATen operations on the meta device: Python's indexing of a CUDA tensor asks the driver.
        operations = make_fx(graph, tracing_mode="real", _allow_non_fake_inputs=True)(*inputs)
        on_cuda = [_on_cuda(value) for value in inputs]
    with _generating(), mock.patch.object(GraphLowering, "compile_to_module", keep_source):
        try:
            with tracing(TracingContext(mode)), torch.no_grad():
                compile_fx.compile_fx(operations, on_cuda, config_patches=dict(options))
        except Exception:  # _Generated, wrapped
            if not sources:
                raise
    return sources[0]


def _on_cuda(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")


@contextmanager
def hopper() -> Iterator[None]:
    """Make torch.cuda and Triton describe one Hopper GPU."""
    triton.runtime.driver.set_active(Driver())
    answers: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda device=None: DEVICE,
        "get_device_capability": lambda device=None: (DEVICE.major, DEVICE.minor),
        "is_bf16_supported": lambda *_, **__: True,
    }
    quiet: dict[str, Callable[..., Any]] = {
        "_lazy_init": lambda: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda *_, **__: None,
        "current_stream": lambda device=None: SimpleNamespace(cuda_stream=0),
        "is_current_stream_capturing": lambda: False,
    }
    with ExitStack() as stack:
        for name, answer in (answers | quiet).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name, answer in answers.items():
            if name in vars(CudaInterface) and name != "is_available":
                stack.enter_context(mock.patch.object(CudaInterface, name, staticmethod(answer)))
        yield


@contextmanager
def _generating() -> Iterator[None]:
    """Make Inductor generate code for that GPU: let it take fake CUDA tensors without a driver."""
    with hopper(), config.patch(fx_graph_cache=False), ExitStack() as stack:

        def replace(owner: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        replace(scheduler, "has_triton", lambda *_: True)
        replace(joint_graph, "lazy_init", lambda *_: None)  # patterns of operations that we do not use, traced on CUDA
        replace(Tensor, "__getitem__", _index)
        replace(Tensor, "copy_", lambda self, source, non_blocking=False: torch.ops.aten.copy_.default(self, source))
        yield


class Driver:
    """Stands in for Triton's driver."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": DEVICE.shared_memory_per_block_optin})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda")


_plain_index = Tensor.__getitem__


def _index(tensor: Tensor, key: Any) -> Tensor:
    """Index a tensor by ATen operations, as torch does below its look at the driver."""
    if tensor.device.type != "cuda":
        return _plain_index(tensor, key)
    aten, dimension = torch.ops.aten, 0
    indices: list[Tensor | None] = []
    for one in key if isinstance(key, tuple) else (key,):
        if one is None:
            tensor = aten.unsqueeze.default(tensor, dimension)
        elif isinstance(one, slice):
            if one != slice(None):
                tensor = aten.slice.Tensor(tensor, dimension, one.start, one.stop, one.step or 1)
        elif isinstance(one, Tensor):
            indices += [None] * (dimension - len(indices)) + [one]
        elif one is Ellipsis:
            raise NotImplementedError("an index with an ellipsis")
        else:
            tensor = aten.select.int(tensor, dimension, one)
            continue
        dimension += 1
    return aten.index.Tensor(tensor, indices) if indices else tensor


CALL = re.compile(r"^\s+(?:(triton_\w+)\.run\(|extern_kernels\.(\w+)\((\w+)|torch\.ops\.([\w.]+)\()", re.M)


def launches(source: str) -> list[str]:
    """Return the kernels that a generated source launches, in order.

    A product that adds a matrix is two: the library copies the matrix before it adds to it. (A vector it adds itself.)
    """
    names = []
    for kernel, product, added, operation in CALL.findall(source[source.index("def call(") :]):
        if product == "addmm" and _dimensions(source, added) == 2:
            names.append("copy of addmm")
        names.append(kernel or product or operation)
    return names


def _dimensions(source: str, name: str) -> int:
    """Return the number of dimensions of an input or buffer of a generated source."""
    found = re.search(rf"(?:assert_size_stride\({name}, |\b{name} = empty_strided_cuda\()\(([^()]*)\)", source)
    return 2 if found is None else len([size for size in found[1].split(",") if size.strip()])


@dataclass(frozen=True)
class Source:
    """A Triton kernel that Inductor generated."""

    name: str
    body: str  # from `@triton.jit`
    signature: dict[str, str]  # types of its arguments, by name
    options: dict[str, bool]  # of Triton's compiler

    @property
    def launches_early(self) -> bool:
        """Whether it is a programmatic dependent launch: it is set up while the kernel before it ends."""
        return self.options["launch_pdl"] and "gdc_wait" in self.body

    @property
    def is_product(self) -> bool:
        """Whether it multiplies by a matrix: it reads an element per output and input (so does a norm)."""
        return "_mm_" in self.name and bool(re.search(r"tl\.load\(in_ptr\d+ \+ \(r0_\d+ \+ \d+\*x\d+\)", self.body))

    @property
    def rounds_products(self) -> bool:
        """Whether it rounds the result of a product before it computes with it, as PyTorch does.

        The result is a product's own sum, or a float32 input: a product's result that was stored before it was rounded.
        """
        wide = [name for name, kind in self.signature.items() if name.startswith("in_") and kind == "*fp32"]
        results = [made for name in wide for made in re.findall(rf"(tmp\d+) = tl\.load\({name} ", self.body)]
        if self.is_product:
            results += re.findall(r"(tmp\d+) = tl\.sum\(", self.body)
        uses = [use for result in results for use in re.findall(rf"(?:= |tl\.store).*\b{result}\b.*", self.body)]
        return all(".to(tl.bfloat16)" in use or use.startswith("tl.store") for use in uses)

    @property
    def reduced(self) -> int:
        """The size of the dimension that it sums over."""
        return int(re.search(r"r0_numel = (\d+)", self.body)[1])  # type: ignore[index]

    @property
    def functions_per_weight(self) -> list[str]:
        """The functions such as `exp` that it computes again for every output: in its loops or, without one, at all."""
        loops = re.findall(r"^    for .*?:\n((?:        .*\n|\n)+)", self.body, re.M)
        return sorted(
            set(
                re.findall(r"(?:libdevice|tl_math|tl)\.(exp2?|rsqrt|sigmoid|tanh|erf)\b", "".join(loops or [self.body]))
            )
        )


def kernels(source: str) -> dict[str, Source]:
    """Return the Triton kernels of a generated source, by name."""
    found = {}
    for name, code in re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)''', device_str", source, re.S):
        signature = dict(re.findall(r"'(\w+)': '([^']+)'", re.search(r"'signature': \{(.*?)\}", code)[1]))  # type: ignore[index]
        options = {option: f"'{option}': True" in code for option in ("launch_pdl", "enable_fp_fusion")}
        found[name] = Source(name, code[code.index("@triton.jit") :], signature, options)
    return found


# ---- binaries


@dataclass(frozen=True)
class Binary:
    """What a compiled kernel uses, and its machine code."""

    registers: int  # per thread
    spills: int  # bytes of stack and local memory per thread
    shared_bytes: int  # per program
    threads: int  # per program
    sass: list[str]  # instructions
    addresses: dict[int, int]  # of instructions, to their place in `sass`

    def loop(self) -> list[str]:
        """Return the instructions of the longest loop that contains no other; empty without a loop."""
        loops: list[tuple[int, int]] = []
        for end, instruction in enumerate(self.sass):
            target = re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", instruction)
            begin = self.addresses.get(int(target[1], 16)) if target else None
            if begin is not None and begin < end and not any(begin <= inner for inner, _ in loops):
                loops.append((begin, end))
        begin, end = max(loops, key=lambda loop: loop[1] - loop[0], default=(0, -1))
        return self.sass[begin : end + 1]


HEADER = """
import triton
import triton.language as tl
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_helpers import libdevice, math as tl_math
"""


def build(source: Source, *, num_warps: int, **constants: int) -> Binary:
    """Compile a generated kernel for given block sizes. Its pointers and sizes are taken as multiples of 16."""
    names = list(source.signature)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{source.name}.py"  # Triton reads a function's source from its file
        path.write_text(HEADER + source.body)
        module: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), module)
        kernel = triton.compile(
            triton.compiler.ASTSource(
                module[source.name],
                source.signature,
                {
                    (names.index(name),): value
                    for name, value in ({"xnumel": 1} | constants).items()
                    if _constant(source, name)
                },
                {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if not _constant(source, name)},
            ),
            target=TARGET,
            options={"num_warps": num_warps, "num_stages": 1, **source.options},
        )
    return inspect(kernel)


def _constant(source: Source, name: str) -> bool:
    return source.signature.get(name) == "constexpr"


def inspect(kernel: Any) -> Binary:
    """Return what a kernel compiled by Triton uses."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        usage, sass = (
            subprocess.run([TOOL, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    instructions = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", sass)
    return Binary(
        registers=numbers["REG"],
        spills=numbers["STACK"] + numbers["LOCAL"],
        shared_bytes=kernel.metadata.shared,
        threads=32 * kernel.metadata.num_warps,
        sass=[instruction for _, instruction in instructions],
        addresses={int(address, 16): place for place, (address, _) in enumerate(instructions)},
    )

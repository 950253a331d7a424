"""The order of machine instructions in kernels compiled for a Hopper GPU, without one (helpers/machine_code.py).

test_memory_order.py shows that the order in our source suffices; here the compiler keeps it.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hopper import compiled
from machine_code import Code
from planted_kernels import ORDER_FAULTS, RELAXED, planted_file

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EARLY = ("no wait in a product", "a read before the wait")
FAULTS = [RELAXED, *(fault for fault in ORDER_FAULTS if fault.name in EARLY)]
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing"),
]

LIKE = """
from importlib.util import module_from_spec, spec_from_file_location
from mtbench.kernels import Norm, NormInput, triton_attention, triton_products
from mtbench.kernels import triton_kernels as kernels
for module in (triton_attention, triton_products, kernels):
    module.dependent_launch = lambda device: True
like, ids = torch.empty(0, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
norm = Norm(like.new_empty(896), 1e-6, 2.0)
def down(module, positions):  # of Qwen2.5-0.5B; tiles in parts
    residual, x = like.new_empty(positions, 896), like.new_empty(positions, 4864)
    module.add_product(residual, x, like.new_empty(896, 4864), None, norm)
def loaded(path):
    spec = spec_from_file_location("faulty", path)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.dependent_launch = lambda device: True
    return module
"""
EXCHANGE = """
import triton
import triton.language as tl
@triton.jit
def exchange(partials, counter, out, BARRIER: tl.constexpr):
    index = tl.arange(0, 1024)
    tl.store(partials + tl.program_id(0) * 1024 + index, index)
    if BARRIER:
        tl.debug_barrier()
    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == 1:
        for part in range(2):
            tl.store(out + index, tl.load(partials + part * 1024 + index, cache_modifier=".cg"))
"""
LAYER = """
for positions in (4, 32, 64, 112):
    entering = NormInput(like.new_empty(positions, 896), torch.empty(7, positions))
    kernels.norm_product(entering, norm, like.new_empty(1152, 896), like.new_empty(1152))
    kernels.norm_swiglu(entering, norm, like.new_empty(2 * 4864, 896))
    down(kernels, positions)
for heads, key_heads, size in ((14, 2, 64), (28, 4, 128)):
    for rows, width in ((1, 1), (16, 7)):
        cache, query = like.new_empty(rows, 1024, key_heads, size), like.new_empty(rows, width, heads, size)
        mask, length = torch.ones(rows, width, 1024, dtype=torch.bool), torch.ones(rows, dtype=torch.int64)
        for split in (True, False):
            keys = cache.transpose(1, 2)
            kernels.attend(query.transpose(1, 2), keys, keys, mask, length, 0.1, split=split)
store = like.new_empty(9, 4, 128)
kernels.rotate(like.new_empty(4, 36 * 128), ids, store[:, :1], store[:, :1], store, store, ids)
"""
INDUCTOR = """
import json, re
import codegen, cuda_codegen
with codegen.Recorder() as recorder:
    launches = [x for n in (1, 16) for x in codegen.layer(recorder, "7b", n, own=False)]
    for source in [launch.source for launch in launches if isinstance(launch, codegen.Compiled)]:
        before = []
        kernels = cuda_codegen.kernels(source)
        for name, args in re.findall(r"(triton_\\w+)[.]run[(](.*), stream", source[source.index("def call("):]):
            kernel, given = kernels[name], dict(zip(kernels[name].signature, args.split(", ")))
            binary = cuda_codegen.build(kernel, num_warps=4, XBLOCK=4, R0_BLOCK=512)
            listing = [(hex(address), binary.sass[place]) for address, place in binary.addresses.items()]
            read = re.findall(r"tl[.]load[(](\\w+)", kernel.body.partition("gdc_wait")[0])
            found = {"name": name, "sass": listing, "reads": [given[x] for x in read], "before": before}
            print(json.dumps(found | {"early": kernel.options["launch_pdl"]}))
            before = [value for x, value in given.items() if x.startswith(("out_ptr", "in_out_ptr"))]
"""


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Code]:
    """A layer's product as it is ("product"), and with faults, by their names; a small exchange, with and without."""
    scripts = {"product": f"{LIKE}\ndown(kernels, 4)"}
    for fault in FAULTS:
        path = planted_file(fault, tmp_path_factory.mktemp("faulty"))
        scripts[fault.name] = f"down(loaded({str(path)!r}), 4)"
    path = tmp_path_factory.mktemp("small") / "exchange.py"
    path.write_text(EXCHANGE)
    for barrier in (True, False):
        scripts[f"exchange {barrier}"] = f"loaded({str(path)!r}).exchange[2,](like, ids, like, BARRIER={barrier})"
    made = compiled(*(f"{script}\n" for script in scripts.values()), sass=True)
    return {name: Code(found.kernels[0]["sass"]) for name, found in zip(scripts, made, strict=True)}


def test_partial_sums_are_exchanged_in_order(codes: dict[str, Code]) -> None:
    assert codes["product"].disorder() == []
    assert codes["product"].before_wait() == []


def test_a_relaxed_atomic_shows(codes: dict[str, Code]) -> None:
    assert {"no fence before the arrival", "old lines stay in the cache"} <= {*codes[RELAXED.name].disorder()}


def test_a_missing_barrier_shows(codes: dict[str, Code]) -> None:
    """Of a small kernel: in a product, Triton 3.7 happens to put a barrier of its own there."""
    assert codes["exchange True"].disorder() == []
    assert "no barrier between the stores and the fence" in codes["exchange False"].disorder()


@pytest.mark.parametrize("fault", EARLY)
def test_an_early_read_shows(codes: dict[str, Code], fault: str) -> None:
    assert codes[fault].before_wait() != []


@pytest.mark.slow
def test_every_kernel_of_a_layer_keeps_its_order() -> None:
    """In each padding of positions, at other sizes of heads, with keys split or not."""
    found = compiled(LIKE + LAYER, sass=True)[0].kernels
    assert {kernel["name"] for kernel in found if kernel["early"]} >= {"_attend", "_combine", "_product", "_rotate"}
    assert {kernel["name"] for kernel in found if kernel["early"] and Code(kernel["sass"]).before_wait()} == set()
    adding = [code for code in (Code(kernel["sass"]) for kernel in found) if code.all("ATOM")]
    assert len(adding) > 4
    assert all(code.disorder() == [] for code in adding)


@pytest.mark.slow
@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="benchmarks/cuda_codegen.py needs torch 2.13")
def test_every_compiled_kernel_waits_before_it_reads_what_was_just_written() -> None:
    """Inductor's, of layers that our own products do not support.

    For `index_copy` it reads the index before the wait (torch 2.13). That is safe as long as the kernel before does not
    write it: the index is an input of the compiled function, whose first kernel is another one.
    """
    environment = os.environ | {"PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run([sys.executable, "-c", INDUCTOR], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) > 12
    for kernel in found:
        early = Code(kernel["sass"]).before_wait()
        assert kernel["early"]
        assert len(early) == len(kernel["reads"]), kernel["name"]
        if early:
            assert "index_copy" in kernel["name"]
            assert all("LDG" in instruction for instruction in early)
            assert kernel["before"]
            assert all(x.startswith("arg") and x not in kernel["before"] for x in kernel["reads"])

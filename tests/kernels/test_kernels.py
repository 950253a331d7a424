"""The operations of `mtbench.kernels` against float64: the plain versions and the Triton kernels.

Without a GPU the kernels run in Triton's interpreter, in a separate process: TRITON_INTERPRET must be set before the
first import of triton, and transformers imports it. (The interpreter computes bfloat16 products incorrectly, so float16
replaces it.) The kernels are also compiled for a Hopper GPU, which needs no GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hopper import Compiled, compiled
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import products_in_order
from torch import Tensor

from mtbench import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETING = "TRITON_INTERPRET" in os.environ
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
PRECISION = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # TF32 would be 3e-4
ATTEND: dict[str, Callable[..., Tensor]] = {"chosen": kernels.attend}  # plain on a CPU
LINEAR: dict[str, Callable[..., Tensor]] = {"plain": kernels.linear_plain}
NORM: dict[str, Callable[..., Tensor]] = {"plain": kernels.norm_plain}
if INTERPRETING or DEVICE == "cuda":
    from mtbench.kernels import triton_kernels, triton_products

    ATTEND["split"] = partial(triton_kernels.attend, split=True)
    ATTEND["walked"] = partial(triton_kernels.attend, split=False)
    LINEAR["triton"] = triton_kernels.linear
    NORM["triton"] = triton_kernels.norm

each_attend = pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)
each_linear = pytest.mark.parametrize("linear", LINEAR.values(), ids=LINEAR)
each_norm = pytest.mark.parametrize("norm", NORM.values(), ids=NORM)
of_kernels = pytest.mark.skipif(len(ATTEND) == 1, reason="runs in the interpreter's process")
has_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def relative_error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


class Scene(NamedTuple):
    """Arguments of `attend`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    length: Tensor
    scale: float
    softcap: float | None = None

    @staticmethod
    def make(
        lengths: list[int],
        width: int,
        view: int,
        *,
        heads: int = 7,
        key_heads: int = 1,
        size: int = 64,
        dtype: torch.dtype = torch.float32,
        softcap: float | None = None,
        seed: int = 0,
    ) -> "Scene":
        """Return random arguments. Keys and values are a transposed view of longer rows, as in a cache."""
        rows, generator = len(lengths), torch.Generator().manual_seed(seed)
        noise = partial(torch.randn, generator=generator, dtype=torch.float32)
        store = noise(2, rows, view + 5, key_heads, size).to(DEVICE, dtype)
        key, value = store[:, :, :view].transpose(2, 3)
        return Scene(
            noise(rows, width, heads, size).to(DEVICE, dtype).transpose(1, 2),
            key,
            value,
            (torch.rand(rows, width, view, generator=generator) < 0.7).to(DEVICE),
            torch.tensor(lengths, device=DEVICE),
            0.5 if softcap else size**-0.5,
            softcap,
        )

    def reference(self) -> Tensor:
        """Return attention by its definition, in float64."""
        group = self.query.shape[1] // self.key.shape[1]
        key, value = (t.double().repeat_interleave(group, 1) for t in (self.key, self.value))
        scores = self.query.double() @ key.transpose(2, 3) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        sees = self.mask & (torch.arange(self.mask.shape[2], device=DEVICE) < self.length[:, None, None])
        weight = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1).nan_to_num()
        return (weight @ value).transpose(1, 2)


GROUP = 3 if INTERPRETING else 7  # query heads per key head
SCENES = {
    "decoding, a group": Scene.make([40, 97, 3], 1, 97, heads=GROUP),
    "a window, lengths that end inside and on the edge of blocks": Scene.make([64, 150], 4, 150, heads=2, size=128),
    "no groups, more queries than a tile": Scene.make([50], 17, 50, heads=2, key_heads=2, size=16),
    "pairs, half precision": Scene.make([130, 64], 4, 130, heads=4, key_heads=2, dtype=torch.float16),
    "softcap": Scene.make([70], 7, 80, heads=4, key_heads=2, size=32, softcap=3.0),
}
if DEVICE == "cuda":
    SCENES["bfloat16"] = Scene.make([1000, 3, 700], 7, 1024, heads=28, key_heads=4, size=128, dtype=torch.bfloat16)


@each_attend
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_attention_equals_its_definition(attend: Callable[..., Tensor], scene: Scene) -> None:
    """Also for rows of different lengths, shared key heads and random masks."""
    result = attend(*scene)
    assert result.is_contiguous()
    assert result.dtype == scene.query.dtype
    assert relative_error(result, scene.reference()) < PRECISION[result.dtype]


@each_attend
def test_a_query_without_keys_gets_zeros(attend: Callable[..., Tensor]) -> None:
    """An idle row of a batch, or a mask that hides every key, gives zeros, not NaN."""
    scene = Scene.make([0, 60, 60], 3, 70, heads=2)
    scene.mask[1, 1] = False
    scene.mask[2, 2, :32] = False  # nothing in its first block
    result = attend(*scene)
    assert not result[0].any()
    assert not result[1, 1].any()
    assert relative_error(result, scene.reference()) < 1e-5


@of_kernels
@pytest.mark.parametrize("split", [True, False])
def test_slots_beyond_the_length_are_never_read(split: bool) -> None:
    """Unwritten slots may contain NaN."""
    scene = Scene.make([40, 64], 2, 100, heads=2)
    expected = triton_kernels.attend(*scene, split=split)
    for row, length in enumerate([40, 64]):
        scene.key[row, :, length:] = float("nan")
        scene.value[row, :, length:] = float("nan")
        scene.mask[row, :, length:] ^= True
    assert torch.equal(triton_kernels.attend(*scene, split=split), expected)


@of_kernels
@settings(deadline=None, max_examples=3 if INTERPRETING else 10)
@example(seed=0, length=64, more=1, width=3, split=True)  # on the edge of a block
@example(seed=1, length=65, more=0, width=2, split=False)  # behind it
@given(st.integers(0, 1000), st.integers(1, 70), st.integers(0, 40), st.integers(1, 3), st.booleans())
def test_attention_is_batch_invariant(seed: int, length: int, more: int, width: int, split: bool) -> None:
    """A query gets the same bits alone, in a batch and in a window, with any view, as lossless verification needs."""
    if DEVICE == "cpu":
        make = partial(Scene.make, heads=4, key_heads=2, size=16)
    else:
        make = partial(Scene.make, heads=28, key_heads=4, size=128, dtype=torch.bfloat16)
    scene = make([length, 20], width, length + more, seed=seed)
    together = triton_kernels.attend(*scene, split=split)
    alone = Scene(
        scene.query[:1, :, -1:],
        scene.key[:1, :, :length],
        scene.value[:1, :, :length],
        scene.mask[:1, -1:, :length],
        scene.length[:1],
        scene.scale,
    )
    for other in (True, False):
        assert torch.equal(triton_kernels.attend(*alone, split=other)[0, 0], together[0, -1])


@pytest.mark.skipif(DEVICE == "cpu", reason="a GPU's own choice of kernel")
def test_a_gpu_runs_the_kernels() -> None:
    """CUDA tensors go to the kernel; unsupported head sizes go to the plain version and are correct too."""
    scene = Scene.make([40, 97], 2, 97)
    assert torch.equal(kernels.attend(*scene), triton_kernels.attend(*scene))
    other = Scene.make([40, 97], 2, 97, size=80)
    assert relative_error(kernels.attend(*other), other.reference()) < 1e-3


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.fixture(params=[(64, 128), (70, 100), (40, 2048 + 64)], ids=["full tiles", "partial tiles", "in parts"])
def layer(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """70 input rows and a weight."""
    outputs, inputs = request.param
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return noise(70, inputs).to(DEVICE, dtype), noise(outputs, inputs).to(DEVICE, dtype)


@each_linear
def test_the_product_equals_that_of_float64(linear: Callable[..., Tensor], layer: tuple[Tensor, Tensor]) -> None:
    """For full and partial tiles, inputs split into parts, and for no rows."""
    x, weight = layer
    result = linear(x.unflatten(0, (2, 35)), weight)
    assert result.shape == (2, 35, len(weight))
    assert relative_error(result.flatten(0, 1), x.double() @ weight.double().T) < PRECISION[x.dtype]
    assert linear(x[:0], weight).shape == (0, len(weight))


@each_linear
def test_the_product_is_batch_invariant(
    linear: Callable[..., Tensor], layer: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row gets the same bits for any number and content of other rows, and at any index."""
    x, weight = layer
    with products_in_order() if INTERPRETING and linear is not kernels.linear_plain else nullcontext():
        together = linear(x, weight)
        for rows in ([69], [3, 69], [69, *range(40)]):
            assert torch.equal(linear(x[rows], weight)[rows.index(69)], together[69])
        if linear is not kernels.linear_plain:
            monkeypatch.setattr(triton_products, "CHUNKS", 1)
            assert torch.equal(linear(x, weight), together)


@each_norm
@pytest.mark.parametrize("size", [16, 100, 3584])
def test_the_norm_equals_that_of_float64(norm: Callable[..., Tensor], dtype: torch.dtype, size: int) -> None:
    """To the type's precision; a row gets the same bits alone and in a batch."""
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight = (3 * noise(2, 5, size)).to(DEVICE, dtype), noise(size).to(DEVICE, dtype)
    expected = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    together = norm(x, weight, 1e-6)
    assert relative_error(together, expected) < PRECISION[dtype]
    assert torch.equal(norm(x[1, 3:4], weight, 1e-6)[0], together[1, 3])


@pytest.mark.whole
@has_triton
@pytest.mark.skipif(len(ATTEND) > 1, reason="this process runs them")
@pytest.mark.parametrize("mark", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_pass_in_the_interpreter(mark: str) -> None:
    """All kernel tests above, and those of the other files here."""
    options = ["-q", "-rs", "--noconftest", "-p", "no:cacheprovider", "-k", "not plain and not compile", "-m", mark]
    others = ("cases", "memory_order", "operations", "self_check", "triton_sampling")
    files = [__file__, *(str(Path(__file__).with_name(f"test_{name}.py")) for name in others)]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout
    assert "in the interpreter" not in done.stdout, "a test of a kernel was skipped"


VIEWS = """
from mtbench import kernels
from mtbench.kernels import triton_kernels
like, before = torch.empty(0, dtype=torch.bfloat16), kernels.compilations()
for view in (512, 48, 1040, 32, 2000, 50):
    cache, query = like.new_empty(16, view, 4, 128).transpose(1, 2), like.new_empty(16, 3, 28, 128).transpose(1, 2)
    mask = torch.ones(16, 3, view, dtype=torch.bool)
    triton_kernels.attend(query, cache, cache, mask, torch.ones(16, dtype=torch.int64), 0.1)
    print(view, kernels.compilations() - before)
"""
SAMPLE = """
for rows, width in ((1, 1), (16, 4)):
    logits, seed = like.new_empty(rows, width, 152064), torch.empty(rows, dtype=torch.int64)
    for temperature in (torch.empty(rows, dtype=torch.float64), None):
        triton_kernels.choose_logsumexp(logits, temperature, seed, torch.empty(rows, width, dtype=torch.int64))
"""
COMPILE = """
from mtbench.kernels import triton_attention, triton_products
from mtbench.kernels import triton_kernels as kernels
from mtbench.kernels import Norm, NormInput
for module in (triton_attention, triton_products, kernels):
    module.dependent_launch = lambda device: True
like, ids = torch.empty(0, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
norm = Norm(like.new_empty(3584), 1e-6, 2.0)
for heads, key_heads, size in ((28, 4, 128), (16, 4, 96)):
    for rows, width in ((1, 1), (16, 4), (128, 4)):
        cache = like.new_empty(rows, 1024, key_heads, size).transpose(1, 2)
        mask = torch.ones(rows, width, 1024, dtype=torch.bool)
        query = like.new_empty(rows, width, heads, size).transpose(1, 2)
        kernels.attend(query, cache, cache, mask, torch.ones(rows, dtype=torch.int64), 0.1)
for positions in (4, 32, 64, 112):
    entering = NormInput(like.new_empty(positions, 3584), torch.empty(28, positions))
    activated = kernels.norm_swiglu(entering, norm, like.new_empty(2 * 18944, 3584))
    kernels.add_product(entering.weighted, activated, like.new_empty(3584, 18944), None, norm)
kernels.norm_product(entering, norm, like.new_empty(4608, 3584), like.new_empty(4608))
store = like.new_empty(9, 4, 128)
kernels.rotate(like.new_empty(4, 36 * 128), ids, store[:, :1], store[:, :1], store, store, ids)
kernels.embed(ids, like.new_empty(9, 3584), norm)
kernels.norm(like.new_empty(7, 3584), like.new_empty(3584), 1e-6)
"""
KERNELS = {"_attend", "_combine", "_product", "_add_parts", "_rotate", "_embed", "_norm"}
MATRIX_UNIT, LAYER = {"_attend", "_product"}, {"_attend", "_combine", "_product", "_add_parts", "_rotate"}
REGISTERS, SHARED_BYTES = 65_536, 232_448  # of a multiprocessor, of which a program may have them all


@pytest.fixture(scope="module")
def on_hopper() -> dict[str, Compiled]:
    """What the scripts compile, in one process."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    if INTERPRETING:
        pytest.skip("the interpreter compiles nothing")
    return dict(zip(("views", "sampling", "layer"), compiled(VIEWS, SAMPLE, COMPILE), strict=True))


@pytest.mark.whole
def test_views_that_are_multiples_of_16_share_a_kernel(on_hopper: dict[str, Compiled]) -> None:
    """Each kernel that Triton compiles is counted.

    A view of one block is not split. A long one has parts of another size, for which both kernels are compiled, and one
    that is no multiple needs one more.
    """
    assert on_hopper["views"].printed == ["512 2", "48 3", "1040 5", "32 5", "2000 5", "50 6"]


@pytest.mark.whole
def test_the_sampling_kernels_compile_for_a_gpu_without_spilling(on_hopper: dict[str, Compiled]) -> None:
    """At Qwen2.5-7B's vocabulary; the number of positions and of rows needs no other code."""
    found = on_hopper["sampling"].kernels
    assert {kernel["name"] for kernel in found} == {"_choose_slice", "_choose_row"}
    assert all(kernel["STACK"] == kernel["LOCAL"] == 0 for kernel in found)


@pytest.mark.whole
def test_the_kernels_compile_for_a_gpu_without_spilling(on_hopper: dict[str, Compiled]) -> None:
    """At Qwen2.5-7B's shapes for a Hopper GPU: products use its matrix unit, and no register spills.

    A layer's kernels wait for their predecessors, which may still run (programmatic dependent launch), and products ask
    for weights before they wait.
    """
    found = on_hopper["layer"].kernels
    assert {kernel["name"] for kernel in found} == KERNELS
    for kernel in found:
        assert kernel["STACK"] == kernel["LOCAL"] == 0, kernel
        assert kernel["REG"] * kernel["threads"] <= REGISTERS, kernel
        assert kernel["shared"] <= SHARED_BYTES, kernel
        assert kernel["wgmma"] or kernel["name"] not in MATRIX_UNIT
        assert kernel["waits"] == (kernel["name"] in LAYER)
        assert kernel["prefetches"] == (kernel["name"] == "_product")
    two = [
        k for k in found if 2 * (k["shared"] + 1024) <= SHARED_BYTES + 1024 and 2 * k["REG"] * k["threads"] <= REGISTERS
    ]
    assert sum(k["name"] == "_product" for k in two) == 6  # to 64 positions two programs fit a processor
    assert sum(k["name"] == "_attend" for k in two) == sum(k["name"] == "_attend" for k in found)

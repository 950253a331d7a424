"""Attention, the product and the norm against float64; all kernels in the interpreter, and compiled for three GPUs."""

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
from compiled_kernels import compiled
from hypothesis import example, given, settings
from hypothesis import strategies as st
from interpreted import DEVICE, INTERPRETING, of_kernels, products_in_order
from torch import Tensor

from mtbench import kernels
from mtbench.kernels import Norm

DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
PRECISION = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # TF32 would be 3e-4
ATTEND: dict[str, Callable[..., Tensor]] = {"chosen": kernels.attend}  # plain on a CPU
LINEAR: dict[str, Callable[..., Tensor]] = {"plain": kernels.linear}
if INTERPRETING or DEVICE == "cuda":
    from mtbench.kernels import triton_attention, triton_kernels

    ATTEND["split"] = partial(triton_kernels.attend, split=True)
    ATTEND["walked"] = partial(triton_kernels.attend, split=False)
    LINEAR["triton"] = triton_kernels.linear
if INTERPRETING:
    triton_attention.AHEAD = 4  # unrolled loads are slow in the interpreter
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN

each_attend = pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)
each_linear = pytest.mark.parametrize("linear", LINEAR.values(), ids=LINEAR)
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
    "pairs, half precision": Scene.make([130, 64], 3, 130, heads=4, key_heads=2, dtype=torch.float16),
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
@settings(deadline=None, max_examples=1 if INTERPRETING else 10)
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
def test_the_product_is_batch_invariant(linear: Callable[..., Tensor], layer: tuple[Tensor, Tensor]) -> None:
    """A row gets the same bits for any number and content of other rows, and at any index."""
    x, weight = layer
    with products_in_order() if INTERPRETING and linear is not kernels.linear else nullcontext():
        together = linear(x, weight)
        for rows in ([69], [69, *range(40)]):
            assert torch.equal(linear(x[rows], weight)[rows.index(69)], together[69])


@of_kernels
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16], ids=["single", "half"]
)
def test_blocks_of_attention_give_the_same_bits_in_any_division(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walked; parts of a block and of a span, one or several a program; tiles of 16 queries and of 32.

    GPUs and windows differ. Lengths end inside a block, and on the edge of a block and of a span.
    """
    size, span = (256, 64) if dtype == torch.float32 else (128, 256)
    lengths = [span, span + span // 4 + 3]
    rows, view = len(lengths), span + span // 2
    scene = Scene.make(lengths, 3, view, heads=8, size=size, dtype=dtype)
    expected = triton_kernels.attend(*scene, split=False)
    parts = set()
    for processors in (1, 132) if INTERPRETING else (1, 6, 132):
        gpu = triton_attention.Gpu(processors, 232_448, 9)
        monkeypatch.setattr(triton_attention, "gpu", lambda _, gpu=gpu: gpu)
        parts.add(triton_attention._division(rows, 6, processors)[0])
        assert torch.equal(triton_kernels.attend(*scene, split=True), expected)
    assert parts == {1, triton_attention.SPAN}
    query, key, value, mask, length, scale, _ = scene
    alone = triton_kernels.attend(query[1:, :, 2:], key[1:], value[1:], mask[1:, 2:], length[1:], scale)
    assert torch.equal(alone, expected[1:, 2:])


@of_kernels
@settings(deadline=None, max_examples=5)
@given(st.integers(0, 99), st.sampled_from([16, 100, 3000]), st.integers(1, 9))
def test_row_kernels_are_batch_invariant(seed: int, size: int, count: int) -> None:
    """A row gets the same bits alone and among others."""
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    x, added, both = (noise(count, n).to(DEVICE) for n in (size, size, 2 * size))
    by = Norm(noise(size).to(DEVICE), 1e-6)
    alone, together = x[-1:].clone(), x.clone()
    normed = triton_kernels.add_norm(together, added, by)
    assert torch.equal(triton_kernels.add_norm(alone, added[-1:], by), normed[-1:])
    assert torch.equal(alone, together[-1:])
    assert torch.equal(triton_kernels.swiglu(both[-1:]), triton_kernels.swiglu(both)[-1:])


@of_kernels
@given(data=st.data())
@settings(max_examples=6, deadline=None)
def test_slots_move_in_every_layer_as_by_indexing(data: st.DataObject) -> None:
    """Keys and values of some layers at any sizes; the sources of a row ascend, as the path of a tree does."""
    rows, slots, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(6, 12)), data.draw(st.integers(1, 3))
    heads, size = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([16, 24]))
    depth = data.draw(st.integers(1, 4))
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    stores = [noise(rows * slots + 2, heads, size).to(DEVICE) for _ in range(2 * layers)]
    base = torch.tensor([data.draw(st.integers(0, slots - depth - 2)) for _ in range(rows)])[:, None]
    steps = [data.draw(st.lists(st.integers(0, 2), min_size=depth, max_size=depth)) for _ in range(rows)]
    target = base + torch.arange(depth)
    source = (target + torch.tensor(steps).cumsum(1)).clamp(max=slots - 1)
    expected = [store.clone() for store in stores]
    row = torch.arange(rows)[:, None]
    for store in expected:
        by_row = store[: rows * slots].view(rows, slots, heads, size)
        by_row[row, target] = by_row[row, source]
    triton_kernels.move(triton_kernels.addresses(stores), stores[0], source.to(DEVICE), target.to(DEVICE), slots)
    assert all(torch.equal(a, b) for a, b in zip(stores, expected, strict=True))


@pytest.mark.whole
@has_triton
@pytest.mark.skipif(len(ATTEND) > 1, reason="this process runs them")
@pytest.mark.parametrize("mark", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_pass_in_the_interpreter(mark: str) -> None:
    """All kernel tests above, and those of the other files here."""
    options = ["-q", "-rs", "--noconftest", "-p", "no:cacheprovider", "-k", "not plain and not compile", "-m", mark]
    others = ("cases", "decoder", "step_kernels", "triton_sampling")
    files = [__file__, *(str(Path(__file__).with_name(f"test_{name}.py")) for name in others)]
    command = [sys.executable, "-m", "pytest", *options, *files]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout
    assert "in the interpreter" not in done.stdout, "a test of a kernel was skipped"


KERNELS = """
from mtbench.decoding.step_check import case_differs
from mtbench.kernels import Norm, triton_attention, triton_kernels
from mtbench.kernels import triton_kernels as kernels
import mtbench.kernels
gpu = triton_attention.Gpu(132, 232448 if ARCHITECTURE in (90, 100) else 166912, ARCHITECTURE // 10)
triton_attention.gpu = lambda device: gpu
like, ids = torch.empty(0, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int64)
for heads, key_heads, size in ((28, 4, 128), (16, 4, 96)):
    for rows, width, view in ((1, 1, 1024), (16, 4, 1024), (128, 4, 512)):
        cache = like.new_empty(rows, view, key_heads, size).transpose(1, 2)
        mask = torch.ones(rows, width, view, dtype=torch.bool)
        query = like.new_empty(rows, width, heads, size).transpose(1, 2)
        kernels.attend(query, cache, cache, mask, torch.ones(rows, dtype=torch.int64), 0.1)
for rows, width in ((1, 1), (16, 4)):
    logits, seed = like.new_empty(rows, width, 152064), torch.empty(rows, dtype=torch.int64)
    for temperature in (torch.empty(rows, dtype=torch.float64), None):
        kernels.choose_logsumexp(logits, temperature, seed, torch.empty(rows, width, dtype=torch.int64))
by, x, store = Norm(like.new_empty(3584), 1e-6), like.new_empty(4, 3584), like.new_empty(9, 4, 128)
kernels.embed(like.new_empty(9, 3584), ids, by)
kernels.norm(x, by)
kernels.add_norm(x, x, by)
kernels.swiglu(like.new_empty(4, 2 * 18944))
for norms in (None, (Norm(store, 1e-6), Norm(store, 1e-6))):
    kernels.rotate(like.new_empty(4, 36 * 128), (store[:4, :1],) * 2, (store, store), ids, norms)
kernels.linear(x, like.new_empty(4608, 3584), like.new_empty(4608))
kernels.move(ids, store, ids[:, None], ids[:, None], 2)
mtbench.kernels.ours = lambda x: x.dtype == torch.int64 and not mtbench.kernels._off
for guesses, tree in ((0, None), (6, None), (6, "by row")):
    case_differs(torch.device("cpu"), 1, guesses, tree=tree, block=1)
"""
NAMES = {"_attend", "_combine", "_choose_slice", "_choose_row", "_norm", "_swiglu", "_rotate", "_linear", "_move"}
NAMES |= {"_feed", "_write"}
MATRIX_UNIT = {"_attend", "_linear"}
REGISTERS = 65_536  # of a multiprocessor, of which a program may have them all
SHARED_BYTES = {80: 166_912, 90: 232_448, 100: 232_448}  # that a program may have


@pytest.mark.whole
@has_triton
@pytest.mark.skipif(INTERPRETING, reason="the interpreter compiles nothing")
@pytest.mark.parametrize(
    "architecture", [one if one == 90 else pytest.param(one, marks=pytest.mark.slow) for one in SHARED_BYTES]
)
@pytest.mark.usefixtures("forks")
def test_each_kernel_compiles_for_a_gpu_without_spilling(architecture: int) -> None:
    """At Qwen2.5-7B's shapes, for Ampere, Hopper and Blackwell. Two programs of attention fit a Hopper processor."""
    made = compiled(KERNELS, architecture=architecture)
    assert {kernel["name"] for kernel in made} == NAMES
    limit = SHARED_BYTES[architecture]
    for kernel in made:
        assert kernel["STACK"] == kernel["LOCAL"] == 0, kernel
        assert kernel["REG"] * kernel["threads"] <= REGISTERS, kernel
        assert kernel["shared"] <= limit, kernel
        if architecture == 90:
            assert kernel["wgmma"] == (kernel["name"] in MATRIX_UNIT), kernel
            twice = 2 * (kernel["shared"] + 1024) <= limit + 1024 and 2 * kernel["REG"] * kernel["threads"] <= REGISTERS
            assert twice or kernel["name"] != "_attend"

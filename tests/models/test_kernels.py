"""The operations of `mtbench.models.kernels`, each against float64: the plain version, and the Triton kernels.

Without a GPU the kernels run in Triton's interpreter, in a process of its own: what interprets must be told so before
anything imports triton, as transformers does. (The interpreter gets products of bfloat16 wrong; float16 stands in.)
They are also compiled for a Hopper GPU, which takes no GPU.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtbench.models import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETING = "TRITON_INTERPRET" in os.environ
DTYPES = [torch.float32] if DEVICE == "cpu" else [torch.float32, torch.bfloat16]
PRECISION = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}  # TF32 would be 3e-4
ATTEND: dict[str, Callable[..., Tensor]] = {"chosen": kernels.attend}  # plain on a CPU
Judge = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
JUDGE: dict[str, Judge] = {"plain": lambda logits: kernels.judge_plain(logits.cpu())}
LINEAR: dict[str, Callable[..., Tensor]] = {"plain": kernels.linear_plain}
NORM: dict[str, Callable[..., Tensor]] = {"plain": kernels.norm_plain}
if INTERPRETING or DEVICE == "cuda":
    from mtbench.models import triton_kernels

    ATTEND["split"] = partial(triton_kernels.attend, split=True)
    ATTEND["walked"] = partial(triton_kernels.attend, split=False)
    JUDGE["triton"] = triton_kernels.judge
    LINEAR["triton"] = triton_kernels.linear
    NORM["triton"] = triton_kernels.norm

each_attend = pytest.mark.parametrize("attend", ATTEND.values(), ids=ATTEND)
each_judge = pytest.mark.parametrize("judge", JUDGE.values(), ids=JUDGE)
each_linear = pytest.mark.parametrize("linear", LINEAR.values(), ids=LINEAR)
each_norm = pytest.mark.parametrize("norm", NORM.values(), ids=NORM)
of_kernels = pytest.mark.skipif(len(ATTEND) == 1, reason="the interpreter's process runs it")
has_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


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
        """Keys and values as a cache gives them: a transposed view of longer rows. Masks at random."""
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
        """By the definition, in float64."""
        group = self.query.shape[1] // self.key.shape[1]
        key, value = (t.double().repeat_interleave(group, 1) for t in (self.key, self.value))
        scores = self.query.double() @ key.transpose(2, 3) * self.scale
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap
        sees = self.mask & (torch.arange(self.mask.shape[2], device=DEVICE) < self.length[:, None, None])
        weight = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1).nan_to_num()
        return (weight @ value).transpose(1, 2)


SCENES = {
    "decoding, a group of 7": Scene.make([40, 97, 3], 1, 97),
    "a window, lengths that end inside and on the edge of blocks": Scene.make([64, 150], 4, 150, heads=2, size=128),
    "no groups, more queries than a tile": Scene.make([50], 18, 50, heads=2, key_heads=2, size=16),
    "pairs, half precision": Scene.make([300, 128], 4, 300, heads=4, key_heads=2, dtype=torch.float16),
    "softcap": Scene.make([70], 7, 80, heads=4, key_heads=2, size=32, softcap=3.0),
}
if DEVICE == "cuda":
    SCENES["bfloat16"] = Scene.make([1000, 3, 700], 7, 1024, heads=28, key_heads=4, size=128, dtype=torch.bfloat16)


@each_attend
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_attention_weighs_what_each_query_sees(attend: Callable[..., Tensor], scene: Scene) -> None:
    """Ragged rows, shared key heads, any mask: the result is that of the definition."""
    got = attend(*scene)
    assert got.is_contiguous()
    assert got.dtype == scene.query.dtype
    assert relative_error(got, scene.reference()) < PRECISION[got.dtype]


@each_attend
def test_a_query_that_sees_nothing_gets_zeros(attend: Callable[..., Tensor]) -> None:
    """An idle row of a batch, or a mask that hides all, must not bring NaN into a forward."""
    scene = Scene.make([0, 60, 60], 3, 70, heads=2)
    scene.mask[1, 1] = False
    scene.mask[2, 2, :32] = False  # nothing in its first block
    got = attend(*scene)
    assert not got[0].any()
    assert not got[1, 1].any()
    assert relative_error(got, scene.reference()) < 1e-5


@of_kernels
@pytest.mark.parametrize("split", [True, False])
def test_slots_beyond_the_length_are_never_read(split: bool) -> None:
    """A slot that nothing was written to may hold anything."""
    scene = Scene.make([40, 64], 2, 100, heads=2)
    want = triton_kernels.attend(*scene, split=split)
    for row, length in enumerate([40, 64]):
        scene.key[row, :, length:] = float("nan")
        scene.value[row, :, length:] = float("nan")
        scene.mask[row, :, length:] ^= True
    assert torch.equal(triton_kernels.attend(*scene, split=split), want)


@of_kernels
@settings(deadline=None, max_examples=10)
@given(st.integers(0, 1000), st.integers(1, 150), st.integers(0, 40), st.integers(1, 3), st.booleans())
def test_a_query_gets_the_same_bits_in_any_company(seed: int, length: int, more: int, width: int, split: bool) -> None:
    """Alone or in a batch, fed by itself or in a window, with any view: what AR and a verifying method compare."""
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
def test_a_gpu_takes_the_kernels() -> None:
    """What a CUDA tensor is given to is the kernel, and other head sizes still come out right."""
    scene = Scene.make([40, 97], 2, 97)
    assert torch.equal(kernels.attend(*scene), triton_kernels.attend(*scene))
    odd = Scene.make([40, 97], 2, 97, size=80)
    assert relative_error(kernels.attend(*odd), odd.reference()) < 1e-3


@each_judge
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_verdict_is_that_of_float64(judge: Judge, dtype: torch.dtype) -> None:
    """Choice, its logit and the logsumexp of vocabularies that are no multiple of anything, suppressed ids included."""
    logits = (torch.randn(2, 3, 9001, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    logits[..., 5:4500] = float("-inf")
    choice, largest, logsumexp = judge(logits.to(DEVICE))
    assert torch.equal(choice.cpu(), logits.double().argmax(-1))
    assert torch.equal(largest.cpu(), logits.float().amax(-1))
    torch.testing.assert_close(logsumexp.cpu().double(), logits.double().logsumexp(-1), rtol=1e-5, atol=1e-5)


@each_judge
@settings(deadline=None)
@given(st.lists(st.sampled_from([-3.0, 0.0, 0.5, 80.0, float("-inf")]), min_size=1, max_size=20), st.integers(1, 9000))
def test_the_first_of_equals_is_chosen(judge: Judge, values: list[float], vocabulary: int) -> None:
    """Ties are common in bfloat16; a row of only −∞ chooses id 0 and is sure of nothing."""
    row = torch.tensor(values).repeat(-(-vocabulary // len(values)))[:vocabulary]
    choice, largest, logsumexp = judge(row.to(DEVICE))
    assert int(choice) == row.tolist().index(max(row.tolist()))
    assert float(largest) == max(row.tolist())
    torch.testing.assert_close(logsumexp.cpu(), row.double().logsumexp(-1).float())


@of_kernels
def test_nan_still_chooses_an_id_that_exists() -> None:
    """A broken model must not crash a GPU by an index out of range."""
    choice, _, _ = triton_kernels.judge(torch.full((2, 5000), float("nan"), device=DEVICE))
    assert ((choice >= 0) & (choice < 5000)).all()


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(params=[(64, 128), (70, 100), (40, 2048 + 64)], ids=["full tiles", "odd", "in parts"])
def layer(request: pytest.FixtureRequest, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """70 rows, a weight, a bias."""
    outputs, inputs = request.param
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    return (
        noise(70, inputs).to(DEVICE, dtype),
        noise(outputs, inputs).to(DEVICE, dtype),
        noise(outputs).to(DEVICE, dtype),
    )


@each_linear
def test_the_product_is_that_of_float64(linear: Callable[..., Tensor], layer: tuple[Tensor, Tensor, Tensor]) -> None:
    """Shapes that fill tiles and shapes that do not, inputs cut into parts, with and without bias, no rows at all."""
    x, weight, bias = layer
    want = x.double() @ weight.double().T
    assert relative_error(linear(x, weight), want) < PRECISION[x.dtype]
    got = linear(x.unflatten(0, (2, 35)), weight, bias)
    assert got.shape == (2, 35, len(weight))
    assert relative_error(got.flatten(0, 1), want + bias.double()) < PRECISION[x.dtype]
    assert linear(x[:0], weight, bias).shape == (0, len(weight))


@each_linear
def test_a_row_gets_the_same_bits_in_any_company(
    linear: Callable[..., Tensor], layer: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many rows stand beside it, whatever they hold, wherever it stands."""
    x, weight, bias = layer
    together = linear(x, weight, bias)
    for rows in ([69], [3, 69], [69, *range(40)]):
        assert torch.equal(linear(x[rows], weight, bias)[rows.index(69)], together[69])
    if linear is not kernels.linear_plain:
        monkeypatch.setattr(triton_kernels, "CHUNK", 40)
        assert torch.equal(linear(x, weight, bias), together)


@each_norm
@pytest.mark.parametrize("size", [16, 100, 3584])
def test_the_norm_is_that_of_float64(norm: Callable[..., Tensor], dtype: torch.dtype, size: int) -> None:
    """To the type's precision; and a row gets the same bits alone and among others."""
    noise = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, weight = (3 * noise(2, 5, size)).to(DEVICE, dtype), noise(size).to(DEVICE, dtype)
    want = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-6) * weight.double()
    together = norm(x, weight, 1e-6)
    assert relative_error(together, want) < PRECISION[dtype]
    assert torch.equal(norm(x[1, 3:4], weight, 1e-6)[0], together[1, 3])


@has_triton
@pytest.mark.skipif(len(ATTEND) > 1, reason="this process runs them itself")
def test_the_kernels_pass_in_the_interpreter() -> None:
    """Every test above, of the kernels."""
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-k", "not plain and not compile"]
    command = [sys.executable, "-m", "pytest", *options, __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stdout


COMPILE = """
import re, subprocess, tempfile
from pathlib import Path
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

class Hopper:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

def compile_only(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        told = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    print(self.__name__, *re.findall("(?:REG|STACK|LOCAL):[0-9]+", told), "wgmma" in kernel.asm["ptx"])

triton.runtime.driver.set_active(Hopper())
run, JITFunction.run = JITFunction.run, compile_only
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
from mtbench.models import triton_kernels as kernels
like = torch.empty(0, dtype=torch.bfloat16)
for rows, width in ((1, 1), (1, 7), (32, 7)):
    cache = like.new_empty(rows, 1024, 4, 128).transpose(1, 2)
    mask = torch.ones(rows, width, 1024, dtype=torch.bool)
    query = like.new_empty(rows, width, 28, 128).transpose(1, 2)
    kernels.attend(query, cache, cache, mask, torch.ones(rows, dtype=torch.int64), 0.1)
kernels.judge(like.new_empty(4, 152064))
kernels.linear(like.new_empty(7, 3584), like.new_empty(3584, 3584), like.new_empty(3584))
kernels.linear(like.new_empty(7, 3584), like.new_empty(18944, 3584))
kernels.norm(like.new_empty(7, 3584), like.new_empty(3584), 1e-6)
"""


KERNELS = ("_attend", "_combine", "_judge", "_verdict", "_linear", "_add", "_norm")


@has_triton
def test_the_kernels_compile_for_a_gpu_without_spilling() -> None:
    """At Qwen2.5-7B's shapes for a Hopper GPU: products on its matrix unit, and every register in place."""
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == set(KERNELS)
    for line in lines:
        assert "STACK:0 LOCAL:0" in line
        assert line.endswith("True") or not line.startswith(("_attend", "_linear"))

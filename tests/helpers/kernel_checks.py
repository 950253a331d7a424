"""Checks of the operations over few positions (`mtbench.kernels.Operations`) against their formulas in float64.

A check takes operations and a type and raises AssertionError. Tests run it with the plain definitions and, in Triton's
interpreter, with the kernels; tests/helpers/planted_kernels.py runs it with faults in the kernels.
"""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from small import small_checkpoint, small_config
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from mtbench.kernels import PLAIN, Norm, NormInput, Operations
from mtbench.kernels.product_plan import Plan
from mtbench.models import fused_decoder
from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import Decoder
from mtbench.models.runner import ModelRunner

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 0.3  # large, so that a norm without it differs
PRECISION = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
# Outputs and inputs, rows of a group and steps of a share: split groups; several groups a share; partial tiles; halves.
SHAPES = [((260, 600), (128, 4)), ((700, 64), (64, 4)), ((70, 100), (256, 4)), ((300, 400), (256, 3))]
Check = Callable[[Operations, torch.dtype], None]


def assert_close(result: Tensor, expected: Tensor, precision: float | None = None) -> None:
    """Check the relative error over all elements, and that no element is NaN."""
    apart = float((result.double() - expected).norm() / expected.norm())
    assert apart < (PRECISION[result.dtype] if precision is None else precision), f"relative error {apart:.2g}"


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(DEVICE, dtype)


def made_norm(size: int, dtype: torch.dtype) -> Norm:
    return Norm.make(3 * noise(size, dtype=dtype, seed=7), EPS)


def normalised(x: Tensor, norm: Norm) -> Tensor:
    """Return the norm by its definition, in float64."""
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight.double()


def entering(x: Tensor, norm: Norm, parts: int = 3) -> NormInput:
    """Return the norm's input, with the sums of squares over several parts of a row."""
    squares = torch.stack([part.double().pow(2).sum(-1) for part in x.chunk(parts, -1)])
    weighted = x.double() * norm.weight.double() / norm.power
    squares = squares.to(torch.promote_types(x.dtype, torch.float32))
    return NormInput(weighted.to(x.dtype), squares.T.contiguous().T)  # as the last positions of one row are


@contextmanager
def divided(run: Operations, rows: int, share: int) -> Iterator[None]:
    """Give the products of these operations such a plan: shapes as small as here would not be split."""
    module = sys.modules[run.norm_product.__module__]
    if not hasattr(module, "plan"):  # the plain definitions
        yield
        return
    with mock.patch.object(module, "plan", lambda outputs, inputs, _: Plan(outputs, inputs, rows, share)):
        yield


def check_embed(run: Operations, dtype: torch.dtype) -> None:
    """Embeddings by id, and the first norm's input."""
    table, norm = noise(50, 72, dtype=dtype), made_norm(72, dtype)
    ids = torch.tensor([3, 49, 0, 3])
    x, following = run.embed(ids, table, norm)
    assert torch.equal(x, table[ids])
    check_norm_input(following, x, norm)


def check_norm_input(following: NormInput, x: Tensor, norm: Norm) -> None:
    assert_close(following.weighted, x.double() * norm.weight.double() / norm.power)
    assert_close(following.squares.sum(0), x.double().pow(2).sum(-1), 2e-6)


def check_norm_product(run: Operations, dtype: torch.dtype) -> None:
    """For one row, and more rows than a tile; with and without a bias."""
    for ((outputs, inputs), plan), rows in zip(SHAPES, (3, 17, 33, 2), strict=True):
        x, norm = noise(rows, inputs, dtype=dtype), made_norm(inputs, dtype)
        weight, bias = noise(outputs, inputs, dtype=dtype, seed=1), noise(outputs, dtype=dtype, seed=2)
        expected = normalised(x, norm) @ weight.double().T
        with divided(run, *plan):
            assert_close(run.norm_product(entering(x, norm), norm, weight), expected)
            assert_close(run.norm_product(entering(x, norm), norm, weight, 30 * bias), expected + 30 * bias.double())


def check_norm_swiglu(run: Operations, dtype: torch.dtype) -> None:
    """Both halves of the weight, whose sizes no tile divides."""
    for ((outputs, inputs), plan), rows in zip([((200, 280), (128, 4)), ((70, 300), (256, 3))], (2, 17), strict=True):
        x, norm = noise(rows, inputs, dtype=dtype), made_norm(inputs, dtype)
        weight = noise(2 * outputs, inputs, dtype=dtype, seed=1) * inputs**-0.5
        gate, up = (normalised(x, norm) @ weight.double().T).chunk(2, -1)
        with divided(run, *plan):
            assert_close(run.norm_swiglu(entering(x, norm), norm, weight), silu(gate) * up)


def check_add_product(run: Operations, dtype: torch.dtype) -> None:
    """The residual in place, and the next norm's input of the rounded residual."""
    for ((outputs, inputs), plan), rows in zip(SHAPES, (17, 1, 33, 2), strict=True):
        x, residual = noise(rows, inputs, dtype=dtype), 20 * noise(rows, outputs, dtype=dtype, seed=3)
        weight, norm = noise(outputs, inputs, dtype=dtype, seed=1), made_norm(outputs, dtype)
        bias = 20 * noise(outputs, dtype=dtype, seed=4) if rows > 1 else None
        expected = residual.double() + x.double() @ weight.double().T
        with divided(run, *plan):
            following = run.add_product(residual, x, weight, bias, norm)
        assert_close(residual, expected if bias is None else expected + bias.double())
        check_norm_input(following, residual, norm)


def check_many_positions(run: Operations, dtype: torch.dtype) -> None:
    """Over more than 64 positions, which float32 takes in parts: groups in one tile, their parts added apart or not."""
    dtype = torch.float64 if run is PLAIN and dtype == torch.float64 else torch.float16
    x, norm, rows = noise(70, 400, dtype=dtype), made_norm(400, dtype), 70
    for outputs, *plan in ((300, 256, 3), (300, 256, 7), (270, 128, 2), (512, 256, 10)):
        weight, bias = noise(outputs, 400, dtype=dtype, seed=1) / 20, noise(outputs, dtype=dtype, seed=2)
        residual, following = noise(rows, outputs, dtype=dtype, seed=3), made_norm(outputs, dtype)
        product = normalised(x, norm) @ weight.double().T
        added = residual.double() + x.double() @ weight.double().T
        gate, up = product.chunk(2, -1)
        with divided(run, *plan):
            assert_close(run.norm_product(entering(x, norm), norm, weight, bias), product + bias.double())
            assert_close(run.norm_swiglu(entering(x, norm), norm, weight), silu(gate) * up)
            check_norm_input(run.add_product(residual, x, weight, None, following), residual, following)
        assert_close(residual, added)


def check_large_values(run: Operations, dtype: torch.dtype) -> None:
    """A residual times a norm's weight beyond the type's range: float16 holds 65,504 at most."""
    residual, norm = torch.full((1, 64), 6e4, dtype=dtype), Norm.make(torch.full((64,), 7.0, dtype=dtype), EPS)
    zero, one = torch.zeros(1, 16, dtype=dtype), torch.eye(64, dtype=dtype)
    following = run.add_product(residual, zero, torch.zeros(64, 16, dtype=dtype), None, norm)
    assert_close(run.norm_product(following, norm, one), normalised(residual, norm))


def check_rotate(
    run: Operations,
    dtype: torch.dtype,
    groups: tuple[tuple[int, int, int], ...] = ((7, 1, 64), (6, 2, 80), (3, 1, 96), (5, 5, 16), (16, 2, 128)),
) -> None:
    """Queries rotated and laid out by head; keys and values at their places of the cache and nowhere else."""
    for normed, (heads, key_heads, size) in enumerate(groups):
        qkv = noise(3, (heads + 2 * key_heads) * size, dtype=dtype)
        positions, index = torch.tensor([5, 0, 11]), torch.tensor([9, 2, 4])
        angle = torch.outer(torch.arange(14.0), 10_000 ** -(torch.arange(0, size, 2) / size)).repeat(1, 2)
        cos, sin = angle.cos().to(dtype)[:, None], angle.sin().to(dtype)[:, None]
        signed = torch.cat((-sin[..., : size // 2], sin[..., size // 2 :]), -1)
        weights = [noise(size, dtype=dtype, seed=5), noise(size, dtype=dtype, seed=6)] if normed % 2 else []
        keys, values = noise(2, 10, key_heads, size, dtype=dtype, seed=8)
        expected_keys, expected_values = keys.double(), values.double()
        result = run.rotate(qkv, positions, cos, signed, keys, values, index, *weights, eps=EPS)

        query, key, value = qkv.double().unflatten(1, (-1, size)).split([heads, key_heads, key_heads], 1)
        if weights:
            query, key = (normalised(t, Norm(w, EPS, 1.0)) for t, w in zip((query, key), weights, strict=True))
        for tensor, store in ((query, None), (key, expected_keys)):
            half = torch.cat((-tensor[..., size // 2 :], tensor[..., : size // 2]), -1)
            rotated = tensor * cos.double()[positions] + half * sin.double()[positions]
            if store is None:
                assert_close(result, rotated)
            else:
                store[index] = rotated
        expected_values[index] = value
        assert_close(keys, expected_keys)
        assert torch.equal(values.double(), expected_values)


def check_attend(run: Operations, dtype: torch.dtype) -> None:
    """Groups of 1 to 8 query heads, head sizes that are no power of two, empty rows, NaN behind the length."""
    shapes = [(7, 1, 64, 1, [40, 97, 0]), (4, 2, 80, 2, [100]), (3, 3, 96, 1, [1, 64]), (8, 1, 32, 3, [70])]
    for heads, key_heads, size, width, lengths in shapes:
        view = max(lengths) + 3
        query = noise(len(lengths), heads, width, size, dtype=dtype)
        key, value = noise(2, len(lengths), key_heads, view, size, dtype=dtype, seed=1)
        mask = noise(len(lengths), width, view, dtype=dtype, seed=2) > -0.5
        mask[0, 0] = False
        length = torch.tensor(lengths)
        sees = mask & (torch.arange(view) < length[:, None, None])
        wide_key, wide_value = (t.double().repeat_interleave(heads // key_heads, 1) for t in (key, value))
        scores = (query.double() @ wide_key.transpose(2, 3) * size**-0.5).masked_fill(~sees[:, None], float("-inf"))
        expected = (scores.softmax(-1).nan_to_num() @ wide_value).transpose(1, 2)
        for row, end in enumerate(lengths if run is not PLAIN else []):  # only kernels do not read there
            key[row, :, end:] = value[row, :, end:] = float("nan")
        assert_close(run.attend(query, key, value, mask, length, size**-0.5), expected)


def check_row_alone(run: Operations, dtype: torch.dtype, plan: tuple[int, int] = (128, 4), count: int = 40) -> None:
    """A row gets the same bits for any number of other rows, in each padding, and at any index."""
    norm, weight = made_norm(280, dtype), noise(200, 280, dtype=dtype, seed=1)
    down, following_norm = noise(140, 200, dtype=dtype, seed=2), made_norm(140, dtype)
    x, residual = noise(count, 280, dtype=dtype), noise(count, 140, dtype=dtype, seed=3)

    def layer(rows: list[int]) -> list[Tensor]:
        own, added = entering(x, norm), residual[rows].clone()
        product = run.norm_product(NormInput(own.weighted[rows], own.squares[:, rows]), norm, weight)
        following = run.add_product(added, product, down, None, following_norm)
        activated = run.norm_swiglu(following, following_norm, down.T[:160, :140].contiguous())
        return [t[rows.index(39)] for t in (product, added, following.weighted, following.squares.T, activated)]

    with divided(run, *plan):
        together = layer(list(range(count)))
        for rows in ([39], [3, 39], [39, *range(20)]):
            for alone, expected in zip(layer(rows), together, strict=True):
                assert torch.equal(alone, expected)


def check_arrival_order(run: Operations, dtype: torch.dtype) -> None:
    """The order in which programs run does not change a bit, and the counters are zero again (interpreter only)."""
    norm, weight = made_norm(600, dtype), noise(260, 600, dtype=dtype, seed=1)
    product = partial(run.norm_product, entering(noise(3, 600, dtype=dtype), norm), norm, weight)
    for plan in ((128, 4), (256, 3)):
        with divided(run, *plan):
            expected = product()
            for order in (lambda n: n[::-1], lambda n: n[1::2] + n[::2]):
                with programs_in(order):
                    assert torch.equal(product(), expected)
                assert torch.equal(product(), expected)


@contextmanager
def programs_in(order: Callable[[list[int]], list[int]]) -> Any:
    """Make the interpreter run the programs of a product in another order."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    original = builder.set_grid_idx

    def set_grid_idx(x: int, y: int, z: int) -> None:
        original(x, order(list(range(builder.grid_dim[1])))[y], z)

    builder.set_grid_idx = set_grid_idx
    try:
        yield
    finally:
        del builder.set_grid_idx


@contextmanager
def products_in_order() -> Iterator[None]:
    """Make the interpreter add the products of a matrix in the order of its inputs, as a matrix unit does.

    A library's order depends on the shape of the matrix, even for one row of it.
    """
    from triton.runtime import interpreter

    def dot(_: Any, a: Any, b: Any, total: Any, *__: Any) -> Any:
        added = total.data.copy()
        for k in range(a.data.shape[-1]):
            added += (a.data[:, k, None] * b.data[k].astype(added.dtype)).astype(added.dtype)
        return interpreter.TensorHandle(added, total.dtype.scalar)

    with mock.patch.object(interpreter.InterpreterBuilder, "create_dot", dot):
        yield


two_layers = partial(small_config, num_hidden_layers=2)
LAYERS: dict[str, PretrainedConfig] = {
    "qwen2: biases of queries, keys and values": two_layers(
        Qwen2Config, num_attention_heads=7, hidden_size=112, num_key_value_heads=1
    ),
    "qwen3: norms of queries and keys": two_layers(Qwen3Config, head_dim=16),
    "mistral: a sliding window": two_layers(MistralConfig, head_dim=16, sliding_window=4),
    "llama: all biases of attention, own eps": two_layers(
        LlamaConfig, head_dim=16, attention_bias=True, rms_norm_eps=EPS
    ),
}


def check_decoder(
    run: Operations, dtype: torch.dtype, config: PretrainedConfig, decoder_class: type[Decoder] = Decoder
) -> None:
    """Logits and features of transformers' modules in float64: a prefill chunk, ragged steps, a tree."""
    checkpoint = small_checkpoint(config)
    for seed, parameter in enumerate(checkpoint.model.to(DEVICE).parameters()):
        parameter.data += 0.2 * noise(*parameter.shape, dtype=torch.float64, seed=seed)
    expected = ModelRunner(checkpoint)
    other = copy.copy(checkpoint)
    object.__setattr__(other, "model", copy.deepcopy(checkpoint.model).to(dtype))
    decoder = decoder_class(other.model, fused_decoder._attention_arguments(other.model), operations=run)
    assert decoder.operations is run
    runner = ModelRunner(other, decoder)
    ids = torch.randint(30, (3, 12), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    lengths = torch.tensor([5, 3, 4], device=DEVICE)[:, None]
    fed = [torch.arange(5).repeat(3, 1), torch.tensor([0, 1]), torch.tensor([2, 3, 4])]
    sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=DEVICE)  # a root and two children
    depths = torch.tensor([0, 1, 1], device=DEVICE)
    for each in (expected, runner):
        each.reserve(3, 12, taps=(0, 1, 2))
    for new, tree in zip(fed, (None, None, sees), strict=True):
        slots = new.to(DEVICE) if new.ndim == 2 else new.to(DEVICE) + lengths
        base = slots[:, 0]
        positions = slots if tree is None else base[:, None] + depths
        metadata = AttentionMetadata(slots, positions, base, 10, sees=tree)
        with torch.inference_mode():
            found = [
                (each.forward(ids[:, : slots.shape[1]], metadata, 2).logits, each.cache.features((0, 1, 2), slots))
                for each in (expected, runner)
            ]
        for result, reference in zip(found[1], found[0], strict=True):
            finite = reference.isfinite()
            assert torch.equal(result.isfinite(), finite)
            assert_close(result[finite], reference[finite], {torch.float64: 1e-6, torch.float32: 1e-5}[dtype])


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check
    for name, check in globals().items()
    if name.startswith("check_") and name not in ("check_norm_input", "check_arrival_order", "check_decoder")
}

"""The operations over few positions: their plain definitions, the kernels in Triton's interpreter, and the decoder.

The checks are in tests/helpers/kernel_checks.py. The interpreter needs its own process, which test_kernels.py starts.
Its tests of planted faults show that the checks find faults in the kernels.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kernel_checks
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_checks import (
    CHECKS,
    DEVICE,
    LAYERS,
    assert_close,
    check_arrival_order,
    check_decoder,
    check_row_alone,
    divided,
    noise,
    products_in_order,
    two_layers,
)
from planted_kernels import DECODER_FAULTS, FAULTS, Fault, decoder_finds, finds
from small import small_checkpoint
from thinned import one_in
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import PretrainedConfig

from mtbench import kernels
from mtbench.kernels import NormInput
from mtbench.kernels.product_plan import GROUPS
from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import PADDED, Decoder, _attention_arguments
from mtbench.models.kv_cache import KVCache

INTERPRETING = "TRITON_INTERPRET" in os.environ
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter's process")
of_kernels = pytest.mark.skipif(not INTERPRETING and DEVICE == "cpu", reason="runs on a GPU or in the interpreter")
PLAIN_CHECKS = {name: check for name, check in CHECKS.items() if name != "row_alone"}  # libraries' products may differ

QUICK = "qwen3: norms of queries and keys"


ATTENTION = [fault for fault in FAULTS if fault.file == "triton_attention"]  # seconds each
PLANTED = one_in(3, ((fault,) for fault in FAULTS if fault not in ATTENTION))
PLANTED += [pytest.param(fault, marks=pytest.mark.slow) for fault in ATTENTION]


if INTERPRETING or DEVICE == "cuda":
    from mtbench.kernels import triton_attention, triton_device, triton_kernels, triton_products

    KERNELS = kernels.Operations(*(getattr(triton_kernels, name) for name in kernels.Operations._fields))
if INTERPRETING:
    from triton.runtime.interpreter import GridExecutor

    triton_attention.AHEAD = 4  # unrolled loads are slow in the interpreter
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=["float64", "float16"])
@pytest.mark.parametrize("check", PLAIN_CHECKS.values(), ids=[f"plain {name}" for name in PLAIN_CHECKS])
def test_a_definition_equals_its_formula(check: kernel_checks.Check, dtype: torch.dtype) -> None:
    check(kernels.PLAIN, dtype)


@pytest.mark.parametrize("config", LAYERS.values(), ids=[f"plain {name}" for name in LAYERS])
def test_the_decoder_of_plain_operations_gives_the_logits_of_transformers(config: PretrainedConfig) -> None:
    check_decoder(kernels.PLAIN, torch.float64, config)


@pytest.mark.parametrize("fault", DECODER_FAULTS, ids=[f"plain {fault.name}" for fault in DECODER_FAULTS])
def test_a_fault_planted_in_the_decoder_is_found(fault: Fault, tmp_path: Path) -> None:
    """Also in the definitions, against which kernels are checked."""
    assert decoder_finds(fault, tmp_path)


def test_warming_up_runs_each_operation_in_each_padding() -> None:
    """A pass of another number of positions would otherwise compile kernels while it is timed."""
    positions: dict[str, set[int]] = {name: set() for name in kernels.Operations._fields}

    def counted(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            first = arguments[0].weighted if isinstance(arguments[0], NormInput) else arguments[0]
            positions[name].add(first.shape[2] if name == "attend" else len(first))
            return operation(*arguments, **options)

        return run

    plain = kernels.Operations(*(counted(name, run) for name, run in kernels.PLAIN._asdict().items()))
    model = small_checkpoint().model
    Decoder(model, _attention_arguments(model), operations=plain).warm_up()
    assert positions == {name: set(PADDED) for name in kernels.Operations._fields}


@interpreted
def test_a_layer_is_seven_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """At two positions over three blocks of keys; the embedding comes first and the LM head last."""
    launched = []
    run = GridExecutor.__call__

    def counted(self: Any, *arguments: Any, **options: Any) -> None:
        launched.append(self.fn.__name__)
        run(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", counted)
    model = small_checkpoint(two_layers(head_dim=16)).model.float()
    decoder = Decoder(model, _attention_arguments(model), operations=KERNELS)
    slots, cache = torch.tensor([[298, 299]]), KVCache()
    metadata = AttentionMetadata(slots, slots, slots[:, 0], 300)
    cache.shape(1, 300)
    cache.set_batch(metadata)
    decoder.reserve(300)
    with torch.inference_mode():
        decoder(torch.zeros_like(slots), metadata, cache, judged=2)
    layer = ["_product", "_rotate", "_attend", "_combine", "_product", "_product", "_product"]
    assert launched == ["_embed", *layer, *layer, "_product"]


@of_kernels
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, pytest.param(torch.float16 if DEVICE == "cpu" else torch.bfloat16, marks=pytest.mark.slow)],
    ids=["single", "half"],
)
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_a_kernel_equals_its_formula(check: kernel_checks.Check, dtype: torch.dtype) -> None:
    with torch.device(DEVICE):
        check(KERNELS, dtype)


@of_kernels
@pytest.mark.parametrize(
    "name", [QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LAYERS if name != QUICK)]
)
def test_the_decoder_of_kernels_gives_the_logits_of_transformers(name: str) -> None:
    check_decoder(KERNELS, torch.float32, LAYERS[name])


@of_kernels
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float16], ids=["single", "half"]
)
def test_blocks_of_attention_give_the_same_bits_in_any_division(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walked; parts of a block and of a span, one or several a program; tiles of 16 queries and of 32.

    GPUs and windows differ. Lengths end inside a block, on the edge of a block and of a span, and behind one.
    """
    size, span = (256, 64) if dtype == torch.float32 else (128, 256)
    length = torch.tensor([span, span + 1, 2 * span + span // 4 + 3], device=DEVICE)
    rows, view = len(length), 2 * span + span // 2
    query = noise(rows, 8, 3, size, dtype=dtype)
    key, value = noise(2, rows, 1, view, size, dtype=dtype, seed=1)
    mask = noise(rows, 3, view, dtype=dtype, seed=2) > -1
    expected = KERNELS.attend(query, key, value, mask, length, 0.1, split=False)
    parts = set()
    for processors in (1, 6, 132):
        monkeypatch.setattr(triton_attention, "multiprocessors", lambda _, processors=processors: processors)
        parts.add(triton_attention._division(rows, 10, processors)[0])
        assert torch.equal(KERNELS.attend(query, key, value, mask, length, 0.1, split=True), expected)
    assert parts == {1, triton_attention.SPAN}
    alone = KERNELS.attend(query[2:, :, 2:], key[2:], value[2:], mask[2:, 2:], length[2:], 0.1)
    assert torch.equal(alone, expected[2:, 2:])


@interpreted
def test_the_order_of_programs_changes_no_bit() -> None:
    check_arrival_order(KERNELS, torch.float32)


@interpreted
@pytest.mark.parametrize("plan", [(256, 2), (256, 5), (64, 3)], ids=str)
def test_a_row_gets_the_same_bits_in_a_large_batch(plan: tuple[int, int]) -> None:
    """At many positions a program has a whole group, and a second kernel adds its parts."""
    with products_in_order():
        check_row_alone(KERNELS, torch.float16, plan, count=70)


@pytest.mark.slow
@interpreted
def test_a_gpu_of_smaller_tiles_halves_groups_also_in_a_large_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ampere and Ada take both operands from registers: a tile of 256 rows would spill them."""
    monkeypatch.setattr(triton_products, "shared_memory", lambda _: (101_376, False))
    kernel_checks.check_many_positions(KERNELS, torch.float16)


@interpreted
def test_counters_of_captured_graphs_exist_before_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph would only record that they are zero. Streams and threads have their own."""
    cpu, stream = torch.device("cpu"), [triton_device.CAPTURED]
    monkeypatch.setattr(triton_device, "counters", {})
    monkeypatch.setattr(triton_device, "_stream", lambda _: stream[-1])
    with pytest.raises(RuntimeError, match="has to run once"):
        triton_device.arrivals(cpu, 8)
    found = []
    for current in (1, triton_device.CAPTURED, 2, 1):
        stream.append(current)
        found.append(triton_device.arrivals(cpu, 8))
    assert len({counter.data_ptr() for counter in found}) == 3
    assert found[0] is found[3]


@of_kernels
@settings(deadline=None, max_examples=6)
@example(outputs=257, inputs=1, rows=1, group=128, share=4)
@example(outputs=300, inputs=330, rows=3, group=256, share=7)  # two shares, two groups
@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 40), st.sampled_from(GROUPS), st.integers(1, 8))
def test_shares_cover_every_shape(outputs: int, inputs: int, rows: int, group: int, share: int) -> None:
    """Each input of each output is added once, for any shape and any plan."""
    x, weight = noise(rows, inputs, dtype=torch.float32), noise(outputs, inputs, dtype=torch.float32, seed=1)
    with pytest.MonkeyPatch.context() as patch, divided(KERNELS, group, share):
        patch.setattr(triton_products, "CHUNKS", 1)
        assert_close(triton_kernels.linear(x, weight), x.double() @ weight.double().T)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, tmp_path: Path) -> None:
    assert finds(fault, tmp_path)


@interpreted
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_slots_move_in_every_layer_as_by_indexing(data: st.DataObject) -> None:
    """Keys and values of some layers at any sizes; the sources of a row ascend, as the path of a tree does."""
    rows, slots, layers = data.draw(st.integers(1, 3)), data.draw(st.integers(6, 12)), data.draw(st.integers(1, 3))
    heads, size, depth = (
        data.draw(st.integers(1, 3)),
        data.draw(st.sampled_from([16, 24])),
        data.draw(st.integers(1, 4)),
    )
    stores = [noise(rows * slots + 2, heads, size, dtype=torch.float32, seed=i) for i in range(2 * layers)]
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


def test_no_kernel_is_launched_while_operations_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch is no operation of PyTorch: what runs later would lack it."""
    monkeypatch.setattr(kernels, "_triton_kernels", lambda: kernels)
    found = []

    def hook(x: torch.Tensor) -> torch.Tensor:
        found.append(kernels._triton())
        return x + 1

    make_fx(hook, tracing_mode="real")(torch.zeros(1))
    assert found == [None]
    assert kernels._triton() is kernels

"""Each operation against its definition in float64, by the cases of `mtbench doctor`: the kernels, and planted faults.

test_kernels.py starts the process of Triton's interpreter in which the kernels run.
"""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from interpreted import DEVICE, HALF, Fault, definition, definitions, kernel_fault, of_floats, of_kernels, running
from thinned import one_in

from mtbench.doctor.cases import PRECISION, SMALL, Noise, Sizes, cases
from mtbench.kernels import OPERATIONS

NAMES = ["embed", "norm", "add_norm", "swiglu", "rotate", "rotate, norms", "attend ×1", "attend ×7", "linear"]
NAMES += ["greedy", "sampled"]
SIZES = Sizes(200, 70, 2, 1, 64, 100, 1100)  # sizes that no block divides
FEW = Sizes(80, 70, 2, 1, 16, 150, 60)  # several blocks of keys
HEADS = (80, 128, 256, 96)  # 64 is in SIZES


def wrong(dtype: torch.dtype, count: int = 5, sizes: Sizes = SIZES) -> list[str]:
    """The names of the cases that are not within the type's precision of float64."""
    made = cases(Noise(dtype, torch.device(DEVICE)), count, sizes)
    assert [case.name for case in made if not case.name.startswith("move")] == [f"{name} {count}" for name in NAMES]
    return [case.name for case in made if not case.error() <= PRECISION[dtype]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_plain_operations_pass(dtype: torch.dtype) -> None:
    assert wrong(dtype, 13, SMALL) == []


@pytest.mark.parametrize("name", ["add_norm", "rotate"])
@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_plain_operation_that_is_wrong_is_named(name: str, factor: float) -> None:

    def off(*inputs: Any) -> Any:
        result = definition(name)(*inputs)
        return factor * result if isinstance(result, torch.Tensor) else tuple(factor * each for each in result)

    with definitions(**{name: off}):
        assert {case.split()[0].strip(",") for case in wrong(torch.bfloat16)} == {name}


@of_kernels
@pytest.mark.parametrize(
    ("dtype", "count"), one_in(5, product([torch.float32, HALF], [5, 16, 1, 112])), ids=lambda value: str(value)
)
def test_each_kernel_equals_its_definition(dtype: torch.dtype, count: int) -> None:
    """At 1 to 112 positions: one row, a batch, and a batch that drafts."""
    with running(of_floats):
        assert wrong(dtype, count, FEW._replace(slots=70) if count > 5 else SIZES) == []


@of_kernels
@pytest.mark.parametrize("head", one_in(2, HEADS))
def test_each_kernel_equals_its_definition_for_heads_of_any_size(head: int) -> None:
    with running(of_floats):
        assert wrong(HALF, 2, SIZES._replace(head=head, slots=70, vocabulary=40)) == []


@of_kernels
@pytest.mark.parametrize("hidden", one_in(2, [1, 2, 17, 64, 1025, 1023]))
def test_row_kernels_equal_their_definitions_at_odd_sizes(hidden: int) -> None:
    with running(of_floats):
        assert wrong(torch.float32, 2, Sizes(hidden, hidden, 1, 1, 16, 20, 50)) == []


FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "a row kernel skips the last partial block": (
        kernel_fault("swiglu", "column < SIZE\n    gate", "column < SIZE // 64 * 64\n    gate"),
        {"swiglu"},
    ),
    "a norm in the wrong type": (
        kernel_fault(
            "norm", "    wide = value.to(tl.float32)\n    narrow", "    wide = value.to(x.dtype.element_ty)\n    narrow"
        ),
        {"embed", "norm", "add_norm"},
    ),
    "another mean": (kernel_fault("mean", "/ SIZE + eps)).to", "/ PADDED + eps)).to"), {"embed", "norm", "add_norm"}),
    "the sum is stored before the addition": (
        kernel_fault("store", "        value = wide.to(x", "        wide.to(x"),
        {"add_norm"},
    ),
    "the embedding of another id": (kernel_fault("id", "tl.load(ids + row)", "tl.load(ids)"), {"embed"}),
    "gate and up exchanged": (kernel_fault("up", "both + 2 * row", "both + (2 * row + 1)"), {"swiglu"}),
    "the rotary embedding turns the other way": (
        kernel_fault("rotate", "a * cos_a + b * sin_a", "a * cos_a - b * sin_a"),
        {"rotate"},
    ),
    "keys and values a slot early": (
        kernel_fault("slot", "tl.load(index + place) *", "(tl.load(index + place) + 1) *"),
        {"rotate"},
    ),
    "the queries' norm for keys": (kernel_fault("key", "tl.where(is_query, query_a, key_a)", "query_a"), {"rotate"}),
    "the last inputs of a product are missing": (
        kernel_fault("linear", "range(0, INPUTS, STEP)", "range(0, INPUTS - STEP, STEP)"),
        {"linear"},
    ),
    "no bias": (kernel_fault("bias", "        total += tl.load(bias", "        tl.load(bias"), {"linear"}),
    "slots behind the length": (
        kernel_fault("length", "seen & inside[:, None], inner", "inside[:, None], inner", "triton_attention"),
        {"attend"},
    ),
    "the last block of keys is missing": (
        kernel_fault("block", "tl.minimum(first + each, blocks)", "first + each - 1", "triton_attention"),
        {"attend"},
    ),
}


@of_kernels
@pytest.mark.parametrize(("fault", "names"), one_in(3, FAULTS.values()), ids=FAULTS)
def test_a_fault_planted_in_a_kernel_is_named(fault: Fault, names: set[str], tmp_path: Path) -> None:
    from mtbench.kernels import triton_kernels

    own = {**vars(triton_kernels)}
    planted = fault.planted(tmp_path)
    own |= {name: value for name, value in vars(planted).items() if not name.startswith("_")}
    with running(of_floats, SimpleNamespace(**own)):
        made = [case for case in cases(Noise(HALF, torch.device(DEVICE)), 5, FEW) if case.name.startswith((*names,))]
        assert {case.name.split()[0].strip(",") for case in made if not case.error() <= PRECISION[HALF]} == names


def test_each_operation_has_a_kernel_and_a_case() -> None:
    """One that is forgotten would fail on a GPU only, or be wrong there unseen."""
    launchers = pytest.importorskip("mtbench.kernels.triton_kernels")
    checked = {name.split()[0].strip(",") for name in NAMES} | {"choose_logsumexp"}
    assert [name for name in OPERATIONS if not hasattr(launchers, name) or name not in checked] == []

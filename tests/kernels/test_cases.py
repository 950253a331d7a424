"""The cases of `mtbench doctor`: right operations pass, and the case of a wrong one names it.

test_kernels.py starts the process of Triton's interpreter in which the kernels run.
"""

import os
from pathlib import Path

import pytest
import torch
from kernel_checks import DEVICE
from planted_kernels import FAULTS, planted_operations

from mtbench import kernels
from mtbench.kernels.cases import PRECISION, SMALL, Noise, Sizes, cases

INTERPRETING = "TRITON_INTERPRET" in os.environ
of_kernels = pytest.mark.skipif(not INTERPRETING and DEVICE == "cpu", reason="runs on a GPU or in the interpreter")
HALF = torch.float16 if DEVICE == "cpu" else torch.bfloat16  # the interpreter's bfloat16 is wrong
TINY = Sizes(256, 70, 4, 2, 16, 80, 100)
NAMES = ["embed", "norm_product", "norm_swiglu", "add_product", "rotate", "rotate, norms", "attend ×1", "attend ×7"]
NAMES += ["linear", "norm", "greedy", "sampled"] + (["move"] if DEVICE == "cuda" else [])


def wrong(run: kernels.Operations, dtype: torch.dtype, sizes: Sizes = SMALL) -> list[str]:
    """The names of the cases that are not within the type's precision of float64."""
    found = {case.name: case.error() for case in cases(run, Noise(dtype, torch.device(DEVICE)), 13, sizes)}
    assert list(found) == [f"{name} 13" for name in NAMES]
    return [name for name, error in found.items() if not error <= PRECISION[dtype]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_plain_operations_pass(dtype: torch.dtype) -> None:
    assert wrong(kernels.PLAIN, dtype) == []


@pytest.mark.parametrize("name", ["norm_product", "norm_swiglu", "attend"])
@pytest.mark.parametrize("factor", [1.05, float("nan")])
def test_a_plain_operation_that_is_wrong_is_named(name: str, factor: float) -> None:
    operation = getattr(kernels.PLAIN, name)
    run = kernels.PLAIN._replace(**{name: lambda *inputs: factor * operation(*inputs)})
    assert {case.split()[0] for case in wrong(run, torch.bfloat16)} == {name}


@of_kernels
def test_the_kernels_pass_each_case() -> None:
    from mtbench.kernels import triton_kernels

    run = kernels.Operations(*(getattr(triton_kernels, name) for name in kernels.Operations._fields))
    assert wrong(run, HALF, TINY) == []


@of_kernels
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.name in ("no residual", "the other direction")])
def test_a_fault_planted_in_a_kernel_is_named(fault: object, tmp_path: Path) -> None:
    names = {name.split()[0].strip(",") for name in wrong(planted_operations(fault, tmp_path), HALF, TINY)}  # type: ignore[arg-type]
    assert names == ({"add_product"} if fault.name == "no residual" else {"rotate"})  # type: ignore[attr-defined]

"""What programs of the kernels use on GPUs of six architectures (benchmarks/resources.py), and how many there are."""

import importlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

triton_attention = pytest.importorskip("mtbench.kernels.triton_attention", reason="triton is not installed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ONE_STAGE_MORE = """
from mtbench.kernels import triton_attention
stages = triton_attention._stages
triton_attention._stages = lambda *inputs: stages(*inputs) + 1
"""
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif("TRITON_INTERPRET" in os.environ, reason="the interpreter compiles nothing"),
]


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("resources")


def spilling(found: Sequence[Any], *names: str) -> list[Any]:
    """Kernels that spill more than one value: the compiler spills one where that lets more programs run at once."""
    return [kernel for kernel in found if kernel.spilled_bytes > 8 and kernel.name in names]


def test_the_largest_kernels_fit_each_gpu(script: Any) -> None:
    found = script.resources(list(script.ARCHITECTURES), quick=True)
    assert {kernel.architecture for kernel in found} == set(script.ARCHITECTURES)
    assert {"_attend", "_combine", "_product"} <= {kernel.name for kernel in found}
    assert [kernel for kernel in found if kernel.exceeds] == []
    assert spilling(found, "_attend", "_combine") == []


def test_a_stage_too_many_for_shared_memory_is_found(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Planted at head size 256, where a program has 99 KB: the script names the kernel and exits with 1."""
    monkeypatch.setattr(script, "resources", partial(script.resources, change=ONE_STAGE_MORE))
    assert script.main(["--architectures", "89", "--quick"]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line.startswith("_attend of attention bfloat16 256 exceeds sm_89")]
    assert [kernel["name"] for kernel in json.loads(printed[-1])["exceeding"]] == ["_attend"]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 86, 89, 90, 100, 120])
def test_every_kernel_fits_each_gpu(architecture: int, script: Any) -> None:
    """At every head size, type, tile, part and padding; attention spills nowhere, and all its blocks are in flight."""
    found = script.resources([architecture])
    assert [kernel for kernel in found if kernel.exceeds] == []
    assert spilling(found, "_attend", "_combine", "_rotate", "_embed", "_norm", "_choose_slice", "_choose_row") == []
    attends = [kernel for kernel in found if kernel.name == "_attend"]
    assert all(k.stages == 3 for k in attends if "float32" not in k.case and " 256" not in k.case)


def test_an_unknown_architecture_is_named(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.main(["--architectures", "90,70"])
    assert "--architectures '70'; choose from 80, 86, 89, 90, 100, 120" in capsys.readouterr().err


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 170))
def test_a_division_of_attention_occupies_the_gpu(programs: int, blocks: int, processors: int) -> None:
    """With as many programs as multiprocessors, if there are blocks for them; each has whole parts."""
    part, each = triton_attention._division(programs, blocks, processors)
    assert each % part == 0
    assert programs * -(-blocks // each) >= min(programs * blocks, processors)


def test_a_batch_stores_parts_of_spans_and_one_row_keeps_its_programs() -> None:
    """Qwen2.5-7B on an H200: 16 rows of 8 positions, one row of 1 and of 8, at 768 and 4,096 slots in view."""
    span = triton_attention.SPAN
    divided = [triton_attention._division(*shape, 132)[0] for shape in ((128, 12), (128, 64))]
    assert divided == [span, span]
    alone = [triton_attention._division(*shape, 132) for shape in ((4, 12), (4, 64), (8, 12), (8, 64))]
    assert alone == [(1, 1), (1, 1), (1, 1), (1, 2)]

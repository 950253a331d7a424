"""What `--dtype auto` means: bfloat16 where it is faster."""

from typing import Any

import pytest
import torch
from whole import plan_of

from mtbench.lineup.planner import with_dtype
from mtbench.models import auto


@pytest.mark.parametrize(
    ("asked", "capabilities", "small", "meant"),
    [
        ("auto", {"avx512_bf16": True}, 1000, "bfloat16"),
        ("auto", {"amx_bf16": True}, 1000, "bfloat16"),
        ("auto", {"avx512_bf16": False}, 1000, "float32"),  # slower than float32 without the instructions
        ("auto", {"avx512_bf16": True}, 50_000_000, "float32"),  # a small model gains nothing
        ("float64", {"avx512_bf16": True}, 1000, "float64"),
    ],
)
def test_auto_is_bfloat16_for_large_models_on_cpus_that_compute_it(
    asked: str, capabilities: dict[str, Any], small: int, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    monkeypatch.setattr(auto, "SMALL_MODEL", small)
    plan = plan_of(2)
    plan = plan.changed(request=plan.request.changed(device="cpu", dtype=asked))
    assert with_dtype(plan).request.dtype == meant
    assert with_dtype(plan, "bfloat16").request.dtype == (asked if asked != "auto" else "bfloat16")  # a resumed run

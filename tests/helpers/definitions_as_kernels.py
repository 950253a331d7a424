"""The definitions of operations as a stand-in for mtbench's kernels, so that a CPU runs the code that needs a GPU."""

from collections.abc import Callable
from inspect import unwrap
from typing import Any

import pytest

from mtbench import kernels
from mtbench.kernels.cases import PRECISION


def definition(name: str) -> Callable[..., Any]:
    """Return what defines an operation."""
    found: Callable[..., Any] = unwrap(getattr(kernels, name))
    return found


def use_definitions(monkeypatch: pytest.MonkeyPatch, **replaced: Callable[..., Any]) -> None:
    """Let definitions stand for mtbench's kernels, some of them replaced."""

    class Kernels:
        def attends(self, *_: Any) -> bool:
            return False

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return replaced.get(name) or definition(name)

    monkeypatch.setattr(kernels, "_triton", Kernels)
    monkeypatch.setattr(kernels, "ours", lambda x: x.dtype in PRECISION and not kernels.off())
    monkeypatch.setattr(kernels, "slot_mover", lambda _: None)

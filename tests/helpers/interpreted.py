"""What tests of Triton kernels share: where they run, the dispatch to them, and faults planted in their source.

Without a GPU the kernels run in Triton's interpreter, in a separate process, which tests/kernels/test_kernels.py
starts: TRITON_INTERPRET must be set before the first import of triton, and transformers imports it. The interpreter
computes bfloat16 products incorrectly, so float16 replaces it.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor

from mtbench import kernels
from mtbench.decoding import step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETING = "TRITON_INTERPRET" in os.environ
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in the interpreter's process")
of_kernels = pytest.mark.skipif(not INTERPRETING and DEVICE == "cpu", reason="runs on a GPU or in the interpreter")
Ours = Callable[[Tensor], bool]


def of_floats(x: Tensor) -> bool:
    """Whether kernels of the forward pass run, as on a GPU."""
    return x.is_floating_point() and x.dtype != torch.float64 and kernels.off() is None


def of_integers(x: Tensor) -> bool:
    """Whether kernels of a step run, as on a GPU."""
    return x.dtype == torch.long and kernels.off() is None


@contextmanager
def running(ours: Ours, triton: Any = None) -> Iterator[None]:
    """Let kernels run for tensors on a CPU, too. `triton`: in place of the module of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "ours", ours)
        patch.setattr(kernels, "_off", [])
        if triton is not None:
            patch.setattr(kernels, "_triton_kernels", lambda: triton)
        yield


def definition(name: str) -> Callable[..., Any]:
    """Return what defines an operation."""
    return kernels.OPERATIONS[name]


def use_definitions(patch: pytest.MonkeyPatch, **replaced: Callable[..., Any]) -> None:
    """Let the definitions stand for the kernels of a forward pass, but for those that are replaced."""

    class Kernels:
        def attends(self, *_: Tensor) -> bool:
            return False

        def __getattr__(self, name: str) -> Callable[..., Any]:
            return replaced.get(name) or definition(name)

    patch.setattr(kernels, "ours", of_floats)
    patch.setattr(kernels, "_triton_kernels", Kernels)
    patch.setattr(kernels, "slot_mover", lambda _: None)


@contextmanager
def definitions(**replaced: Callable[..., Any]) -> Iterator[None]:
    """The same meanwhile; nothing is switched off before, nor afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_off", [])
        use_definitions(patch, **replaced)
        yield


class Fault(NamedTuple):
    """A text of a module, which occurs once, replaced by another one."""

    name: str
    module: str
    text: str
    fault: str

    def planted(self, folder: Path) -> ModuleType:
        """Return the module with the fault, in a file: Triton reads the source of kernels there."""
        spec = importlib.util.find_spec(self.module)
        assert spec is not None
        assert spec.origin is not None
        source = Path(spec.origin).read_text()
        assert source.count(self.text) == 1, f"the text of {self.name!r} occurs {source.count(self.text)} times"
        path = folder / Path(spec.origin).name
        path.write_text(source.replace(self.text, self.fault))
        spec = importlib.util.spec_from_file_location(f"planted_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module


def kernel_fault(name: str, text: str, fault: str, module: str = "triton_kernels") -> Fault:
    return Fault(name, f"mtbench.kernels.{module}", text, fault)


@contextmanager
def planted_step(fault: Fault, folder: Path) -> Iterator[None]:
    """Let the kernels of a step run with the fault."""
    module = fault.planted(folder)
    with running(of_integers), mock.patch.object(step, "_triton", return_value=module):
        yield


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

"""The operations of a step outside its forward as a few kernels: recorded in one call, compiled for the later ones.

They are dozens of small operations on (rows, window) tensors, each a kernel of a few microseconds on a GPU. A function
is traced with its real tensors (`make_fx`), as a CUDA graph captures it. What Python decides is frozen. A tensor that
it takes from elsewhere keeps its address, and a write in place stays one. Inductor then fuses what was recorded. So the
hooks of a method may be any Python that a CUDA graph can capture.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mtbench.errors import first_line

Tensors = tuple[Tensor, ...]


def compile_graph(graph: torch.fx.GraphModule) -> Callable[..., Any]:
    """Return a recorded graph as compiled code."""
    return torch.compile(graph, fullgraph=True, dynamic=False)


class Fused:
    """A function of tensors that is recorded in its first call, which also runs it, and compiled in its second.

    If it does not compile, it runs as it is; a warning and `failure` say why.
    """

    failure: str | None = None

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self.function = function
        self._run: Callable[..., Tensors] | None = None
        self._ran = False  # compiled

    def __call__(self, *tensors: Tensor | None) -> Tensors:
        if self._run is None:
            return self._record(*tensors)
        try:
            result, self._ran = self._run(*tensors), True
        except Exception as error:
            if self._ran:
                raise
            self.failure = first_line(error)  # nothing of it has run yet
            warnings.warn(f"not compiled: {self.failure}", stacklevel=2)
            self._run, self._ran = self.function, True
            result = self._run(*tensors)
        return result

    def _record(self, *tensors: Tensor | None) -> Tensors:
        results: list[Tensors] = []

        def run(*tensors: Tensor | None) -> Tensors:
            results.append(self.function(*tensors))
            return results[0]

        graph = make_fx(run, tracing_mode="real")(*tensors)
        self._run = compile_graph(graph)
        return results[0]

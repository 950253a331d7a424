"""A stand-in for CUDA graphs on a CPU: what a step does is recorded and replayed on the same tensors.

What a captured step allocates is in the graph's pool. If graphs share a pool, each overwrites what the others left
there. So here every replay ends by destroying what the graphs of a shared pool allocated: no state survives in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mtbench.decoding.cuda_graph import Captured


class Recording(TorchDispatchMode):
    """Stands in for a CUDA graph: the operations of one step, run again on the very tensors they were recorded with.

    Whatever a step takes from the host is frozen in it, as in a graph; whatever does not keep its place is lost.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.allocated: dict[int, Tensor] = {}  # by the address of the storage
        self.pool: Pool | None = None  # one that it may share
        self.ran = False  # recording ran the step; a CUDA graph's first run is its first replay

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, out))
        given = {place(tensor) for tensor in tensors(args, kwargs)}
        self.allocated |= {place(tensor): tensor for tensor in tensors(out) if place(tensor) not in given}
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations if self.ran else ():
            for old, new in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr() and "empty" not in func.__name__:
                    old.copy_(new.reshape(old.shape))  # its shape may have changed in place
        self.ran = True
        for graph in self.pool.graphs if self.pool else ():
            for tensor in graph.allocated.values():
                destroy(tensor)


def tensors(*tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def destroy(tensor: Tensor) -> None:
    """Fill a tensor with NaN, a number that is no index, or the other truth value."""
    if tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max // 3)


def prefills(batch: Captured) -> int:
    """Return how many chunks of prompts are captured."""
    return sum(len(runner.cache.graphs) for runner in batch.runners.values())


class Pool:
    """Stands in for a pool of CUDA's allocator, which gives it up with its last graph."""

    def __init__(self) -> None:
        self.graphs: WeakSet[Recording] = WeakSet()
        self.used = False


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """CUDA's graphs replaced by recordings; what is captured is listed, the graph that keeps the pool first."""
    made: list[str] = []

    @contextmanager
    def record(graph: Recording, pool: Pool | None = None) -> Iterator[None]:
        graph.pool, pool = pool, pool or Pool()
        assert pool.graphs or not pool.used, "this pool has been given up"
        pool.used = True
        pool.graphs.add(graph)
        with graph:
            yield
        made.append(f"{len(graph.operations)} operations")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recording)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", Pool)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("mtbench.decoding.cuda_graph.DEVICE", "cpu")
    monkeypatch.setattr(Captured, "_anchor", None)
    return made

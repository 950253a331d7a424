"""Engines: how a forward of ours is executed.

- `eager`: transformers' modules, operation by operation: the regime in which papers measure.
- `graph`: the checkpoint's weights as few large operations (mtbench/decoder.py); on a GPU the whole step, from guess to
  cursor, is captured once per shape as a CUDA graph and replayed.
- `invariant`: as `graph`, with products whose results depend on nothing but their own row, so that tokens do not change
  with the batch or the window's width even in bfloat16.

Layers of a shape that the decoder does not serve are run as transformers writes them, captured all the same; a run's
environment says which.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from mtbench.decoder import Decoder, build
from mtbench.decoding import Batch
from mtbench.lane import Lane
from mtbench.method import Lanes, Method
from mtbench.models import Checkpoint

PLAIN_STEPS = 3  # of a shape before it is captured: libraries allocate and compile in their first calls
ROOM = 256  # positions: a captured batch's rows are made this coarse, so that prompts of other lengths share it


class Engine:
    """`eager`. Gives lanes and batches; those of one engine go together."""

    name = "eager"

    def lane(self, checkpoint: Checkpoint) -> Lane:
        """A lane of its own on a checkpoint."""
        return Lane(checkpoint)

    def batch(self, method: Method, lanes: Lanes, rows: int, positions: int) -> Batch:
        """Rows to decode in."""
        return Batch(method, lanes, rows, positions)


class Graph(Engine):
    """`graph` and `invariant`."""

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self._decoders: dict[Checkpoint, Decoder | None] = {}
        self._batches: dict[Any, Captured] = {}

    def lane(self, checkpoint: Checkpoint) -> Lane:
        if checkpoint not in self._decoders:
            decoder = build(checkpoint.model, invariant=self.name == "invariant")
            self._decoders[checkpoint] = decoder
            if decoder is not None:
                checkpoint.calls.watch(decoder)
        return Lane(checkpoint, self._decoders[checkpoint])

    def batch(self, method: Method, lanes: Lanes, rows: int, positions: int) -> Batch:
        """On a GPU one that was made before and has room, with its graphs."""
        if lanes.target.device.type != "cuda":
            return Batch(method, lanes, rows, positions)
        positions = -(-positions // ROOM) * ROOM
        key = (method, rows, positions, *((role, id(lane)) for role, lane in lanes.items()))
        if key not in self._batches:
            self._batches[key] = Captured(method, lanes, rows, positions)
        return self._batches[key]


class Captured(Batch):
    """A batch whose steps are captured as CUDA graphs, by shape, and replayed.

    The first steps of a shape run plainly, as real steps; then one is recorded, and from there on it is replayed.
    """

    pool: Any = None  # memory that all graphs share: they never run at the same time

    def __init__(self, method: Method, lanes: Lanes, rows: int, positions: int) -> None:
        super().__init__(method, lanes, rows, positions, tight=False)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._plain: dict[tuple[int, int], int] = {}
        self._forwards_each: dict[tuple[int, int], list[int]] = {}
        self._epochs: list[tuple[int, ...]] = []

    def advance(self, pending: int, view: int) -> None:
        shape = (pending, view)
        if self.tight:  # shapes change from step to step
            self.step(pending, view)
            return
        if shape not in self._graphs:
            began = time.perf_counter()
            self._prepare(shape)
            self.preparation_s += time.perf_counter() - began
            return
        self._graphs[shape].replay()
        for lane, forwards in zip(self.lanes.values(), self._forwards_each[shape], strict=True):
            lane.forwards += forwards

    def _reset(self, requests: Any) -> None:
        super()._reset(requests)
        epochs = [lane.epoch for lane in self.lanes.values()]
        if epochs != self._epochs:  # memory has moved: what was captured would write where nobody reads
            self._graphs.clear()
            self._plain.clear()
            self._epochs = epochs

    def _prepare(self, shape: tuple[int, int]) -> None:
        """One plain step; or, after a few, capture a step and replay it."""
        made = self._plain.setdefault(shape, 0)
        if made < PLAIN_STEPS:
            self._plain[shape] += 1
            self.step(*shape)
            torch.cuda.synchronize()
            return
        if Captured.pool is None:
            Captured.pool = torch.cuda.graph_pool_handle()
        before = [lane.forwards for lane in self.lanes.values()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=Captured.pool):
            self.step(*shape)
        self._forwards_each[shape] = [
            lane.forwards - count for lane, count in zip(self.lanes.values(), before, strict=True)
        ]  # counted now for the replay that follows
        self._graphs[shape] = graph
        graph.replay()
        torch.cuda.synchronize()


ENGINES: dict[str, Callable[[], Engine]] = {
    "graph": Graph,
    "eager": Engine,
    "invariant": lambda: Graph("invariant"),
}

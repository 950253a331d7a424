"""Engines: how a forward pass is executed.

- `eager`: transformers' modules, operation by operation, as papers measure.
- `graph`: the checkpoint's weights as few large operations (mtbench/models/fused_decoder.py); on a GPU the whole step,
  from proposal to cursors, is captured once per shape as a CUDA graph and replayed.
- `invariant`: as `graph`, with batch-invariant kernels: a row's result depends on that row alone, so tokens do not
  change with batch size or window width, even in bfloat16. The kernels need a GPU; in half precision a CPU is refused.

Layers of an architecture that the decoder does not support run as transformers' modules, and are captured too; a run's
environment.json says which.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mtbench.decoding.host_sync import Shape
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.request import Workload
from mtbench.decoding.run_state import RunState
from mtbench.errors import UserError
from mtbench.models.fused_decoder import Decoder, UnsupportedArchitecture, build, compilations
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import ModelRunner

DEVICE = "cuda"  # of captured steps
PLAIN_STEPS = 3  # of a shape before its capture: libraries allocate and compile in their first calls
ROOM = 256  # a captured batch's positions per row are a multiple of it, so that other prompt lengths share it


class Engine:
    """`eager`. Creates runners and batches; a batch takes runners of its own engine."""

    name = "eager"

    def runner(self, checkpoint: Checkpoint) -> ModelRunner:
        """Return a new runner on a checkpoint."""
        return ModelRunner(checkpoint)

    def batch(self, method: Method, runners: ModelRunners, rows: int, positions: int) -> Batch:
        """Return a batch to decode in."""
        return Batch(method, runners, rows, positions)

    def layers(self, checkpoint: Checkpoint) -> str:
        """Say in words what runs a checkpoint's layers."""
        return "transformers' modules"


class Graph(Engine):
    """`graph` and `invariant`."""

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self._decoders: dict[Checkpoint, Decoder] = {}
        self._unsupported: dict[Checkpoint, str] = {}  # why it has no decoder
        self._batches: dict[Any, Captured] = {}

    def runner(self, checkpoint: Checkpoint) -> ModelRunner:
        """Return a new runner. Raises UserError if the engine is `invariant` and cannot be so on this checkpoint."""
        if checkpoint not in self._decoders and checkpoint not in self._unsupported:
            try:
                decoder = build(checkpoint.model, invariant=self.name == "invariant")
                checkpoint.calls.watch(decoder)
                self._decoders[checkpoint] = decoder
            except UnsupportedArchitecture as reason:
                self._unsupported[checkpoint] = str(reason)
        model = checkpoint.model
        if self.name == "invariant" and model.device.type == "cpu" and model.dtype.itemsize < 4:
            half = str(model.dtype).removeprefix("torch.")
            raise UserError(
                f"engine 'invariant' needs a GPU's kernels in {half}, and this is a CPU; use `--dtype float32`, where "
                "its tokens are those of `engine=graph`."
            )
        if self.name == "invariant" and checkpoint in self._unsupported:
            raise UserError(
                f"engine 'invariant' needs layers of the Llama architecture, and {checkpoint.source!r} has others "
                f"({self._unsupported[checkpoint]}); use `engine=graph` or `engine=eager`."
            )
        return ModelRunner(checkpoint, self._decoders.get(checkpoint))

    def layers(self, checkpoint: Checkpoint) -> str:
        reason = self._unsupported.get(checkpoint)
        return "mtbench's decoder" if reason is None else f"transformers' modules ({reason})"

    def batch(self, method: Method, runners: ModelRunners, rows: int, positions: int) -> Batch:
        """Return a batch; on a GPU an earlier one of the same size, with its graphs."""
        if runners.target.device.type != "cuda":
            return Batch(method, runners, rows, positions)
        positions = -(-positions // ROOM) * ROOM
        key = (method, rows, positions, *((role, id(runner)) for role, runner in runners.items()))
        if key not in self._batches:
            self._batches[key] = Captured(method, runners, rows, positions)
        return self._batches[key]


class Captured(Batch):
    """A batch whose steps are captured as CUDA graphs, by shape, and replayed.

    The first steps of a shape run without a graph; the next one is captured, and all later ones are replays.
    """

    one_launch = True
    _anchor: tuple[Any, torch.cuda.CUDAGraph, Tensor] | None = None

    def __init__(self, method: Method, runners: ModelRunners, rows: int, positions: int) -> None:
        super().__init__(method, runners, rows, positions, tight=False)
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._plain: dict[Shape, int] = {}
        self._forwards_each: dict[Shape, list[int]] = {}
        self._setting: tuple[list[tuple[int, ...]], float] | None = None

    def shape(self, run: RunState) -> Shape:
        """Return a shape that is not captured yet, if there is one: no width is then captured in a timed block."""
        shape = super().shape(run)
        if self.tight:
            return shape
        every = (shape._replace(variant=variant) for variant in range(len(self.variants)))
        return next((s for s in every if s not in self._graphs), shape)

    def advance(self, run: RunState, shape: Shape) -> None:
        if self.tight:  # shapes change from step to step
            super().advance(run, shape)
            return
        if shape not in self._graphs:
            started_at = time.perf_counter()
            self._prepare(shape)
            run.preparation_s += time.perf_counter() - started_at
            return
        self._graphs[shape].replay()
        for runner, forwards in zip(self.runners.values(), self._forwards_each[shape], strict=True):
            runner.forwards += forwards

    def run(self, workload: Workload) -> tuple[list[Generation], Timing]:
        before = compilations()
        generations, timing = super().run(workload)
        if compilations() > before:  # its time is not reported: at most all of the run
            timing = dataclasses.replace(timing, preparation_s=timing.wall_s)
        return generations, timing

    @classmethod
    def _pool(cls) -> Any:
        """Return the memory pool that all graphs share, since they never run at the same time.

        The allocator frees a pool with its last graph; a graph of one addition keeps it alive.
        """
        if cls._anchor is None:
            pool, graph, place = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph(), torch.zeros(1, device=DEVICE)
            with torch.cuda.graph(graph, pool=pool):
                place.add_(1)
            cls._anchor = (pool, graph, place)
        return cls._anchor[0]

    def _reset(self, workload: Workload) -> None:
        super()._reset(workload)
        epochs = [runner.epoch for runner in self.runners.values()]
        setting = (epochs, workload.temperature)
        if setting != self._setting:  # memory has moved: captured graphs would write to freed memory
            self._graphs.clear()
            self._plain.clear()
            self._setting = setting

    def _prepare(self, shape: Shape) -> None:
        """Run one plain step; after PLAIN_STEPS of them capture a step and replay it."""
        if self._plain.setdefault(shape, 0) < PLAIN_STEPS:
            self._plain[shape] += 1
            self.step(shape, check_values=True)
            torch.cuda.synchronize()
            return
        before = [runner.forwards for runner in self.runners.values()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool()):
            self.step(shape)
        self._forwards_each[shape] = [
            runner.forwards - count for runner, count in zip(self.runners.values(), before, strict=True)
        ]  # counted now for the replay that follows
        self._graphs[shape] = graph
        graph.replay()
        torch.cuda.synchronize()


ENGINES: dict[str, Callable[[], Engine]] = {
    "graph": Graph,
    "eager": Engine,
    "invariant": lambda: Graph("invariant"),
}

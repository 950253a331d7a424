"""A batch whose steps run as CUDA graphs: each shape is captured once and replayed.

CUDA graphs: CUDA C++ Programming Guide, section "CUDA Graphs"; `torch.cuda.CUDAGraph`.

A step is captured whole. The hooks of the method run as they are: what Python decides in them is decided once, at the
capture. A hook may not read a value of the device, nor copy one from the host.
"""

import time
from typing import Any

import torch
from torch import Tensor

from mtbench.decoding.host_sync import Shape
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.prefill import WIDTHS_OF_A_RUN, WIDTHS_OF_A_SERVER, warm_up
from mtbench.decoding.run_state import RunState

DEVICE = "cuda"  # device of captured steps


class Captured(Batch):
    """A batch with graphs. The first step of a shape runs without one; the next is captured, all later are replays."""

    one_launch = True
    _anchor: tuple[Any, torch.cuda.CUDAGraph, Tensor] | None = None

    def __init__(self, method: Method, runners: ModelRunners, rows: int, positions: int) -> None:
        super().__init__(method, runners, rows, positions, tight=False)
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._ran: set[Shape] = set()  # shapes that ran once: libraries and Triton allocate and compile in that step
        self._forwards_each: dict[Shape, list[int]] = {}
        self._setting: tuple[list[tuple[int, ...]], bool] | None = None

    def shape(self, run: RunState) -> Shape:
        """Return a shape that is not captured yet, if there is one, so that no timed block has to capture a width."""
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

    def reset(self, run: RunState) -> None:
        super().reset(run)
        captured = ([runner.epoch for runner in self.runners.values()], run.sets_options)
        if captured != self._setting:  # if memory has moved, captured graphs would write to freed memory
            self._graphs.clear()
            self._ran.clear()
            self._setting = captured
            widths = WIDTHS_OF_A_SERVER if run.goes_on else WIDTHS_OF_A_RUN
            warm_up(self.rows, self.runners, self.method, self.arange, widths)

    def prepare(self) -> None:
        """Capture every step that a request may need: greedy, drawn, filtered, in each width. All rows rest."""
        if self.tight:  # nothing is captured
            return
        assert self.pending is not None
        self.park(list(range(self.width)))
        for drawn, filtered in ((False, False), (True, False), (True, True)):
            self.draw(drawn, filtered)
            for variant in range(len(self.variants)):
                shape = Shape(variant, self.pending, self.slots, drawn, filtered)
                while shape not in self._graphs:
                    self._prepare(shape)

    def _prepare(self, shape: Shape) -> None:
        """Run the first step of a shape without a graph; capture the next one and replay it."""
        if shape not in self._ran:
            self._ran.add(shape)
            self.step(shape, check_values=True)
            torch.cuda.synchronize()
            return
        before = [runner.forwards for runner in self.runners.values()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool()):
            self.step(shape)
        self._forwards_each[shape] = [
            runner.forwards - count for runner, count in zip(self.runners.values(), before, strict=True)
        ]  # the capture counted them; the replay below executes them
        self._graphs[shape] = graph
        graph.replay()
        torch.cuda.synchronize()

"""A batch whose steps and short prefills run as CUDA graphs: each shape is captured once and replayed.

CUDA graphs: CUDA C++ Programming Guide, section "CUDA Graphs"; `torch.cuda.CUDAGraph`.

A step is captured whole. The hooks of the method run as they are: what Python decides in them is decided once, at the
capture. A hook may not read a value of the device, nor copy one from the host.

A chunk of prompts is captured for one row and for all rows, in a few widths: 300 launches from Python take longer than
the GPU. It is padded to its width, so products have other shapes than in a batch without graphs, and on a GPU sums may
differ in their last bits; methods on a checkpoint have the same shapes for the same prompts of a batch. Batches of the
same rows, slots and taps share these graphs.
"""

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mtbench.decoding import prefill
from mtbench.decoding.host_sync import Shape
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.run_state import RunState
from mtbench.models.attention import ALIGNED, KERNEL_POSITIONS
from mtbench.models.runner import ModelRunner

DEVICE = "cuda"  # device of captured steps
# Some rows of a batch are prefilled one by one rather than at once without a graph: at most so many, and so many rows ×
# parameters, since each reads all weights, and the launches take 30 ms.
ALONE, ALONE_WORK = 4, 5e10


class Prefill(NamedTuple):
    """A captured chunk of prompts, and the tensors that it reads (`feed_chunk`)."""

    graph: torch.cuda.CUDAGraph
    forwards: int
    tokens: Tensor  # (R, S)
    parts: Tensor  # (3, R)


class Captured(Batch):
    """A batch with graphs. The first step of a shape runs without one; the next is captured, all later are replays."""

    one_launch = True
    _anchor: tuple[Any, torch.cuda.CUDAGraph, Tensor] | None = None

    def __init__(self, method: Method, runners: ModelRunners, rows: int, positions: int) -> None:
        super().__init__(method, runners, rows, positions, tight=False)
        self._view = -(-positions // ALIGNED) * ALIGNED  # of prefills; the same whatever the window of the method
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

    def feed_parts(self, runner: ModelRunner, parts: Tensor, block: int) -> None:
        """Replay the graph of the chunk, or for few rows that of one row for each; without one, feed it as it is."""
        rows = parts.shape[1]
        alone = rows <= min(ALONE, self.width - 1) and rows * runner.parameters <= ALONE_WORK
        groups = parts.split(1, 1) if alone else (parts,)
        keys = [self._key(runner, block, group) for group in groups]
        if not runner.cache.graphs.keys() >= set(keys):
            super().feed_parts(runner, parts, block)
            return
        for key, group in zip(keys, groups, strict=True):
            captured: Prefill = runner.cache.graphs[key]
            captured.parts.copy_(group)
            torch.index_select(self.rows.tokens, 0, captured.parts[0], out=captured.tokens)
            captured.graph.replay()
            runner.forwards += captured.forwards

    def _key(self, runner: ModelRunner, block: int, parts: Tensor) -> tuple[Any, ...]:
        """Return what the capture of a chunk decides once. A draft may read the target's features."""
        fed, end = prefill.width_of(parts), int(parts[2].max())
        fits = (each for each in prefill.CAPTURED_WIDTHS if each >= (fed if each <= KERNEL_POSITIONS else end))
        layout = self.width, self.slots, runner.cache.slots, self._view, runner.cache.taps
        return runner.epoch, self.target.epoch, layout, block, parts.shape[1], next(fits, None)

    def _prepare_prefills(self, widths: Sequence[int]) -> None:
        """Capture chunks of one row and of all rows; feed those of `widths` that cannot be captured.

        It overwrites the first slots. Graphs of earlier batches of the same shapes are used again.
        """
        for runner, rows in product(self.runners.values(), {1, self.width}):
            graphs, block = runner.cache.graphs, self.method.block if runner is self.target else 1
            captured = prefill.captured_widths(runner, rows, self._view, block)
            for width in (*captured, *widths):
                end = min(width, self._view)
                places = torch.tensor([(row, 0, end) for row in range(rows)]).T.contiguous()
                if (key := self._key(runner, block, places)) in graphs:
                    continue
                tokens, parts = self.rows.tokens[:rows].clone(), places.to(self.device)
                views = {-(-end // ALIGNED) * ALIGNED, self._view}
                if width in captured:  # of a wide chunk, PyTorch's attention reads all slots in view
                    views = {self._view} if width <= KERNEL_POSITIONS else {-(-end // ALIGNED) * ALIGNED}
                for view in views:
                    feed = partial(prefill.feed_chunk, runner, tokens, parts, width, view, block)
                    feed()
                if width in captured:
                    with suppress(RuntimeError):  # a module reads from the device, or memory is short: it is launched
                        graph, [forwards] = self._capture(feed, [runner])
                        graphs[key] = Prefill(graph, forwards, tokens, parts)

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
            widths = prefill.WIDTHS_OF_A_SERVER if run.goes_on else prefill.WIDTHS_OF_A_RUN
            started_at = time.perf_counter()
            self._prepare_prefills(widths)
            run.preparation_s += time.perf_counter() - started_at

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
        capture = self._capture(partial(self.step, shape), self.runners.values())
        self._graphs[shape], self._forwards_each[shape] = capture

    def _capture(
        self, call: Callable[[], None], runners: Collection[ModelRunner]
    ) -> tuple[torch.cuda.CUDAGraph, list[int]]:
        """Capture a call and replay it once; return its graph, and the forwards of these runners in it."""
        before = [runner.forwards for runner in runners]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool()):
            call()
        # the capture counted them; the replay executes them
        forwards = [runner.forwards - count for runner, count in zip(runners, before, strict=True)]
        graph.replay()
        torch.cuda.synchronize()
        return graph, forwards

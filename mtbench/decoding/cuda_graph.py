"""A batch whose steps run as CUDA graphs: each shape is captured once and replayed.

CUDA graphs: CUDA C++ Programming Guide, section "CUDA Graphs"; `torch.cuda.CUDAGraph`.

The operations of a step outside its forward are dozens of small ones on (rows, window) tensors, each a kernel of a few
microseconds on a GPU. They run as a few kernels: a function is traced with its real tensors (`make_fx`), as a CUDA
graph captures it, and Inductor fuses what was recorded. What Python decides is frozen. A tensor that the function takes
from elsewhere keeps its address, and a write in place stays one. So the hooks of a method may be any Python that a CUDA
graph can capture.
"""

import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mtbench.decoding.host_sync import Shape
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Method, ModelRunners, TargetOutput
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.prefill import WIDTHS_OF_A_RUN, WIDTHS_OF_A_SERVER, warm_up
from mtbench.decoding.request import Request
from mtbench.decoding.run_state import RunState
from mtbench.errors import first_line
from mtbench.models.attention import AttentionMetadata
from mtbench.models.fused_decoder import compilations

DEVICE = "cuda"  # device of captured steps
PLAIN_STEPS = 3  # steps of a shape before its capture: libraries allocate and compile in their first calls
FUSED_STEPS = 2  # the last of them: one is recorded, the next one compiles what was recorded

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


class Captured(Batch):
    """A batch with graphs. The first steps of a shape run without one; the next is captured, all later are replays."""

    one_launch = True
    _anchor: tuple[Any, torch.cuda.CUDAGraph, Tensor] | None = None

    def __init__(self, method: Method, runners: ModelRunners, rows: int, positions: int) -> None:
        super().__init__(method, runners, rows, positions, tight=False)
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self.fuses = self.device.type == "cuda"
        self._fused: dict[tuple[str, Shape], Fused] = {}
        self._drafts: dict[Shape, bool] = {}  # whether `propose` runs a model, which has kernels of its own
        self._prepared: dict[Shape, int] = {}  # steps so far
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

    def propose(self, shape: Shape, *, check_values: bool = False) -> Tensor:
        if self._fusing(shape) and not self._drafts[shape]:
            (guess,) = self._fuse("propose", shape, lambda: (super(Captured, self).propose(shape),))()
            return guess
        host_s = sum(runner.host_s for runner in self.runners.values())
        guess = super().propose(shape, check_values=check_values)
        self._drafts[shape] = sum(runner.host_s for runner in self.runners.values()) > host_s
        return guess

    def feed(self, guess: Tensor, shape: Shape) -> tuple[Tensor, AttentionMetadata]:
        if not self._fusing(shape):
            return super().feed(guess, shape)

        def feed(guess: Tensor) -> tuple[Tensor, ...]:
            ids, metadata = super(Captured, self).feed(guess, shape)
            masks = [metadata.mask(sliding_window) for sliding_window in self.target.sliding_windows]
            return ids, metadata.slots, metadata.positions, metadata.length, *masks

        ids, slots, positions, length, *masks = self._fuse("feed", shape, feed)(guess)
        metadata = self.metadata(slots, positions, shape)
        return ids, metadata.computed(length, dict(zip(self.target.sliding_windows, masks, strict=True)))

    def accept(self, output: TargetOutput, shape: Shape, *, check_values: bool = False) -> tuple[Tensor, ...]:
        if not self._fusing(shape):
            return super().accept(output, shape, check_values=check_values)

        def accept(guess: Tensor, position: Tensor, logits: Tensor, *judged: Tensor) -> Tensors:
            output = TargetOutput(self.rows, guess, position, logits, judged or None)  # type: ignore[arg-type]
            return super(Captured, self).accept(output, shape)

        tensors = (output.guess, output.position, output.logits, *(output.one_pass or ()))
        return self._fuse("accept", shape, accept)(*tensors)

    def _fusing(self, shape: Shape) -> bool:
        """Return whether the operations outside the forward of this step are recorded or run compiled."""
        return self.fuses and not self.tight and self._prepared.get(shape, 0) > PLAIN_STEPS - FUSED_STEPS

    def _fuse(self, name: str, shape: Shape, function: Callable[..., Tensors]) -> Fused:
        """Return the function as compiled before for this shape; at the first call a new one, which records it."""
        return self._fused.setdefault((name, shape), Fused(function))

    def run(self, requests: Sequence[Request]) -> tuple[list[Generation], Timing]:
        before = compilations()
        generations, timing = super().run(requests)
        if compilations() > before:  # torch does not report the time: at most that of the whole run
            timing = dataclasses.replace(timing, preparation_s=timing.wall_s)
        failures = (f"{name}: {fused.failure}" for (name, _), fused in self._fused.items() if fused.failure)
        return generations, dataclasses.replace(timing, uncompiled=next(failures, None))

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
            self._fused.clear()
            self._prepared.clear()
            self._setting = captured
            warm_up(
                self.rows,
                self.runners,
                self.method,
                self.arange,
                WIDTHS_OF_A_SERVER if run.goes_on else WIDTHS_OF_A_RUN,
            )

    def prepare(self) -> None:
        """Capture every step that a request may need: greedy and sampled, in each width. All rows rest meanwhile."""
        if self.tight:  # nothing is captured
            return
        assert self.pending is not None
        self.park(list(range(self.width)))
        for drawn in (False, True):
            self.rows = dataclasses.replace(self.rows, temperature=self.temperatures if drawn else None)
            for variant in range(len(self.variants)):
                shape = Shape(variant, self.pending, self.slots, drawn)
                while shape not in self._graphs:
                    self._prepare(shape)

    def _prepare(self, shape: Shape) -> None:
        """Run one step without a graph; after enough of them capture a step and replay it."""
        done = self._prepared.get(shape, 0)
        self._prepared[shape] = done + 1
        if done < PLAIN_STEPS:
            self.step(shape, check_values=not self._fusing(shape))
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

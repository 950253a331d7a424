"""Engines: how a forward pass is executed.

- `eager`: transformers' modules, operation by operation, as papers measure.
- `graph`: the checkpoint's weights as few large operations (mtbench/models/fused_decoder.py); on a GPU the whole step,
  from proposal to cursors, is captured once per shape as a CUDA graph and replayed (cuda_graph.py).
- `invariant`: as `graph`, with batch-invariant products and attention in all passes: a row's result depends on that row
  alone, so tokens do not change with batch size or window width, even in bfloat16. It is slower. The kernels need a
  GPU; in half precision a CPU is refused.

If the decoder does not support an architecture, its layers run as transformers' modules and are captured too. If our
kernels fail their check on this GPU (mtbench/models/self_check.py, step_check.py), PyTorch's operations run in the same
capture. A run's environment.json states what runs the layers, and why our kernels did not run.
"""

from collections.abc import Callable
from typing import Any

from mtbench import kernels
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.loop import Batch
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.step_check import check_kernels
from mtbench.errors import UserError
from mtbench.models.fused_decoder import Decoder, UnsupportedArchitecture, build
from mtbench.models.loading import Checkpoint
from mtbench.models.runner import ModelRunner
from mtbench.models.self_check import check_modules

ROOM = 256  # positions per row of a captured batch are a multiple of this: similar lengths share a batch


class Engine:
    """The engine `eager`. It creates runners and batches; a batch takes only runners of its own engine."""

    name = "eager"

    def runner(self, checkpoint: Checkpoint) -> ModelRunner:
        """Return a new runner on a checkpoint."""
        check_kernels(checkpoint.model.device)
        check_modules(checkpoint.model)
        return ModelRunner(checkpoint)

    def batch(self, method: Method, runners: ModelRunners, rows: int, positions: int) -> Batch:
        """Return a batch to decode in."""
        return Batch(method, runners, rows, positions)

    def layers(self, checkpoint: Checkpoint) -> str:
        """Return the description of what runs a checkpoint's layers."""
        return "transformers' modules"


class Graph(Engine):
    """The engines `graph` and `invariant`."""

    def __init__(self, name: str = "graph") -> None:
        self.name = name
        self._decoders: dict[Checkpoint, Decoder | str] = {}  # or why it has none
        self._batches: dict[Any, Captured] = {}

    def runner(self, checkpoint: Checkpoint) -> ModelRunner:
        """Return a new runner. Raises UserError if `invariant` does not support the checkpoint."""
        if checkpoint not in self._decoders:
            check_kernels(checkpoint.model.device)
            try:
                built = build(checkpoint.model, invariant=self.name == "invariant")
                checkpoint.calls.watch(built)
                self._decoders[checkpoint] = built
            except UnsupportedArchitecture as reason:
                self._decoders[checkpoint] = str(reason)
                check_modules(checkpoint.model)
        decoder, model = self._decoders[checkpoint], checkpoint.model
        if self.name == "invariant" and model.device.type == "cpu" and model.dtype.itemsize < 4:
            half = str(model.dtype).removeprefix("torch.")
            raise UserError(
                f"engine 'invariant' needs a GPU's kernels in {half}, and this is a CPU; use `--dtype float32`, where "
                "its tokens are those of `engine=graph`."
            )
        if self.name == "invariant" and isinstance(decoder, str):
            raise UserError(
                f"engine 'invariant' needs layers of the Llama architecture, and {checkpoint.source!r} has others "
                f"({decoder}); use `engine=graph` or `engine=eager`."
            )
        return ModelRunner(checkpoint, None if isinstance(decoder, str) else decoder)

    def layers(self, checkpoint: Checkpoint) -> str:
        decoder = self._decoders.get(checkpoint)
        return f"transformers' modules ({decoder})" if isinstance(decoder, str) else "mtbench's decoder"

    def batch(self, method: Method, runners: ModelRunners, rows: int, positions: int) -> Batch:
        """Return a batch. On a GPU an earlier batch of the same size is used again, with its graphs.

        Raises UserError if `invariant` lacks its kernels.
        """
        if self.name == "invariant" and (reason := kernels.off()):
            raise UserError(
                f"engine 'invariant' needs mtbench's kernels, which do not run here ({reason}); use `engine=graph`."
            )
        if runners.target.device.type != "cuda":
            return Batch(method, runners, rows, positions)
        positions = -(-positions // ROOM) * ROOM
        key = (method, rows, positions, *((role, id(runner)) for role, runner in runners.items()))
        if key not in self._batches:
            self._batches[key] = Captured(method, runners, rows, positions)
        return self._batches[key]


ENGINES: dict[str, Callable[[], Engine]] = {
    "graph": Graph,
    "eager": Engine,
    "invariant": lambda: Graph("invariant"),
}

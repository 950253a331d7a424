"""The lab: a plan's models, each loaded once, on the device and in the type they will be measured in."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from mtbench.decoding.engines import ENGINES, Engine
from mtbench.decoding.external import Outside, run_outside
from mtbench.decoding.loop import decode
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.registry import METHODS
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.hardware.timer import Stopwatch
from mtbench.models.loading import DTYPES, Checkpoint, Inspected, inspect, load
from mtbench.models.runner import ModelRunner
from mtbench.runs import simulation
from mtbench.runs.directory import Record
from mtbench.runs.plan import Cell, RunRequest, Script

SMALL_MODEL = 50_000_000  # parameters: on a CPU a forward of fewer is too short to share among threads


class ModelPool:
    """The models of a plan, each loaded once and shared by the cells that use it."""

    def __init__(self, request: RunRequest) -> None:
        self.device = resolve_device(request.device)
        self.dtype = resolve_dtype(request.dtype, self.device)
        self.offline = request.offline
        self.seed, self.temperature = request.seed, request.temperature
        self.loading_s: float | None = None  # of the models, the proof of their decoders included
        self.checkpoints: dict[str, Checkpoint] = {}
        self.inspected: dict[str, Inspected] = {}
        self.engines: dict[str, Engine] = {}
        self.methods: dict[str, Method] = {}  # by cell
        # By role too: a draft of the same weights has its own cache.
        self.runners: dict[tuple[str, str, str], ModelRunner] = {}

    def checkpoint(self, source: str) -> Checkpoint:
        """Loaded once, whoever asks."""
        if source not in self.checkpoints:
            self.checkpoints[source] = load(source, dtype=DTYPES[self.dtype], device=self.device, offline=self.offline)
        return self.checkpoints[source]

    def known(self, method: Method, source: str) -> Checkpoint | Inspected:
        """What a method gets to know of a checkpoint: the whole of it, or what there is without its weights."""
        if not method.weightless:
            return self.checkpoint(source)
        if source not in self.inspected:
            self.inspected[source] = inspect(source, offline=self.offline)
        return self.inspected[source]

    def engine(self, name: str) -> Engine:
        """Made once, whoever asks."""
        if name not in self.engines:
            self.engines[name] = ENGINES[name]()
        return self.engines[name]

    def runner(self, role: str, source: str, engine: str | None) -> ModelRunner:
        """The lane of a role on a checkpoint, run by an engine; for a loop that is not ours, by the plain one."""
        key = (role, source, engine or Engine.name)
        if key not in self.runners:
            self.runners[key] = self.engine(key[2]).runner(self.checkpoint(source))
        return self.runners[key]

    def method(self, cell: Cell) -> Method:
        """The cell's method, with the acceptance it is made to have; made once, for an engine knows it again."""
        if cell.cell not in self.methods:
            method = method_of(cell)
            device = torch.device(self.device)
            self.methods[cell.cell] = (
                method if cell.accept is None else simulation.scripted(method, cell.accept, device)
            )
        return self.methods[cell.cell]

    def decode(
        self,
        cell: Cell,
        requests: Sequence[Request],
        *,
        fixed_length: bool | None = None,
        room: int = 0,
    ) -> tuple[list[Generation], Timing]:
        """Decode requests with a cell's method, checkpoints, engine, batch size and length.

        `fixed_length` overrides the cell's. `room`: least positions per row.
        """
        fixed = cell.length == "fixed" if fixed_length is None else fixed_length
        method = self.method(cell)
        if cell.accept is not None:
            fixed, requests = True, _scripted_requests(cell.accept, requests)
            if isinstance(method, simulation.Scripted):
                method.serve([request.item for request in requests])
        if isinstance(method, Outside):
            checkpoints = {role: self.known(method, source) for role, source in cell.checkpoints.items()}
            return run_outside(method, checkpoints, requests, fixed_length=fixed, room=room)
        return decode(
            method,
            self.runners_of(cell),
            requests,
            rows=cell.batch_size,
            fixed_length=fixed,
            room=room,
            temperature=self.temperature,
            make=self.engine(cell.engine or Engine.name).batch,
        )

    def load(self, cells: Iterable[Cell]) -> None:
        """Load every checkpoint of the cells; a small model gets one thread, for two only wait for each other.

        Raises UserError for a cell that needs the network, if that must not be touched.
        """
        began = time.perf_counter()
        for cell in cells:
            method = method_of(cell)
            if self.offline and isinstance(method, Outside) and method.host:
                raise UserError(
                    f"{cell.arm!r} asks {method.host}, which --offline forbids; leave one of the two out, or serve the "
                    "model on this machine."
                )
            if not method.weightless:
                self.runners_of(cell)
        self.loading_s = time.perf_counter() - began
        largest = max((checkpoint.model.num_parameters() for checkpoint in self.checkpoints.values()), default=0)
        if self.device == "cpu" and largest < SMALL_MODEL:
            torch.set_num_threads(1)

    def clear(self) -> None:
        """Let go of all models."""
        for held in (self.runners, self.methods, self.engines, self.checkpoints):
            held.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def describe(self) -> Record:
        """What results need to know of this session: device, type, threads, the cost of a synchronisation."""
        stopwatch = Stopwatch(torch.device(self.device))
        began = stopwatch.now()
        for _ in range(10):
            ended = stopwatch.now()
        return {
            "device": self.device,
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "loading_s": self.loading_s,
            "synchronisation_s": (ended - began) / 10,
            "layers": {
                f"{source} by {engine}": self.engine(engine).layers(runner.checkpoint)
                for (_, source, engine), runner in self.runners.items()
            },
        }

    def runners_of(self, cell: Cell) -> ModelRunners:
        """The lanes a cell runs on."""
        return ModelRunners(
            cell.on, {role: self.runner(role, source, cell.engine) for role, source in cell.checkpoints.items()}
        )


def _scripted_requests(script: Script, requests: Sequence[Request]) -> list[Request]:
    """Return the requests with the budgets that their scripts of acceptance give them."""
    budgets = [request.max_new_tokens for request in requests]
    scripted = simulation.budgets(script, [request.item for request in requests], budgets)
    return [replace(request, max_new_tokens=budget) for request, budget in zip(requests, scripted, strict=True)]


def resolve_device(asked: str) -> str:
    """`auto` is the GPU if there is one. Raises UserError for a device that is not there."""
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if asked not in ("cpu", "cuda") or (asked == "cuda" and not torch.cuda.is_available()):
        have = "cpu, cuda" if torch.cuda.is_available() else "cpu (no GPU is visible)"
        raise UserError(f"--device {asked!r} is not here; there is: {have}.")
    return asked


def resolve_dtype(asked: str, device: str) -> str:
    """`auto` is bfloat16 on a GPU, float32 on a CPU."""
    return ("bfloat16" if device == "cuda" else "float32") if asked == "auto" else asked


def method_of(cell: Cell) -> Method:
    """The cell's method with its resolved options."""
    method: Method = METHODS[cell.method](**cell.options)
    return method

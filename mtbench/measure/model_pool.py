"""The models of a plan, each loaded once, on the device and in the dtype of the measurement."""

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from mtbench import kernels
from mtbench.decoding.arms import is_ours, is_served
from mtbench.decoding.engines import ENGINES, Engine
from mtbench.decoding.external import ExternalEngine, run_outside
from mtbench.decoding.loop import decode
from mtbench.decoding.method import Method, ModelRunners
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.request import Request
from mtbench.errors import UserError
from mtbench.hardware.stopwatch import Stopwatch
from mtbench.lineup import simulation
from mtbench.measure.cell_servers import CellServers
from mtbench.models import gguf
from mtbench.models.auto import SMALL_MODEL, parameters, resolve_device, resolve_dtype
from mtbench.models.drafts.loading import draft_config, load_draft
from mtbench.models.families import locate
from mtbench.models.feature_draft import DraftRunner
from mtbench.models.loading import DTYPES, Checkpoint, Inspected, inspect, load
from mtbench.models.runner import ModelRunner
from mtbench.models.vocabularies import TranslatedRunner, differ
from mtbench.plan.directory import JsonObject
from mtbench.plan.plan import Cell, RunRequest
from mtbench.programs.machine_share import usable_processors


class ModelPool:
    """The models of a plan, each loaded once and shared by the cells that use it."""

    def __init__(self, request: RunRequest) -> None:
        self.device = resolve_device(request.device)
        self.dtype = resolve_dtype(request.dtype, self.device)
        self.offline = request.offline
        # A sum in half precision would depend on how a library splits it: other tokens, so other grades.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.seed, self.sampling = request.seed, request.sampling
        self.loading_s: float | None = None  # of the models, including the check of their decoders
        self.checkpoints: dict[str, Checkpoint] = {}
        self.drafts: dict[tuple[str, ModelRunner], DraftRunner] = {}  # that read a target's hidden states
        self.translated: dict[tuple[tuple[str, str, str], ModelRunner], TranslatedRunner] = {}
        self.inspected: dict[str, Inspected] = {}
        self.engines: dict[str, Engine] = {}
        self.methods: dict[str, Method] = {}  # by cell
        self.servers = CellServers(self.device, self.dtype, apart=request.apart, offline=self.offline)
        # By role too: a draft of the same weights has its own cache.
        self.runners: dict[tuple[str, str, str], ModelRunner] = {}

    def checkpoint(self, source: str) -> Checkpoint:
        """Return a checkpoint, loaded at the first call."""
        if source not in self.checkpoints:
            self.checkpoints[source] = load(source, dtype=DTYPES[self.dtype], device=self.device, offline=self.offline)
        return self.checkpoints[source]

    def known(self, method: Method, source: str) -> Checkpoint | Inspected:
        """Return the checkpoint for a method: loaded, or for a method that needs no weights without them."""
        return self.checkpoint(source) if method.needs_weights else self.tokenizer_of(source)

    def tokenizer_of(self, source: str) -> Inspected:
        """Return a checkpoint without its weights."""
        if source not in self.inspected:
            self.inspected[source] = inspect(source, offline=self.offline)
        return self.inspected[source]

    def engine(self, name: str) -> Engine:
        """Return an engine, created at the first call."""
        if name not in self.engines:
            self.engines[name] = ENGINES[name]()
        return self.engines[name]

    def runner(self, role: str, source: str, engine: str | None, target: ModelRunner | None = None) -> ModelRunner:
        """Return the runner of a role on a checkpoint. `engine` not ours (an external engine's cell): the eager one.

        `target`: the runner whose hidden states a draft may read.
        """
        if target is not None and draft_config(source, offline=self.offline) is not None:
            return self._draft(source, target)
        key = (role, source, engine if engine is not None and is_ours(engine) else Engine.name)
        if target is not None and differ(target.checkpoint, self.checkpoint(source)):
            return self._translated(key, target)
        if key not in self.runners:
            self.runners[key] = self.engine(key[2]).runner(self.checkpoint(source))
        return self.runners[key]

    def _translated(self, key: tuple[str, str, str], target: ModelRunner) -> ModelRunner:
        if (key, target) not in self.translated:
            self.translated[key, target] = TranslatedRunner(self.runner(*key), target)
        return self.translated[key, target]

    def _draft(self, source: str, target: ModelRunner) -> DraftRunner:
        if (source, target) not in self.drafts:
            loaded = load_draft(source, target.checkpoint, offline=self.offline)
            self.checkpoints[source] = loaded
            self.drafts[source, target] = DraftRunner(loaded, target)
        return self.drafts[source, target]

    def method(self, cell: Cell) -> Method:
        """Return the cell's method, with its scripted acceptance; one object, since engines keep graphs by method."""
        if cell.cell not in self.methods:
            method = cell.built
            if cell.accept is not None and not is_served(cell.engine):
                method = simulation.scripted(method, cell.accept, torch.device(self.device))
            self.methods[cell.cell] = method
        return self.methods[cell.cell]

    def decode(
        self, cell: Cell, requests: Sequence[Request], *, room: int = 0, visit: int = 0
    ) -> tuple[list[Generation], Timing]:
        """Decode requests with a cell's method, checkpoints, engine, batch size and length.

        `room`: least positions per row. `visit`: servers of other visits end.
        """
        fixed, method, sampling = cell.length == "fixed", self.method(cell), self.sampling
        if cell.accept is not None:
            fixed, requests = True, simulation.scripted_requests(cell.accept, requests)
            if isinstance(method, simulation.Scripted):
                method.serve([request.item for request in requests])
        if isinstance(method, ExternalEngine):
            checkpoints = {role: self.known(method, source) for role, source in cell.checkpoints.items()}
            return run_outside(method, checkpoints, requests, ignore_eos=fixed, room=room, sampling=sampling)
        if is_served(cell.engine):
            target = self.tokenizer_of(cell.checkpoints[cell.on])
            return self.servers.ask(
                cell, method, target, requests, ignore_eos=fixed, room=room, visit=visit, sampling=sampling
            )
        return decode(
            method,
            self.runners_of(cell),
            requests,
            rows=cell.batch_size,
            ignore_eos=fixed,
            room=room,
            sampling=sampling,
            make=self.engine(cell.engine or Engine.name).batch,
        )

    def load(self, cells: Iterable[Cell]) -> None:
        """Load every checkpoint of the cells. On a CPU small models run on one thread, which is faster than two.

        Raises UserError for a cell that needs the network, if the run is offline.
        """
        started_at, served = time.perf_counter(), list[str]()
        for cell in cells:
            self.servers.arms.add(cell.arm)
            method = cell.built
            if self.offline and isinstance(method, ExternalEngine) and method.host:
                raise UserError(
                    f"{cell.arm!r} asks {method.host}, which --offline forbids; leave out the arm or --offline, or "
                    "serve the model on this machine."
                )
            if cell.computes_here:
                self.runners_of(cell)
            elif cell.engine is not None:
                self.servers.prepare(cell)
                served += cell.checkpoints.values()
        self.loading_s = time.perf_counter() - started_at
        use_threads(self, served)

    def clear(self) -> None:
        """Free all models."""
        for loaded in (self.drafts, self.translated, self.runners, self.methods, self.engines, self.checkpoints):
            loaded.clear()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def describe(self) -> JsonObject:
        """Return this session's part of environment.json: device, dtype, threads, the cost of a synchronisation."""
        stopwatch = Stopwatch(torch.device(self.device))
        started_at = stopwatch.now()
        for _ in range(10):
            ended_at = stopwatch.now()
        return {
            "device": self.device,
            "dtype": self.dtype,
            "threads": torch.get_num_threads(),
            "loading_s": self.loading_s,
            "synchronisation_s": (ended_at - started_at) / 10,
            "layers": {
                f"{source} by {engine}": self.engine(engine).layers(runner.checkpoint)
                for (_, source, engine), runner in self.runners.items()
            }
            | {source: f"mtbench's, {runner.draft.format.name}" for (source, _), runner in self.drafts.items()}
            | self.servers.releases,
            "kernels_off": kernels.off(),
            "converted": {
                source: made for source in self.checkpoints if (made := gguf.description(Path(locate(source))))
            },
        }

    def runners_of(self, cell: Cell) -> ModelRunners:
        """Return the runners of a cell's roles."""
        return self.runners_for(cell.on, cell.checkpoints, cell.engine)

    def runners_for(self, on: str, checkpoints: Mapping[str, str], engine: str | None) -> ModelRunners:
        """Return the runners of the checkpoints by role. `on`: the target's."""
        target = self.runner(on, checkpoints[on], engine)
        rest = {role: source for role, source in checkpoints.items() if role != on}
        drafts = {role: self.runner(role, source, engine, target) for role, source in rest.items()}
        return ModelRunners(on, {on: target, **drafts})


def use_threads(pool: ModelPool, served: Iterable[str] = ()) -> None:
    """Use as many threads as the models of the pool, and those that engines serve, run on."""
    models = [checkpoint.model for checkpoint in pool.checkpoints.values()]
    sizes = [sum(p.numel() for p in model.parameters()) for model in models]
    torch.set_num_threads(threads_for(pool.device, [*sizes, *(parameters(source, pool.offline) for source in served)]))


def threads_for(device: str, sizes: Iterable[int]) -> int:
    """Return the threads for models with these parameters. On a CPU small ones run on one, faster than on two."""
    small = device == "cpu" and max(sizes, default=0) < SMALL_MODEL
    return 1 if small else usable_threads()


def usable_threads() -> int:
    """Return torch's threads, but at most as many as this process may keep busy: a quota stops more again and again."""
    return min(torch.get_num_threads(), usable_processors())

"""The servers of cells that a serving engine decodes: they start at a cell's first request, and end here."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from mtbench.clients.engine_server import READY_S, EngineServer
from mtbench.clients.serving_engine import Serving, ServingEngine, Setting
from mtbench.decoding.arms import is_served
from mtbench.decoding.external import timed
from mtbench.decoding.method import Method
from mtbench.decoding.output import Generation, Timing
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.decoding.request import Request, in_batch, refuse_unknown_ids
from mtbench.files import cache_home
from mtbench.lineup import gpu_memory, simulation
from mtbench.models.loading import Inspected
from mtbench.options.engine_options import words_of
from mtbench.plan.plan import Cell
from mtbench.sampling import Sampling


class CellServers:
    """One server for each arm of a batch size. `apart`: each arm has the machine for itself."""

    def __init__(self, device: str, dtype: str, *, apart: bool, offline: bool) -> None:
        self.device, self.dtype, self.apart, self.offline = device, dtype, apart, offline
        self.within_s = READY_S  # time in which a server must be ready
        self.releases = dict[str, str]()  # checkpoint by engine -> the engine's package
        self.running = dict[str, EngineServer]()  # by arm
        self._for: tuple[int, int] | None = None  # batch size and visit; servers of others have ended
        self.arms = set[str]()  # in this process and in servers: they share the memory of the device
        self._programs = dict[str, Path]()  # that run the engines of this session

    def prepare(self, cell: Cell) -> None:
        """Prepare what the cell's server needs: checkpoints in the engine's format, and its program."""
        assert cell.engine is not None
        engine = SERVING_ENGINES[cell.engine]
        for source in cell.checkpoints.values():
            engine().prepared(source, self.dtype, offline=self.offline)
        self._programs[cell.engine] = engine.python()
        self.releases[f"{cell.checkpoints[cell.on]} by {cell.engine}"] = engine.release() or "of an unknown version"

    def ask(
        self,
        cell: Cell,
        method: Method,
        target: Inspected,
        requests: Sequence[Request],
        *,
        ignore_eos: bool,
        room: int,
        visit: int,
        sampling: Sampling,
    ) -> tuple[list[Generation], Timing]:
        """Decode requests by the cell's server, which the first call starts. Raises ServerError.

        room: least positions per row. visit: servers of other visits end.
        """
        if self._for != (now := (cell.served_as[-1].batch_size, visit)):
            self.close()
            self._for = now
        refuse_unknown_ids(requests, target.vocabulary, cell.on)
        server = self._server_of(cell, method, room)
        server.within_s = self.within_s
        requests = in_batch(requests, sampling=sampling, ignore_eos=ignore_eos)
        generate = partial(server.generate, ignore_eos=ignore_eos)
        return timed(target, requests, generate, ignore_eos=ignore_eos)

    def _server_of(self, cell: Cell, method: Method, room: int) -> EngineServer:
        if cell.arm in self.running and self.running[cell.arm].serving.positions < room:
            self.running.pop(cell.arm).close()
        if cell.arm not in self.running:
            engine: ServingEngine = SERVING_ENGINES[str(cell.engine)]()
            model, setting = self._prepared(engine, cell)
            if cell.accept is not None and cell.accept.probabilities is not None:
                made = engine.synthetic(setting, simulation.rates(cell.accept.probabilities, method))
                assert isinstance(made, Setting), "planning refuses it"
                setting = made
            own, threads = words_of(cell.engine_options), torch.get_num_threads()
            rows, share = cell.served_as[-1].batch_size, self._share(engine, cell)
            serving = Serving(model, setting, rows, room, self.dtype, threads, own, share, cell.prefix_cache)
            log = cache_home() / "engines" / "logs" / f"{cell.cell}.log"
            self.running[cell.arm] = EngineServer(engine, self._programs[engine.name], serving, cell.arm, log)
        return self.running[cell.arm]

    def _share(self, engine: ServingEngine, cell: Cell) -> float | None:
        """Return the part of the GPU's memory that a cell's server may take; None if it is not on a GPU."""
        if not engine.on_gpu() or (found := gpu_memory.device_bytes(self.device)) is None:
            return None
        total, free = found
        given = cell.gpu_bytes
        if given is None:  # of a cluster, whose GPUs are not known when the run is planned
            given = int(gpu_memory.FILLED * total) // (1 if self.apart else max(len(self.arms), 1))
        return engine.share(given, total, free)

    def _prepared(self, engine: ServingEngine, cell: Cell) -> tuple[str, Setting]:
        settings = dict[int, Setting]()
        for held in cell.served_as:
            model, setting = engine.prepared_arm(
                held.built, held.checkpoints, held.on, self.dtype, offline=self.offline
            )
            settings[held.batch_size] = setting
        made = engine.scheduled(settings) if len(settings) > 1 else settings[held.batch_size]
        assert made is not None, "only a schedule that the engine has is planned"
        return model, made

    def command(self, cell: Cell) -> str | None:
        """Return the command that starts the cell's server; None while it does not run."""
        server = self.running.get(cell.arm)
        return None if server is None else server.command

    def groups(self, cell: Cell) -> tuple[list[int] | None, list[int]]:
        """Return the groups of a cell's server (none before it starts; None: it needs none) and of those that wait."""
        groups = {arm: server.groups for arm, server in self.running.items()}
        own = groups.pop(cell.arm, [])
        return own if is_served(cell.engine) else None, [group for of_arm in groups.values() for group in of_arm]

    def close(self) -> None:
        """End all servers."""
        for server in self.running.values():
            server.close()
        self.running.clear()

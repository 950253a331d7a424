"""How a GPU's memory is divided among the servers of a batch size and this process, before anything starts.

All servers of a batch size run side by side, with mtbench's own arms; apart, each is alone. A server needs its weights,
the keys and values of all rows, and what its engine states; what is left over is divided equally. The judge loads its
models when all servers have ended, so it has no part.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path

import torch

from mtbench.clients.engine_server import GIB
from mtbench.clients.serving_engine import ServingEngine
from mtbench.decoding.arms import is_served
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.formatting import counted
from mtbench.errors import UserError
from mtbench.hardware import machine
from mtbench.models.auto import parameters, resolve_device
from mtbench.models.checkpoint_files import loaded_bytes
from mtbench.models.configuration import cached_numbers, load_config
from mtbench.models.families import path_of, split_part
from mtbench.models.loading import DTYPES
from mtbench.plan.plan import Cell, GpuMemory, Group, Plan, RunRequest
from mtbench.statistics import UNITS_NEEDED

FILLED = 0.95  # of a GPU's memory, that is divided: the driver and what is not counted have the rest
OWN_BYTES = 3 << 29  # 1.5 GiB of this process beside weights, keys and values: CUDA context, activations, graphs


def device_bytes(device: str) -> tuple[int, int] | None:
    """Return all and the free bytes of the GPU that a device means, without a CUDA context; None for a CPU."""
    if resolve_device(device) != "cuda":
        return None
    gpu = machine.gpu()
    memory = None if gpu is None else gpu.read("nvmlDeviceGetMemoryInfo")
    if memory is None:  # a part of a GPU (MIG), which NVML does not know by torch's id
        total = torch.cuda.get_device_properties(0).total_memory
        return total, total
    return int(memory.total), int(memory.free)


def divided(plan: Plan, processes: int = 1) -> Plan:
    """Return the plan with the part of the GPU's memory that each server gets; as it is if none is on a GPU.

    processes: how many commands take turns on the GPU. Raises UserError for servers that do not fit.
    """
    engines = {cell.cell: SERVING_ENGINES[cell.engine]() for cell in plan.cells if is_served(cell.engine)}
    engines = {name: engine for name, engine in engines.items() if engine.on_gpu()}
    found = device_bytes(plan.request.device) if engines else None
    if found is None:
        return plan
    total, free = found
    free = min(free, int(FILLED * total) // processes)
    memory = GpuMemory(total_bytes=total, free_bytes=free, own_bytes=_own_bytes(plan))
    given = dict[str, int]()
    for group in plan.groups:
        served = [plan.cell(name) for name in group.cells if name in engines]
        for cells in [[cell] for cell in served] if plan.request.apart else [served] if served else []:
            given |= _parts(plan, group, cells, engines, memory)
    cells = [cell.changed(server_bytes=given.get(cell.cell)) for cell in plan.cells]
    return plan.changed(cells=cells, gpu_memory=memory)


def described(plan: Plan) -> list[str]:
    """Return how a plan divides the GPU's memory, a line for each batch size."""
    if (memory := plan.gpu_memory) is None:
        return []
    apart, lines = "each server alone, " if plan.request.apart else "", list[str]()
    for group in plan.groups:
        servers = [cell for cell in map(plan.cell, group.cells) if cell.server_bytes is not None]
        parts = ", ".join(f"{cell.arm} {_gib(cell.server_bytes or 0)}" for cell in servers)
        all_of = f"{_gib(memory.free_bytes)} of {_gib(memory.total_bytes)} GiB"
        own = f"mtbench {_gib(memory.own_bytes)}"
        lines += [f"GPU memory at batch size {group.batch_size}, {apart}{all_of}: {own}, {parts}"] if servers else []
    return lines


def _parts(
    plan: Plan, group: Group, cells: Sequence[Cell], engines: Mapping[str, ServingEngine], memory: GpuMemory
) -> dict[str, int]:
    """Return the bytes of servers that run side by side, by cell: what each needs, and an equal part of the rest.

    A user's own option of an arm's server stands. Raises UserError if they do not fit.
    """
    asked = {cell.cell: _asked_bytes(cell, engines[cell.cell], memory.total_bytes) for cell in cells}
    needs = {cell.cell: asked[cell.cell] or _needed_bytes(plan, cell, engines[cell.cell]) for cell in cells}
    largest = max(cells, key=lambda cell: needs[cell.cell])
    rest = memory.free_bytes - memory.own_bytes - sum(needs.values())
    if needs[largest.cell] > memory.free_bytes - OWN_BYTES:
        more = f"`--engine-option {largest.engine}:{engines[largest.cell].splits[0]}=2`"
        raise UserError(
            f"the server of {largest.arm!r} needs {_gib(needs[largest.cell])} GiB of the GPU's memory at batch size "
            f"{group.batch_size}, and {_gib(memory.free_bytes - OWN_BYTES)} GiB are there for it; give a quantised "
            f"checkpoint, or two GPUs: {more}."
        )
    if rest < 0:
        raise UserError(
            f"batch size {group.batch_size} needs {_gib(sum(needs.values()))} GiB of the GPU's memory for "
            f"{counted(len(cells), 'server')} and {_gib(memory.own_bytes)} GiB for mtbench, and "
            f"{_gib(memory.free_bytes)} GiB are there; give fewer arms or smaller batch sizes, or start servers one "
            f"at a time: `mtbench run --apart --rounds {UNITS_NEEDED['round']}`."
        )
    free = [name for name, given in asked.items() if given is None]
    return {name: needed + (rest // len(free) if name in free else 0) for name, needed in needs.items()}


def _asked_bytes(cell: Cell, engine: ServingEngine, total_bytes: int) -> int | None:
    """Return what a server takes by its user's own option; None without it."""
    values = [option.value for option in cell.engine_options if option.name.replace("_", "-") == engine.share_option]
    with suppress(ValueError):  # its engine refuses it
        return int(float(values[-1] or "") * total_bytes) + engine.beside_bytes if values else None
    return None


def _needed_bytes(plan: Plan, cell: Cell, engine: ServingEngine) -> int:
    """Return the least that the server of a cell takes on each of its GPUs."""
    whole = [source for source in cell.checkpoints.values() if not split_part(source)[1]]  # a part lies in its whole
    rows, room = cell.served_as[-1].batch_size, plan.suite(cell.suite).room
    cached = rows * room * sum(_token_bytes(source, plan.request) for source in whole)
    divisors = [option.value or "" for option in cell.engine_options if option.name.replace("_", "-") in engine.splits]
    devices = prod(int(value) for value in divisors if value.isdecimal() and int(value))
    weights = sum(_weight_bytes(source, plan.request) for source in whole)
    return (weights + cached) // devices + engine.beside_bytes + engine.work_bytes


def _own_bytes(plan: Plan) -> int:
    """Return what mtbench's own arms take: each checkpoint once, and for each runner the largest cache of any batch."""
    caches = dict[tuple[str, str, str | None], int]()
    for cell in plan.cells:
        for role, source in cell.checkpoints.items() if cell.computes_here else ():
            key, positions = (role, source, cell.engine), cell.batch_size * plan.suite(cell.suite).room
            caches[key] = max(caches.get(key, 0), positions * _token_bytes(source, plan.request))
    weights = {path_of(source): _weight_bytes(source, plan.request) for _, source, _ in caches}
    return OWN_BYTES + sum(caches.values()) + sum(weights.values())


def _weight_bytes(source: str, request: RunRequest) -> int:
    folder, itemsize = Path(path_of(source)), DTYPES[request.dtype].itemsize
    here = loaded_bytes(folder, itemsize) if folder.is_dir() else 0
    return here or itemsize * parameters(source, request.offline)


def _token_bytes(source: str, request: RunRequest) -> int:
    """Return the bytes of a token's keys and values; 0 for a configuration that only an engine knows."""
    with suppress(UserError):
        return cached_numbers(load_config(path_of(source), offline=request.offline)) * DTYPES[request.dtype].itemsize
    return 0


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"

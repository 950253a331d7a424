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
from mtbench.decoding.arms import is_served
from mtbench.decoding.engines import ROOM
from mtbench.decoding.registry import SERVING_ENGINES
from mtbench.document.formatting import counted
from mtbench.errors import UserError
from mtbench.hardware import machine
from mtbench.models.auto import parameters, resolve_device
from mtbench.models.checkpoint_files import stored_bytes
from mtbench.models.configuration import cached_numbers, load_config
from mtbench.models.families import path_of, split_part
from mtbench.models.loading import DTYPES
from mtbench.plan.plan import Cell, Plan, RunRequest
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
    served = [cell for cell in plan.cells if is_served(cell.engine) and not cell.fault]
    served = [cell for cell in served if SERVING_ENGINES[str(cell.engine)].share_option]
    found = device_bytes(plan.request.device) if served else None
    if found is None:
        return plan
    for engine in [SERVING_ENGINES[name]() for name in {str(cell.engine) for cell in served}]:
        if not engine.on_gpu():
            raise UserError(
                f"{engine.release()} computes on a CPU, and this run is on cuda; name an installation for GPUs, "
                f"`mtbench fetch engine {engine.name} --program PYTHON`, or give `--device cpu`."
            )
    total, free = found
    free, own = min(free, int(FILLED * total) // processes), _own_bytes(plan)
    given = dict[str, int]()
    for group in plan.groups:
        cells = [cell for cell in served if cell.cell in group.cells]
        for beside in [[cell] for cell in cells] if plan.request.apart else filter(None, [cells]):
            given |= _parts(plan, beside, total, free, own)
    return plan.changed(cells=[c.changed(gpu_bytes=given.get(c.cell)) for c in plan.cells], gpu_bytes=own)


def described(plan: Plan) -> list[str]:
    """Return how a plan divides the GPU's memory, a line for each batch size."""
    lines, apart = list[str](), ", one server at a time" if plan.request.apart else ""
    for group in plan.groups:
        given = [f"{cell.arm} {_gib(cell.gpu_bytes)}" for cell in map(plan.cell, group.cells) if cell.gpu_bytes]
        parts = ", ".join([f"mtbench {_gib(plan.gpu_bytes or 0)} GiB", *given])
        lines += [f"GPU memory at batch size {group.batch_size}{apart}: {parts}"] if given else []
    return lines


def _parts(plan: Plan, cells: Sequence[Cell], total: int, free: int, own: int) -> dict[str, int]:
    """Return the bytes of servers that run side by side, by cell: what each needs, and an equal part of the rest.

    A part that the user names stays.
    """
    needs = {cell.cell: _needed(plan, cell, total) for cell in cells}
    largest = max(cells, key=lambda cell: needs[cell.cell][0])
    most, size, needed = needs[largest.cell][0], largest.batch_size, sum(least for least, _ in needs.values())
    if most > free - OWN_BYTES:
        splits = SERVING_ENGINES[str(largest.engine)].splits[:1]
        two = "".join(f", or two GPUs: `--engine-option {largest.engine}:{name}=2`" for name in splits)
        raise UserError(
            f"the server of {largest.arm!r} needs {_gib(most)} GiB of the GPU's memory at batch size {size}, and "
            f"{_gib(max(0, free - OWN_BYTES))} GiB are there; give a quantised checkpoint{two}."
        )
    if needed > free - own:
        raise UserError(
            f"batch size {size} needs {_gib(needed)} GiB of the GPU's memory for {counted(len(cells), 'server')} and "
            f"{_gib(own)} GiB for mtbench, and {_gib(free)} GiB are there; give fewer arms or smaller batch sizes, or "
            f"start servers one at a time: `mtbench run --apart --rounds {UNITS_NEEDED['round']}`."
        )
    more = (free - own - needed) // max(1, sum(not named for _, named in needs.values()))
    return {name: least if named else least + more for name, (least, named) in needs.items()}


def _needed(plan: Plan, cell: Cell, total: int) -> tuple[int, bool]:
    """Return what the server of a cell takes at least of each of its GPUs, and whether its user names that part."""
    engine = SERVING_ENGINES[str(cell.engine)]()
    options = {option.name.replace("_", "-"): option.value or "" for option in cell.engine_options}
    if engine.share_option in options:
        return int(_number(cell, options, engine.share_option, most=1.0) * total) + engine.beside_bytes, True
    devices = prod(int(_number(cell, options, name)) for name in engine.splits if name in options)
    sizes = [_sizes(source, plan.request) for source in cell.checkpoints.values() if not split_part(source)[1]]
    positions = cell.served_as[-1].batch_size * plan.suite(cell.suite).room
    held = sum(weights + positions * token for weights, token in sizes)
    return held // devices + engine.beside_bytes + engine.work_bytes, False


def _number(cell: Cell, options: Mapping[str, str], name: str, most: float | None = None) -> float:
    """Return an option's number: above 0 and at most `most`, or without one a whole number from 1."""
    with suppress(ValueError):
        number = float(options[name]) if most else int(options[name])
        if 0 < number <= (most or number):
            return number
    wanted = f"a number above 0, at most {most:g}" if most else "a whole number from 1"
    raise UserError(
        f"{cell.arm!r}: `--engine-option {cell.engine}:{name}={options[name]}` is not allowed; give {wanted}."
    )


def _own_bytes(plan: Plan) -> int:
    """Return what mtbench's own arms take: each checkpoint once, and for each runner the largest cache of any batch."""
    weights, caches = dict[str, int](), dict[tuple[str, str, str | None], int]()
    for cell in plan.cells:
        for role, source in cell.checkpoints.items() if cell.computes_here else ():
            weights[path_of(source)], token = _sizes(source, plan.request)
            slots = (plan.suite(cell.suite).room // ROOM + 2) * ROOM  # rounded up, with a step's window
            key, cache = (role, source, cell.engine), cell.batch_size * slots * token
            caches[key] = max(caches.get(key, 0), cache)
    return OWN_BYTES + sum(weights.values()) + sum(caches.values())


def _sizes(source: str, request: RunRequest) -> tuple[int, int]:
    """Return the bytes of a checkpoint's weights, and of a token's keys and values, in the dtype of a run.

    Packed weights stay as they are. A configuration that only an engine can read says nothing about the cache.
    """
    itemsize, path = DTYPES[request.dtype].itemsize, path_of(source)
    packed = stored_bytes(Path(path)) if Path(path).is_dir() else 0
    try:
        config = load_config(path, offline=request.offline)
    except UserError:
        return packed or itemsize * parameters(source, request.offline), 0
    if packed == 0 or getattr(config, "quantization_config", None) is None:
        packed = itemsize * parameters(source, request.offline)
    return packed, itemsize * cached_numbers(config)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f}"

"""Peak memory, in an untimed pass of one block per cell.

On a GPU it is the allocator's peak in this process, where models are loaded and functions compiled, minus the memory of
other cells: their runners, caches and graphs are freed first, and weights that only they use are subtracted. On a CPU
there is no allocator count, so each cell runs in its own process and the figure is that process's largest resident
size, libraries included. (A fresh process imports them first, so they add the same to every cell.)
"""

import gc
import multiprocessing
import multiprocessing.connection
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from mtbench.decoding.request import Request
from mtbench.measure.model_pool import ModelPool
from mtbench.models.loading import Checkpoint
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import MemoryRecord
from mtbench.plan.plan import Cell, Plan, RunRequest
from mtbench.plugins import InChild


def measure(
    run: RunDirectory, plan: Plan, pool: ModelPool, failed: set[str], note: Callable[[str], None], deadline: float
) -> None:
    """Fill memory.json: cell -> bytes, None if the pass failed or the models are elsewhere. Known figures are kept.

    Empties the pool. Stops at `deadline` (time.monotonic), between two cells.
    """
    known: dict[str, int | None] = {cell.cell: None for cell in plan.cells if not cell.computes_here}
    known |= run.read("memory.json", MemoryRecord).root if run.has("memory.json") else {}
    todo = [cell for cell in plan.cells if cell.cell not in known and cell.cell not in failed]
    if todo and time.monotonic() <= deadline:
        note(f"peak memory: an untimed pass for {len(todo)} cells")
    for i, cell in enumerate(todo):
        if time.monotonic() > deadline:
            note(f"time budget spent; the peak memory of {len(todo) - i} cells is measured with --resume")
            return
        known[cell.cell] = _allocated(plan, cell, pool) if pool.device == "cuda" else _resident(plan, cell, pool)
        run.write_json("memory.json", known)


def share(peak: int, at_rest: int, checkpoints: Iterable[Checkpoint]) -> int:
    """Return a cell's part of a peak, in bytes: its own weights and everything above the memory at rest.

    `at_rest` includes the weights of every loaded checkpoint. `checkpoints`: those that the cell uses; weights that
    they share (a draft of the same weights, tied embeddings, joined matrices) count once.
    """
    tensors = (t for c in checkpoints for t in (*c.model.parameters(), *c.model.buffers()))
    own: dict[int, int] = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return peak - at_rest + sum(own.values())


def _allocated(plan: Plan, cell: Cell, pool: ModelPool) -> int | None:
    """Return the cell's part of the GPU allocator's peak, with new runners and engines on the loaded weights."""
    for held in (pool.drafts, pool.translated, pool.runners, pool.methods, pool.engines):  # drafts hold targets
        held.clear()
    gc.collect()
    torch.cuda.empty_cache()
    try:
        pool.runners_of(cell)  # loading and rearranging weights ends before the peak is reset
        torch.cuda.reset_peak_memory_stats()
        at_rest = torch.cuda.memory_allocated()
        pool.decode(cell, first_block(plan, cell), room=plan.suite(cell.suite).room)
    except Exception:  # the method's fault, or out of memory
        return None
    return share(torch.cuda.max_memory_allocated(), at_rest, map(pool.checkpoint, cell.checkpoints.values()))


def _resident(plan: Plan, cell: Cell, pool: ModelPool) -> int | None:
    """Return the largest resident size of a process that decodes the cell's first block and nothing else."""
    pool.clear()  # the child process loads its own models
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mtbench.measure.peak_memory"])
    receive, send = context.Pipe(duplex=False)
    request = plan.request.changed(device=pool.device, dtype=pool.dtype)
    block, room = first_block(plan, cell), plan.suite(cell.suite).room
    child = context.Process(target=InChild(_in_child), args=(request, cell, block, room, send))
    child.start()
    send.close()
    try:
        peak: int | None = receive.recv()
    except EOFError:  # the pass died
        peak = None
    child.join()
    return peak


def _in_child(
    request: RunRequest, cell: Cell, block: Sequence[Request], room: int, send: multiprocessing.connection.Connection
) -> None:
    torch.set_num_threads(1)  # a forked process must not wake its parent's thread pool
    ModelPool(request).decode(cell, block, room=room)
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    send.send(kibibytes if sys.platform == "darwin" else kibibytes * 1024)


def first_block(plan: Plan, cell: Cell) -> list[Request]:
    """Return one batch of the cell's first block."""
    return plan.requests(plan.suite(cell.suite), plan.group(cell.cell).blocks[0][: cell.batch_size])

"""Peak memory, from an untimed pass of one block per cell in a process of its own.

On a GPU it is the allocator's peak. On a CPU it is the process's largest resident size, libraries included
(a fresh process imports them first, so what they take is the same for every cell).
"""

import multiprocessing
import multiprocessing.connection
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from mtbench.lab import Lab
from mtbench.plan import Plan
from mtbench.rundir import RunDirectory


def measure(run: RunDirectory, plan: Plan, device: str, failed: set[str], note: Callable[[str], None]) -> None:
    """Fill memory.json: cell -> bytes, None where the pass failed. What is there already stays."""
    known = run.read_json("memory.json") if run.has("memory.json") else {}
    todo = [c.cell for c in plan.cells if c.cell not in known and c.cell not in failed]
    if not todo:
        return
    note(f"peak memory: an untimed pass for {len(todo)} cells")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mtbench.memory"])
    for cell in todo:
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_pass, args=(str(run.path), cell, device, send))
        child.start()
        send.close()
        try:
            known[cell] = receive.recv()
        except EOFError:  # the pass died
            known[cell] = None
        child.join()
        run.write_json("memory.json", known)


def _pass(directory: str, name: str, device: str, send: multiprocessing.connection.Connection) -> None:
    """In the child: decode the cell's first block and send the peak."""
    plan = Plan.from_json(RunDirectory(Path(directory)).read_json("plan.json"))
    cell = plan.cell(name)
    group = next(g for g in plan.groups if name in g.cells)
    suite = plan.suite(cell.suite)
    block = group.blocks[0][: cell.batch_size]
    prompts = [suite.items[i].prompt_ids for i in block]
    torch.set_num_threads(1)  # a forked process must not wake its parent's thread pool
    Lab({**plan.request, "device": device}).decode(cell, prompts, suite.max_new_tokens, items=block)
    if device == "cuda":
        send.send(torch.cuda.max_memory_allocated())
    else:
        kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        send.send(kibibytes if sys.platform == "darwin" else kibibytes * 1024)

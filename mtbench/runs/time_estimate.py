"""How long a plan takes, for `--dry-run`: modelled on a GPU whose figures are known, else measured.

Measured: each cell decodes a few tokens of a block. On a GPU this would load and compile every model, which takes
minutes, so the time is computed from the models' sizes instead (mtbench/hardware/step_time.py).
"""

from functools import cache

import torch

from mtbench.hardware import step_time
from mtbench.hardware.probe import Shape, count
from mtbench.hardware.step_time import Gpu
from mtbench.models.drafts.loading import draft_config, draft_without_weights
from mtbench.models.loading import DTYPES, without_weights
from mtbench.runs.model_pool import ModelPool, method_of, resolve_device, resolve_dtype, with_dtype
from mtbench.runs.plan import Cell, Group, Plan
from mtbench.runs.requests import requests_of

FEW_TOKENS = 16


def estimate_s(plan: Plan) -> float:
    """Return the seconds that the plan takes if every answer uses its whole budget."""
    return sum(sum(group.rounds) * block_s for group, block_s in zip(plan.groups, estimate_blocks_s(plan), strict=True))


def estimate_blocks_s(plan: Plan) -> list[float]:
    """Return for each group the seconds of one block in all its cells if every answer uses its whole budget."""
    gpu = modelled_gpu(plan)
    return measured_blocks_s(plan) if gpu is None else modelled_blocks_s(plan, gpu)


def modelled_gpu(plan: Plan) -> Gpu | None:
    """Return the GPU that the plan's time is modelled for; None if it is measured.

    Measured are external engines, other GPUs, and mixtures of experts.
    """
    if resolve_device(plan.request.device) != "cuda" or any(cell.engine is None for cell in plan.cells):
        return None
    try:
        _shapes(plan)
    except ValueError:
        return None
    return step_time.named(torch.cuda.get_device_name())


def modelled_blocks_s(plan: Plan, gpu: Gpu) -> list[float]:
    """Return for each group the seconds of one block, from the models' sizes.

    Every forward pass commits one token, as if no draft token were accepted, so this is an upper bound for methods that
    draft.
    """
    shapes = _shapes(plan)
    return [sum(_block_s(plan, group, plan.cell(name), shapes, gpu) for name in group.cells) for group in plan.groups]


def _shapes(plan: Plan) -> dict[str, Shape]:
    """Return the sizes of every checkpoint by its source. Raises ValueError if one cannot be counted."""
    dtype = DTYPES[resolve_dtype(plan.request.dtype, "cuda")]
    pairs = {(source, cell.checkpoints[cell.on]) for cell in plan.cells for source in cell.checkpoints.values()}
    return {source: _shape(source, target, dtype, offline=plan.request.offline) for source, target in pairs}


@cache
def _shape(source: str, target: str, dtype: torch.dtype, *, offline: bool) -> Shape:
    """Return the sizes of a checkpoint, which may be a draft that reads the hidden states of a target."""
    if source == target or draft_config(source, offline=offline) is None:
        return count(without_weights(source, dtype, offline=offline))
    return count(draft_without_weights(source, without_weights(target, dtype, offline=offline), offline=offline))


def _block_s(plan: Plan, group: Group, cell: Cell, shapes: dict[str, Shape], gpu: Gpu) -> float:
    """Return the seconds of the first block in one cell."""
    suite, items = plan.suite(group.suite), group.blocks[0]
    rows = min(cell.batch_size, len(items))
    prompt = sum(len(suite.items[i].prompt_ids) for i in items) / len(items)
    context = prompt + suite.max_new_tokens / 2
    window = method_of(cell).variants[-1].window()
    fed, judged = (window.pending or 1) + window.guesses, window.guesses + 1
    assert cell.engine is not None
    batch_s = 0.0
    for role, source in cell.checkpoints.items():
        shape = shapes[source]
        positions, logits, forwards = (fed, judged, 1) if role == cell.on else (1, 1, window.drafts)
        each_s = step_time.step_s(
            shape, gpu, cell.engine, rows=rows, positions=positions, judged=logits, context=context
        )
        batch_s += step_time.prefill_s(shape, gpu, rows=rows, prompt=prompt) + suite.max_new_tokens * forwards * each_s
    return batch_s * len(items) / rows


def measured_blocks_s(plan: Plan) -> list[float]:
    """Return for each group the seconds of one block in all its cells if every answer uses its whole budget.

    Every cell decodes the first block of its group for a few tokens, once to warm up and once timed.
    """
    pool, found = ModelPool(with_dtype(plan).request), []
    pool.load(plan.cells)
    for group in plan.groups:
        suite, block_s = plan.suite(group.suite), 0.0
        few = min(FEW_TOKENS, suite.max_new_tokens)
        requests = requests_of(plan, suite, group.blocks[0], max_new_tokens=few)
        for cell in map(plan.cell, group.cells):
            for _ in range(2):
                timing = pool.decode(cell, requests, fixed_length=True)[1]
            before_s = timing.prefill_s or 0.0
            block_s += before_s + (timing.wall_s - before_s) * suite.max_new_tokens / few
        found.append(block_s)
    return found

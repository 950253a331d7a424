"""The step `equality`: on the embedded model in float32, engines and batch sizes give the tokens of a reference.

That of lossless methods is plain decoding of their checkpoint by `graph` at batch size 1, of a lossy method its own.
"""

import time
from typing import Any

from gpu_parts.bench import Bench
from mtbench.errors import first_line, loses_device
from mtbench.runs.model_pool import ModelPool
from mtbench.runs.plan import Cell, Plan, RunRequest
from mtbench.runs.planner import make_plan

METHODS = (  # the plain ones first: references
    *("ar:on=mars", "ar", "ar:on=medusa", "mars:tau=0.8", "mars-selfspec", "mars-speculative", "speculative:on=mars"),
    *("prompt-lookup:on=mars", "jacobi:on=mars", "medusa", "eagle:tree=3x2", "dflash"),
)


def check(bench: Bench) -> None:
    """Decode cell by cell, references first, and compare each at once; a cell that fails is one that differs."""
    plan = make_plan(
        RunRequest(
            method=METHODS,
            family="tiny",
            engine=["graph", "eager"],
            batch_size=(1, 16),
            limit=2 if bench.toy else 16,
            max_new_tokens=4 if bench.toy else 48,
            device=bench.device.type,
            dtype="float32",
            rounds=1,
        )
    )
    pool, rows, references = ModelPool(plan.request), list[dict[str, Any]](), dict[str, list[list[int]]]()
    cells = sorted(plan.cells, key=lambda cell: (cell.batch_size, cell.engine != "graph"))
    try:
        for cell in cells:
            bench.in_time(f"{len(rows)} of {len(cells)} cells")
            began_at = time.monotonic()
            policy = f"lossless on {cell.on}" if cell.claims == "lossless" else cell.arm.partition("/")[0]
            row: dict[str, Any] = {"cell": cell.cell, "policy": policy, "state": "equal"}
            try:
                tokens = _tokens(plan, pool, cell)
                if policy not in references:
                    references[policy], row["state"] = tokens, "reference"
                elif tokens != references[policy]:
                    differ = sum(a != b for a, b in zip(tokens, references[policy], strict=True))
                    row["state"] = f"{differ} of {len(tokens)} answers differ"
            except Exception as error:
                if loses_device(error):
                    raise
                row["state"] = f"{type(error).__name__}: {first_line(error)}"
            rows.append(row | {"wall_s": time.monotonic() - began_at})
            bench.keep("cells", rows)
    finally:
        other = [f"{row['cell']}: {row['state']}" for row in rows if row["state"] not in ("equal", "reference")]
        bench.say(f"{len(rows)} of {len(cells)} cells, {len(rows) - len(other)} as their reference")
        doubt = "cells are missing" if len(rows) < len(cells) and not other else None
        bench.figure("cells that differ or fail in float32", len(other) if rows else None, doubt=doubt)
        if other:
            bench.say("; ".join(other))


def _tokens(plan: Plan, pool: ModelPool, cell: Cell) -> list[list[int]]:
    """Return the tokens of a cell's answers."""
    pool.load([cell])
    [suite], size = plan.suites, cell.batch_size
    requests = plan.requests(suite, range(len(suite.items)))
    batches = (requests[begin : begin + size] for begin in range(0, len(requests), size))
    return [list(answer.token_ids) for batch in batches for answer in pool.decode(cell, batch, room=256)[0]]

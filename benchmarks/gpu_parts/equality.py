"""The step `equality`: on the embedded model in float32, engines and batch sizes give the tokens of a reference.

That of lossless methods is plain decoding of their checkpoint by `graph` at batch size 1, of a lossy method its own.
"""

import time
from typing import Any

from gpu_parts.bench import Bench, tokens
from mtbench.errors import first_line, loses_device
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.plan.plan import RunRequest

METHODS = (  # the plain ones first: references
    *("ar:on=mars", "ar", "ar:on=medusa", "mars:tau=0.8", "mars-selfspec", "mars-speculative", "speculative:on=mars"),
    *("prompt-lookup:on=mars", "jacobi:on=mars", "medusa", "eagle:tree=3x2", "dflash"),
    *("mars-selfspec:ahead=3,tree=best:8", "eagle:tree=best:6"),  # a tree of its own for each row
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
            max_new_tokens=4 if bench.toy else 20,
            device=bench.device.type,
            dtype="float32",
            rounds=1,
        )
    )
    pool, rows, references = ModelPool(plan.request), list[dict[str, Any]](), dict[str, list[list[int]]]()
    cells = sorted(plan.cells, key=lambda cell: (cell.engine != "graph", cell.batch_size))
    try:
        for cell in cells:
            bench.in_time(f"{len(rows)} of {len(cells)} cells")
            began_at = time.monotonic()
            policy = f"lossless on {cell.on}" if cell.claims == "lossless" else cell.arm.partition("/")[0]
            row: dict[str, Any] = {"cell": cell.cell, "method": cell.method, "policy": policy, "state": "equal"}
            try:
                pool.load([cell])
                found = tokens(pool, plan, cell, len(plan.suites[0].items))
                if policy not in references:
                    references[policy], row["state"] = found, "reference"
                elif found != references[policy]:
                    differ = sum(a != b for a, b in zip(found, references[policy], strict=True))
                    row["state"] = f"{differ} of {len(found)} answers differ"
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

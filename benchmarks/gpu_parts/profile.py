"""What one step spends its time on: the kernels of one replay of its CUDA graph, by name."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from gpu_parts.bench import Bench
from gpu_parts.figures import FIRST_CONTACT
from mtbench.decoding.engines import Graph
from mtbench.errors import first_line, loses_device
from mtbench.measure.model_pool import ModelPool
from mtbench.plan.directory import JsonObject
from mtbench.plan.plan import Cell, Plan


def profile(bench: Bench, plan: Plan) -> None:
    """Profile one replayed step of each arm of a race that has run. On a CPU, operations while a block decodes."""
    pool, found, [suite] = bench.pool(plan), dict[str, JsonObject](), plan.suites
    for cell in plan.cells:
        bench.in_time(f"its race, and profiles of {len(found)} of {len(plan.cells)} arms")
        requests = plan.requests(suite, plan.groups[0].blocks[0], max_new_tokens=4)
        step = partial(pool.decode, cell, requests) if bench.toy else captured_replay(pool, cell)
        try:
            before = FIRST_CONTACT["step_us"].get(f"{cell.method} b{cell.batch_size}", {})
            found[cell.arm] = (
                kernels(step, before, on_gpu=not bench.toy) if step else {"reason": "no step was captured"}
            )
        except (RuntimeError, ValueError) as error:  # a container may forbid profiling; the races go on
            if loses_device(error):
                raise
            found[cell.arm] = {"reason": first_line(error)}
        bench.keep("profile", found)
        if reason := found[cell.arm].get("reason"):
            bench.say(f"no profile of {cell.arm}: {reason}")


def kernels(step: Callable[[], object], before: Mapping[str, float], *, on_gpu: bool) -> JsonObject:
    """Return the microseconds of a step, those in which a kernel ran, and count, microseconds and share of each kernel.

    `before`: the microseconds of the first contact. Raises ValueError if the profiler sees no kernel.
    """
    step()
    if on_gpu:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events() or ()
        if event.device_type == wanted and event.cpu_parent is None
    )
    if not spans:
        raise ValueError("the profiler saw no kernel")
    count, total, busy_us, until_us = Counter[str](), dict[str, float](), 0.0, spans[0][0]
    for start_us, end_us, name in spans:
        busy_us += max(0.0, end_us - max(until_us, start_us))
        until_us = max(until_us, end_us)
        count[name] += 1
        total[name] = total.get(name, 0.0) + end_us - start_us
    whole_us = until_us - spans[0][0]
    by_name = {
        name: {
            "us": us,
            "share": us / whole_us,
            "count": count[name],
            "first_contact_us": before.get(name.split("<")[0]),
        }
        for name, us in sorted(total.items(), key=lambda one: -one[1])
    }
    whole = {"us": whole_us, "first_contact_us": before.get("whole step"), "busy_us": busy_us, "kernels": len(spans)}
    return whole | {"by_name": by_name}


def captured_replay(pool: ModelPool, cell: Cell) -> Callable[[], object] | None:
    """Return the replay of the cell's captured step with most slots in view. Its rows are done: it commits nothing."""
    method, engine = pool.method(cell), pool.engine(cell.engine or "")
    assert isinstance(engine, Graph)
    batches = [batch for key, batch in engine._batches.items() if key[0] is method]
    graphs = {shape: graph for batch in batches for shape, graph in batch._graphs.items()}
    return graphs[max(graphs, key=lambda shape: shape.view)].replay if graphs else None

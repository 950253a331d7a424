"""What one step spends its time on: the kernels of one replay of its CUDA graph, with the gaps between them."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import step_time
import torch
from rich.table import Table
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from gpu_parts import runner
from gpu_parts.bench import Bench
from mtbench.decoding.cuda_graph import Captured
from mtbench.decoding.engines import Graph
from mtbench.hardware.probe import Shape, count
from mtbench.runs.directory import JsonObject
from mtbench.runs.model_pool import ModelPool, method_of
from mtbench.runs.plan import Cell, Plan

SHOWN = 20  # kernels in the table; the file has all


class Kernel(NamedTuple):
    """One kernel that ran, on the profiler's clock."""

    name: str
    start_us: float
    end_us: float


def profile(bench: Bench, name: str, plan: Plan) -> None:
    """Profile one replayed step of each arm of the last race; write all kernels to a file, print the longest.

    On a CPU, profile operations while a block decodes, to test this script.
    """
    pool = bench.current
    for cell in plan.cells:
        step = decoded_block(pool, plan, cell) if bench.cpu else captured_replay(pool, cell)
        if step is None:
            bench.say(f"  {cell.arm}: no captured step to profile")
            continue
        try:
            found = summary(kernels(step, ProfilerActivity.CPU if bench.cpu else ProfilerActivity.CUDA))
        except (RuntimeError, ValueError) as error:  # a container may forbid profiling; the races go on
            bench.found["errors"][f"profile {name} {cell.arm}"] = repr(error)
            bench.say(f"  {cell.arm}: no profile: {error}")
            continue
        found["estimate"] = estimate(plan, cell, pool)
        file = bench.args.out / f"profile {bench.toy}{name} {cell.method}.json".replace(" ", "-").replace(":", "")
        runner.write(file, found)
        bench.keep(
            f"profile {name} {cell.arm}", {"file": file.name, **{k: found[k] for k in ("us", "busy_us", "kernels")}}
        )
        bench.console.print(table(f"{bench.toy}{name} {cell.arm}", found))


def kernels(step: Callable[[], object], activity: ProfilerActivity) -> list[Kernel]:
    """Return what ran during the step, in order. The step runs once before."""
    on_gpu = activity == ProfilerActivity.CUDA
    step()
    if on_gpu:
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=[activity]) as profiler:
        step()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    ran = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == wanted and event.cpu_parent is None
    ]
    return sorted(ran, key=lambda kernel: kernel.start_us)


def summary(ran: Sequence[Kernel]) -> JsonObject:
    """Return a step's time, the time in which a kernel ran, each kernel's total, and all kernels in order.

    A gap is the time since the end of all kernels before; below zero, the kernel started before they ended.
    """
    if not ran:
        raise ValueError("the profiler saw no kernel")
    count: Counter[str] = Counter()
    total: dict[str, float] = {}
    ended_us, busy_us, in_order = ran[0].start_us, 0.0, []
    for kernel in ran:
        in_order.append(
            {"name": kernel.name, "us": kernel.end_us - kernel.start_us, "gap_us": kernel.start_us - ended_us}
        )
        busy_us += max(0.0, kernel.end_us - max(ended_us, kernel.start_us))
        ended_us = max(ended_us, kernel.end_us)
        count[kernel.name] += 1
        total[kernel.name] = total.get(kernel.name, 0.0) + kernel.end_us - kernel.start_us
    by_name = {name: {"us": us, "count": count[name]} for name, us in sorted(total.items(), key=lambda pair: -pair[1])}
    us = ended_us - ran[0].start_us
    return {"us": us, "busy_us": busy_us, "kernels": len(ran), "by_name": by_name, "in_order": in_order}


def table(title: str, found: JsonObject) -> Table:
    """Return the kernels that take longest."""
    gaps = found["us"] - found["busy_us"]
    caption = f"{found['kernels']} kernels, {found['us']:.0f} us, of which {gaps:.0f} us between kernels"
    if "estimate" in found:
        lines = ", ".join(f"{what} {us:.0f}" for what, us in found["estimate"].items())
        caption += f"; estimated {sum(found['estimate'].values()):.0f} us: {lines}"
    shown = Table("kernel", "count", "us", "share", title=f"one step of {title}", caption=caption)
    for name, one in list(found["by_name"].items())[:SHOWN]:
        shown.add_row(name, str(one["count"]), f"{one['us']:.1f}", f"{one['us'] / found['us']:.1%}")
    return shown


def estimate(plan: Plan, cell: Cell, pool: ModelPool) -> dict[str, float]:
    """Return the estimated microseconds of the step's parts (benchmarks/step_time.py); nothing on other GPUs.

    On a CPU the estimate is that of an H100, to test this script.
    """
    name = "H100" if pool.device == "cpu" else torch.cuda.get_device_name()
    gpu, [suite] = step_time.named(name), plan.suites
    if gpu is None or cell.engine is None:
        return {}
    model = pool.checkpoints[cell.checkpoints[cell.on]].model
    shape: Shape = count(model)
    window, rows = method_of(cell).window(), cell.batch_size
    positions, judged = (window.pending or 1) + window.guesses, window.guesses + 1
    context = len(suite.items[0].prompt_ids) + suite.max_new_tokens
    code = step_time.code_of(cell.engine, rows * positions)
    products = step_time.products_of(model) if code.planned else ()
    sizes = {"rows": rows, "positions": positions, "judged": judged, "context": context}
    parts = step_time.parts(shape, gpu, code, products, **sizes)
    return {part: 1e6 * s for part, s in parts.items()}


def captured_replay(pool: ModelPool, cell: Cell) -> Callable[[], object] | None:
    """Return the replay of the cell's captured step with most slots in view. Its rows are done: it commits nothing."""
    method = pool.method(cell)
    batches = [batch for key, batch in captured_batches(pool, cell).items() if key[0] is method]
    graphs = {shape: graph for batch in batches for shape, graph in batch._graphs.items()}
    return graphs[max(graphs, key=lambda shape: shape.view)].replay if graphs else None


def captured_batches(pool: ModelPool, cell: Cell) -> dict[Any, Captured]:
    """Return the batches that the cell's engine keeps for the next call. Without them it captures anew."""
    engine = pool.engine(cell.engine or "")
    assert isinstance(engine, Graph)
    return engine._batches


def decoded_block(pool: ModelPool, plan: Plan, cell: Cell, max_new_tokens: int = 4) -> Callable[[], object]:
    """Return a call that decodes a block for a few tokens."""
    [suite] = plan.suites
    requests: Any = plan.requests(suite, plan.groups[0].blocks[0], max_new_tokens=max_new_tokens)
    return lambda: pool.decode(cell, requests)

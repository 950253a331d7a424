"""The checks of what decodes: operations against float64, replays of a CUDA graph, tokens of the engines."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from mtbench import kernels
from mtbench.decoding.external import ExternalEngine
from mtbench.decoding.registry import METHODS
from mtbench.doctor.checks import REPORT, Figures, Finding, Subject, check
from mtbench.document.formatting import listed
from mtbench.kernels import PLAIN, Operations
from mtbench.kernels.cases import PRECISION, SIZES, SMALL, Case, Noise, cases
from mtbench.models.fused_decoder import PADDED
from mtbench.models.loading import DTYPES
from mtbench.runs.model_pool import ModelPool, resolve_dtype
from mtbench.runs.plan import Cell, Plan, RunRequest
from mtbench.runs.planner import make_plan

ROOM = 3  # positions fewer than a padding has
REPLAYS = 1000
PROMPTS, TOKENS = 4, 32
WITHOUT_KERNELS = f"set the environment variable {kernels.SWITCH}=off to decode without mtbench's kernels; {REPORT}"


def _cases(subject: Subject) -> tuple[Operations | None, list[Case]]:
    """Return mtbench's kernels, where they run, and the cases of all operations with positions for each padding."""
    dtype, device = DTYPES[resolve_dtype("auto", subject.device)], torch.device(subject.device)
    run = kernels.operations(torch.empty(0, dtype=dtype, device=device), SIZES.head)
    noise, sizes = Noise(dtype, device), SMALL if device.type == "cpu" else SIZES
    return run, [case for count in PADDED for case in cases(run or PLAIN, noise, count - ROOM, sizes)]


def _operations(subject: Subject) -> Figures:
    run, found = _cases(subject)
    off = None if run is not None or subject.device == "cpu" else kernels.off() or "Triton is missing"
    dtype = resolve_dtype("auto", subject.device)
    return {"ours": run is not None, "off": off, "dtype": dtype, "errors": {case.name: case.error() for case in found}}


@check("operations", _operations)
def operations(ours: bool, off: str | None, dtype: str, errors: Mapping[str, float]) -> Finding:
    """`errors`: relative, against float64. `off`: why mtbench's kernels do not run on a GPU."""
    most = PRECISION[DTYPES[dtype]]
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= most]
    text = f"{len(errors)} cases of {'mtbench' if ours else 'PyTorch'}'s operations in {dtype}"
    if wrong:
        return Finding("fail", f"{text}; wrong: {listed(wrong)}", WITHOUT_KERNELS if ours else "install torch again")
    text += f", within {max(errors.values()):.1g} of float64"
    return Finding("pass", text) if off is None else Finding("warn", f"{text}; mtbench's do not run: {off}", REPORT)


def _replays(subject: Subject) -> Figures | str:
    run, captured = _cases(subject)
    if run is None:
        return "mtbench's kernels do not run here: see `operations`"
    for case in captured:
        case.call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = torch.cat([tensor.flatten().double() for case in captured for tensor in case.call()])
    graph.replay()
    first, different = result.clone(), 0
    for _ in range(REPLAYS):
        graph.replay()
        different += not torch.equal(first, result)
    return {"replays": REPLAYS, "different": different, "at_rest": kernels.at_rest()}


@check("replays", _replays, gpu=True)
def replays(replays: int, different: int, at_rest: bool) -> Finding:
    """A captured step gives the same bits each time. `at_rest`: the counters of products are zero after it."""
    if different:
        return Finding("fail", f"{different:,} of {replays:,} of a CUDA graph give other bits", WITHOUT_KERNELS)
    if not at_rest:
        return Finding("fail", "the counters of products are not zero after a CUDA graph", WITHOUT_KERNELS)
    return Finding("pass", f"{replays:,} of a CUDA graph give the same bits, and counters are zero after them")


def decoded(plan: Plan, pool: ModelPool, max_new_tokens: int) -> Iterator[tuple[Cell, list[Sequence[int]]]]:
    """Yield each cell of a plan of one suite, with the tokens of its answers."""
    [suite] = plan.suites
    requests = plan.requests(suite, range(len(suite.items)), max_new_tokens=max_new_tokens)
    for cell in plan.cells:
        together = cell.batch_size if cell.batching == "static" else len(requests)
        batches = [requests[begin : begin + together] for begin in range(0, len(requests), together)]
        yield cell, [g.token_ids for batch in batches for g in pool.decode(cell, batch, room=256)[0]]


def _tokens(subject: Subject) -> Figures:
    plain = [name for name in METHODS if METHODS[name].reference and not issubclass(METHODS[name], ExternalEngine)]
    request = RunRequest(
        method=[f"{name}:engine=eager|graph" for name in plain],
        batch_size=(PROMPTS,),
        limit=PROMPTS,
        rounds=1,
        device=subject.device,
        dtype="float32",
        offline=True,
    )
    plan, threads = make_plan(request), torch.get_num_threads()
    pool = ModelPool(plan.request)
    try:
        pool.load(plan.cells)
        answers = {cell.cell: tokens for cell, tokens in decoded(plan, pool, TOKENS)}
    finally:
        torch.set_num_threads(threads)
    [first, *_] = answers.values()
    different = [cell for cell, tokens in answers.items() if tokens != first]
    return {"cells": list(answers), "different": different, "layers": pool.describe()["layers"], "off": kernels.off()}


@check("tokens", _tokens)
def tokens(cells: Sequence[str], different: Sequence[str], layers: Mapping[str, str], off: str | None) -> Finding:
    """Of plain decoding on the embedded checkpoint in float32. `off`: why mtbench's kernels do not run."""
    if different:
        text = f"the engines give other tokens: {listed(different)} than {cells[0]}"
        return Finding("fail", text, f"decode with `--engine eager`; {REPORT}")
    text = f"eager and graph give the same; layers: {listed(sorted(set(layers.values())))}"
    return Finding("pass", text) if off is None else Finding("warn", f"{text}; no kernels of mtbench: {off}", REPORT)

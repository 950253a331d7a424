"""The checks of decoding: operations against float64, replays of a CUDA graph, tokens of the engines."""

from collections.abc import Iterator, Mapping, Sequence

import torch

from mtbench import kernels
from mtbench.decoding.registry import plain_decoding
from mtbench.doctor.cases import PRECISION, SIZES, SMALL, Case, Noise, cases
from mtbench.doctor.checks import NO_TRITON, REPORT, Figures, Finding, Subject, check
from mtbench.document.formatting import listed
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.models.auto import resolve_dtype
from mtbench.models.loading import DTYPES
from mtbench.options import AUTO
from mtbench.plan.plan import Cell, Plan, RunRequest

POSITIONS: Sequence[int] = (1, 16, 112)  # in a step: one row, 16 rows, 16 rows that verify drafts of six tokens
REPLAYS = 100
PROMPTS, TOKENS = 4, 32
WITHOUT_KERNELS = f"set the environment variable {kernels.SWITCH}=off to decode without mtbench's kernels; {REPORT}"


def _cases(subject: Subject) -> tuple[bool, list[Case]]:
    """Return whether mtbench's kernels run, and the cases of all operations in the dtype that runs by default.

    Kernels are compiled for each dtype; a model of another one is checked before its first token.
    """
    dtype, sizes = DTYPES[resolve_dtype(AUTO, subject.device)], SMALL if subject.device == "cpu" else SIZES
    noise = Noise(dtype, torch.device(subject.device))
    return kernels.ours(noise(1)), [case for count in POSITIONS for case in cases(noise, count, sizes)]


def _operations(subject: Subject) -> Figures:
    ours, found = _cases(subject)
    off = None if ours or subject.device == "cpu" else kernels.off() or NO_TRITON
    dtype = resolve_dtype(AUTO, subject.device)
    return {"ours": ours, "off": off, "dtype": dtype, "errors": {case.name: case.error() for case in found}}


@check("operations", _operations)
def operations(ours: bool, off: str | None, dtype: str, errors: Mapping[str, float]) -> Finding:
    """`errors`: relative, against float64. `off`: why mtbench's kernels do not run on a GPU."""
    wrong = [f"{name} by {error:.2g}" for name, error in errors.items() if not error <= PRECISION[DTYPES[dtype]]]
    text = f"{len(errors)} cases of {'mtbench' if ours else 'PyTorch'}'s operations in {dtype}"
    if wrong:
        return Finding("fail", f"{text}; wrong: {listed(wrong)}", WITHOUT_KERNELS if ours else "install torch again")
    text += f", within {max(errors.values()):.1g} of float64"
    return Finding("pass", text) if off is None else Finding("warn", f"{text}; mtbench's do not run: {off}", REPORT)


def _replays(subject: Subject) -> Figures | str:
    ours, captured = _cases(subject)
    if not ours:
        return "mtbench's kernels do not run here: see `operations`"
    for case in captured:
        case.call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = torch.cat([tensor.flatten().double() for case in captured for tensor in case.call()])
    graph.replay()
    first, different = result.clone(), torch.zeros((), dtype=torch.int64, device=result.device)
    for _ in range(REPLAYS):
        graph.replay()
        different += (result != first).any()
    return {"replays": REPLAYS, "different": int(different)}


@check("replays", _replays, gpu=True)
def replays(replays: int, different: int) -> Finding:
    """A captured step gives the same bits each time. `different`: replays that do not."""
    if different:
        text = f"{different:,} of {replays:,} replays of a CUDA graph give other bits"
        return Finding("fail", text, WITHOUT_KERNELS)
    return Finding("pass", f"{replays:,} replays of a CUDA graph give the same bits")


def decoded(plan: Plan, pool: ModelPool, max_new_tokens: int) -> Iterator[tuple[Cell, list[Sequence[int]]]]:
    """Yield each cell of a plan of one suite, with the tokens of its answers."""
    [suite] = plan.suites
    requests = plan.requests(suite, range(len(suite.items)), max_new_tokens=max_new_tokens)
    for cell in plan.cells:
        together = cell.batch_size if cell.batching == "static" else len(requests)
        batches = [requests[begin : begin + together] for begin in range(0, len(requests), together)]
        yield cell, [g.token_ids for batch in batches for g in pool.decode(cell, batch, room=256)[0]]


def _tokens(subject: Subject) -> Figures:
    request = RunRequest(
        method=[f"{name}:engine=eager|graph" for name in plain_decoding()],
        batch_size=(PROMPTS,),
        limit=PROMPTS,
        rounds=1,
        device=subject.device,
        dtype="float32",
        offline=True,
    )
    plan, threads = make_plan(request), torch.get_num_threads()
    pool = ModelPool(plan.request)
    with kernels.restored():
        try:
            pool.load(plan.cells)
            answers = {cell.cell: tokens for cell, tokens in decoded(plan, pool, TOKENS)}
        finally:
            torch.set_num_threads(threads)
        off = kernels.off()
    [first, *_] = answers.values()
    different = [cell for cell, tokens in answers.items() if tokens != first]
    return {"cells": list(answers), "different": different, "layers": pool.describe()["layers"], "off": off}


@check("tokens", _tokens)
def tokens(cells: Sequence[str], different: Sequence[str], layers: Mapping[str, str], off: str | None) -> Finding:
    """Of plain decoding on the embedded checkpoint in float32. `off`: why mtbench's kernels do not run."""
    if different:
        text = f"the engines give other tokens: {listed(different)} than {cells[0]}"
        return Finding("fail", text, f"decode with `--engine eager`; {REPORT}")
    text = f"eager and graph give the same; layers: {listed(sorted(set(layers.values())))}"
    return Finding("pass", text) if off is None else Finding("warn", f"{text}; no kernels of mtbench: {off}", REPORT)

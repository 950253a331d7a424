"""The checks of what decodes: operations against float64, replays of a CUDA graph, tokens of the engines."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

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


WITHOUT_DEPENDENCE = f"set the environment variable {kernels.DEPENDENT_SWITCH}=off; {REPORT}"


def _cases(subject: Subject, dtype: str) -> tuple[Operations | None, list[Case]]:
    """Return mtbench's kernels, where they run, and the cases of all operations with positions for each padding."""
    kind, device = DTYPES[dtype], torch.device(subject.device)
    run = kernels.operations(torch.empty(0, dtype=kind, device=device), SIZES.head)
    noise, sizes = Noise(kind, device), SMALL if device.type == "cpu" else SIZES
    return run, [case for count in PADDED for case in cases(run or PLAIN, noise, count - ROOM, sizes)]


def _operations(subject: Subject) -> Figures:
    errors, ours = dict[str, dict[str, float]](), True
    for dtype in dict.fromkeys((resolve_dtype("auto", subject.device), "float32")):
        run, found = _cases(subject, dtype)
        errors[dtype], ours = {case.name: case.error() for case in found}, ours and run is not None
    off = None if ours or subject.device == "cpu" else kernels.off() or "Triton is missing"
    return {"ours": ours, "off": off, "errors": errors}


@check("operations", _operations)
def operations(ours: bool, off: str | None, errors: Mapping[str, Mapping[str, float]]) -> Finding:
    """`errors`: relative, against float64, by dtype. `off`: why mtbench's kernels do not run on a GPU."""
    wrong = [
        f"{name} in {dtype} by {error:.2g}"
        for dtype, of_cases in errors.items()
        for name, error in of_cases.items()
        if not error <= PRECISION[DTYPES[dtype]]
    ]
    count = sum(map(len, errors.values()))
    text = f"{count} cases of {'mtbench' if ours else 'PyTorch'}'s operations in {' and '.join(errors)}"
    if wrong:
        return Finding("fail", f"{text}; wrong: {listed(wrong)}", WITHOUT_KERNELS if ours else "install torch again")
    text += f", within {' and '.join(f'{max(of_cases.values()):.1g}' for of_cases in errors.values())} of float64"
    return Finding("pass", text) if off is None else Finding("warn", f"{text}; mtbench's do not run: {off}", REPORT)


def _replayed(captured: Sequence[Case]) -> tuple[Tensor, int]:
    """Replay all cases as one CUDA graph; return the first results, and how many later ones have other bits."""
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
    return first, different


def _replays(subject: Subject) -> Figures | str:
    run, captured = _cases(subject, resolve_dtype("auto", subject.device))
    if run is None:
        return "mtbench's kernels do not run here: see `operations`"
    ways: dict[str, Callable[[], AbstractContextManager[None]]] = {"without": kernels.without_dependent_launch}
    if kernels.dependent_launch(torch.device(subject.device)):
        ways = {"with": nullcontext, **ways}
    results, different = list[Tensor](), dict[str, int]()
    for way, within in ways.items():
        with within():
            first, different[way] = _replayed(captured)
        results.append(first)
    equal = all(torch.equal(results[0], other) for other in results[1:])
    return {"replays": REPLAYS, "different": different, "equal": equal, "at_rest": kernels.at_rest()}


@check("replays", _replays, gpu=True)
def replays(replays: int, different: Mapping[str, int], equal: bool, at_rest: bool) -> Finding:
    """A captured step gives the same bits each time, with dependent launch and without.

    `different`: replays that do not, by way of launch; `with` is missing where kernels are launched without it anyway.
    `equal`: all ways give the same bits. `at_rest`: the counters of products are zero afterwards.
    """
    if wrong := {way: count for way, count in different.items() if count}:
        text = listed(f"{count:,} of {replays:,} {way} dependent launch" for way, count in wrong.items())
        advice = WITHOUT_DEPENDENCE if set(wrong) == {"with"} else WITHOUT_KERNELS
        return Finding("fail", f"replays of a CUDA graph give other bits: {text}", advice)
    if not equal:
        text = "a CUDA graph gives other bits with dependent launch than without"
        return Finding("fail", text, WITHOUT_DEPENDENCE)
    if not at_rest:
        return Finding("fail", "the counters of products are not zero after a CUDA graph", WITHOUT_KERNELS)
    ways = " and ".join(f"{way} dependent launch" for way in different)
    return Finding("pass", f"{replays:,} of a CUDA graph give the same bits {ways}, and counters are zero after them")


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

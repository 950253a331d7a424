"""The checks of decoding: operations against float64, and one checkpoint: the code that decodes it here.

The engine `graph` decodes by mtbench's decoder with mtbench's kernels, on a GPU; else by its decoder with PyTorch's
operations; else by transformers' modules (mtbench/decoding/engines.py).
"""

from collections.abc import Mapping, Sequence

import torch

from mtbench import kernels
from mtbench.decoding.registry import plain_decoding
from mtbench.doctor.cases import PRECISION, SIZES, SMALL, Noise, cases
from mtbench.doctor.checks import NO_TRITON, REPORT, Figures, Finding, Subject, check
from mtbench.document.formatting import listed
from mtbench.errors import UserError, first_line
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.models import families
from mtbench.models.auto import resolve_dtype
from mtbench.models.loading import DTYPES
from mtbench.options import AUTO
from mtbench.plan.request import RunRequest

POSITIONS: Sequence[int] = (1, 16, 112)  # in a step: one row, 16 rows, 16 rows that verify drafts of six tokens
WITHOUT_KERNELS = f"set the environment variable {kernels.SWITCH}=off to decode without mtbench's kernels; {REPORT}"
ENGINE = "graph"
DEFAULT = next(iter(families.FAMILIES["tiny"].roles.values()))
MODULES, PYTORCHS, OURS = "transformers' modules", "mtbench's decoder", "mtbench's decoder and kernels"


def _operations(subject: Subject) -> Figures:
    """Run the cases in the dtype that runs by default. A model of another one is checked before its first token."""
    dtype, sizes = resolve_dtype(AUTO, subject.device), SMALL if subject.device == "cpu" else SIZES
    noise = Noise(DTYPES[dtype], torch.device(subject.device))
    ours, found = kernels.ours(noise(1)), [case for count in POSITIONS for case in cases(noise, count, sizes)]
    off = None if ours or subject.device == "cpu" else kernels.off() or NO_TRITON
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


def _checkpoint(subject: Subject) -> Figures:
    """Load a checkpoint and decode a prompt. `why`: the reason for slower or no code; None: no reason."""
    source = subject.model or DEFAULT
    found: Figures = {"source": source, "code": None, "dtype": None, "why": None}
    try:
        request = RunRequest(
            model=source,
            method=plain_decoding(),
            limit=1,
            max_new_tokens=1,
            device=subject.device,
            offline=source.startswith(families.EMBEDDED),
        )
        plan = make_plan(request)  # refuses like every run
        [suite], [cell, *_] = plan.suites, plan.cells
        path = cell.checkpoints[cell.on]
        pool = ModelPool(plan.request)
        with kernels.restored():
            pool.decode(cell, plan.requests(suite, range(1)), room=256)
            found["dtype"], decoder = pool.dtype, pool.runner("", path, ENGINE).decoder
            if decoder is None:
                layers = pool.engine(ENGINE).layers(pool.checkpoint(path))
                return found | {"code": MODULES, "why": layers.removeprefix(f"{MODULES} (").removesuffix(")")}
            if kernels.ours(decoder.embedding):
                return found | {"code": OURS}
            return found | {"code": PYTORCHS, "why": kernels.off() or (None if pool.device == "cpu" else NO_TRITON)}
    except UserError as error:
        return found | {"why": first_line(error)}


@check("checkpoint", _checkpoint)
def checkpoint(source: str, code: str | None, dtype: str | None, why: str | None) -> Finding:
    """`code`: what decodes the checkpoint in the engine `graph`. `why`: the reason for slower or no code."""
    text = f"{source}: " + (f"{code} in {dtype}" if code else "nothing decodes it") + (f" ({why})" if why else "")
    if code is None:
        return Finding(
            "fail", text, "correct the checkpoint, or pass `--model` with another folder, hub id or GGUF file"
        )
    if why:
        return Finding("warn", text, "tokens are right, and it decodes slower than others; the page of a run says so")
    return Finding("pass", text)

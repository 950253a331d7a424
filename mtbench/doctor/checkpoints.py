"""The check of checkpoints: the code that would decode each here, its dtype, and why not a faster one.

The engine `graph` decodes by mtbench's decoder with mtbench's kernels, on a GPU; else by its decoder with PyTorch's
operations; else by transformers' modules (mtbench/decoding/engines.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mtbench import kernels
from mtbench.decoding.registry import plain_decoding
from mtbench.doctor.checks import NO_TRITON, Figures, Finding, Subject, check
from mtbench.doctor.decoding import decoded
from mtbench.document.formatting import listed
from mtbench.errors import UserError, first_line, is_out_of_memory
from mtbench.lineup.planner import make_plan
from mtbench.measure.model_pool import ModelPool
from mtbench.models import families
from mtbench.models.auto import fastest_dtype
from mtbench.models.drafts.loading import draft_config
from mtbench.plan.request import RunRequest

ENGINE = "graph"
DEFAULT = next(iter(families.FAMILIES["tiny"].roles.values()))
MODULES, PYTORCHS, OURS = "transformers' modules", "mtbench's decoder", "mtbench's decoder and kernels"
MOST_NAMED = 3
ASK = "correct the checkpoint that the line names, or pass `--model` with another folder, hub id or GGUF file"


def _described(name: str, subject: Subject) -> dict[str, Any]:
    """Return the code that decodes a checkpoint here. `why`: the reason for slower or no code; None: no reason."""
    try:
        [source] = families.family("", name).roles.values()
        how: dict[str, Any] = {"device": subject.device, "offline": source.startswith(families.EMBEDDED)}
        request = RunRequest(model=source, method=plain_decoding(), limit=1, max_new_tokens=1, **how)
        dtype = fastest_dtype(request.device, [source], offline=request.offline)
        if draft := draft_config(source, offline=request.offline):
            return {"code": f"mtbench's modules of {draft.name}", "dtype": dtype, "why": None}
        if not source.startswith(families.RANDOM):
            make_plan(request)  # refuses like every run
        with kernels.restored():
            return _loaded(source, request.changed(dtype=dtype))
    except Exception as error:
        if isinstance(error, UserError) or is_out_of_memory(error):
            return {"code": None, "dtype": None, "why": first_line(error)}
        raise


def _loaded(source: str, request: RunRequest) -> dict[str, Any]:
    """Return the same of a checkpoint, after loading it and decoding a token. Raises UserError if it cannot."""
    pool = ModelPool(request)
    if not source.startswith(families.RANDOM):
        list(decoded(make_plan(request), pool, 1))
    decoder = pool.runner("", source, ENGINE).decoder
    layers = pool.engine(ENGINE).layers(pool.checkpoint(source))
    pool.clear()
    if decoder is None:
        why: str | None = layers.removeprefix(f"{MODULES} (").removesuffix(")")
        return {"code": MODULES, "dtype": pool.dtype, "why": why}
    if kernels.ours(decoder.embedding):
        return {"code": OURS, "dtype": pool.dtype, "why": None}
    why = kernels.off() or (None if pool.device == "cpu" else NO_TRITON)
    return {"code": PYTORCHS, "dtype": pool.dtype, "why": why}


def _checkpoints(subject: Subject) -> Figures:
    return {"found": {source: _described(source, subject) for source in subject.models or (DEFAULT,)}}


def _names(sources: Sequence[str]) -> str:
    """Return checkpoints in a row, of many the first and their number."""
    return listed(sources) if len(sources) <= MOST_NAMED else f"{sources[0]} and {len(sources) - 1} others"


@check("checkpoints", _checkpoints)
def checkpoints(found: Mapping[str, Mapping[str, Any]]) -> Finding:
    """`found`: of each checkpoint the code that decodes it in the engine `graph`, its dtype, and why none faster."""
    groups: dict[str, list[str]] = {}
    for source, by in found.items():
        text = f"{by['code']} in {by['dtype']}" if by["code"] else "nothing"
        groups.setdefault(text + (f" ({by['why']})" if by["why"] else ""), []).append(source)
    text = "; ".join(f"{_names(sources)}: {by}" for by, sources in groups.items())
    if any(by["code"] is None for by in found.values()):
        return Finding("fail", text, ASK)
    if any(by["why"] for by in found.values()):
        return Finding("warn", text, "tokens are right, and it decodes slower than others; the page of a run says so")
    return Finding("pass", text)

"""Collapsed acceptance: drafts that are hardly accepted, or clearly less than elsewhere, with the likely cause.

An engine that misreads a draft, or computes it in another type, still gives the target's tokens; it only gains less.
Known cases in vLLM: float16 (issue 55250), a length of exactly 1.0 (49133), a cache in fp8 (55557).
"""

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any

from mtbench import statistics
from mtbench.decoding.arms import is_ours, is_served
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS
from mtbench.document.formatting import listed
from mtbench.errors import UserError
from mtbench.files import read_bytes
from mtbench.lineup.lineup import is_untrained
from mtbench.models import gguf
from mtbench.models.checkpoint_files import CONFIG, stored_shapes
from mtbench.models.drafts.loading import recognised
from mtbench.models.families import locate
from mtbench.options.engine_options import ServerOption
from mtbench.plan.plan import Cell
from mtbench.plan.prompts import RAW_PROMPTS
from mtbench.results.figure_formats import Cause, Collapse
from mtbench.results.samples import CellData

HARDLY = 1.02  # tokens per forward, up to which drafts do not help
TOKENS_NEEDED = 100  # to say so
# Upper bounds of the ratio of two arms' tokens per forward, below which one accepts less. Engines differ in where they
# draft and in how they count an answer's end.
SAME_ENGINE, OTHER_ENGINE = 0.98, 0.9
HALF = ("float16", "bfloat16")
OPTIONS: Mapping[Cause, str] = {"cache type": "cache", "dtype": "dtype", "engine option": ""}  # in an option's name
DRAFTS = attrgetter("method", "options", "checkpoints")  # cells alike in these have the same drafts
SERVER = attrgetter("engine", "engine_options")

Counts = dict[int, tuple[int, int]]  # tokens and forwards by unit of blocks


def find(data: CellData, group: Iterable[CellData], dtype: str | None) -> Collapse | None:
    """Return how the acceptance of a cell has collapsed; None: it has not, or it is not known.

    group: the cells on the same prompts. dtype: of the run. Drafts copied from the text are often rejected, and each
    engine copies others.
    """
    cell, counts = data.cell, _counts(data)
    if is_untrained(METHODS[cell.method]) or cell.simulated is not None or data.error or not counts:
        return None
    value, twins = _per_forward(counts), [d for d in group if DRAFTS(d.cell) == DRAFTS(cell)]
    twins.sort(key=lambda twin: (twin.cell.engine != cell.engine, len(_changed(cell, twin.cell))))
    better = next((twin for twin in twins if SERVER(twin.cell) != SERVER(cell) and _accepts_less(data, twin)), None)
    how = hardly(cell.built, value, data.tokens)
    if better is not None:
        numbers = f"{value:.2f} and {_per_forward(_counts(better)):.2f} tokens per forward"
        how = f"its drafts are accepted less than those of {better.cell.arm} ({numbers})"
    if how is None:
        return None
    cause, words = _cause(cell, better, dtype)
    return Collapse(cause=cause, text=f"{how}; {'cause' if cause == 'unknown' else 'likely cause:'} {cause}: {words}")


def hardly(method: Method, tokens_per_forward: float, tokens: int) -> str | None:
    """Return that an arm's drafts are hardly ever accepted; None: they are, or it need not verify drafts."""
    if is_untrained(type(method)) or method.claims == "lossy" or tokens < TOKENS_NEEDED or tokens_per_forward > HARDLY:
        return None
    if not isinstance(type(method).claims, str) and not method.variants[-1].window().drafts:
        return None  # no draft model, and its options decide whether it is lossless: a threshold that accepts nothing
    return f"its drafts are hardly ever accepted ({tokens_per_forward:.2f} tokens per forward)"


def _counts(data: CellData) -> Counts:
    """Return an arm's tokens and forwards. A server's prefill gives a token, so it is left out. Empty: hidden."""
    prefill, found = int(is_served(data.cell.engine)), Counts()
    for line in data.lines.values():
        if line.forwards is None:
            return {}
        tokens, forwards = found.get(unit := data.unit_of[line.block], (0, 0))
        found[unit] = tokens + len(line.token_ids) - prefill, forwards + line.forwards - prefill
    return {unit: both for unit, both in found.items() if min(both) > 0}


def _per_forward(counts: Counts) -> float:
    return sum(tokens for tokens, _ in counts.values()) / sum(forwards for _, forwards in counts.values())


def _accepts_less(data: CellData, twin: CellData) -> bool:
    """Return whether an arm has clearly fewer tokens per forward than its twin, on the blocks of both."""
    ours, theirs = _counts(data), _counts(twin)
    both = [unit for unit in ours if unit in theirs]
    here, there = (list(zip(*(counts[unit] for unit in both), strict=True)) for counts in (ours, theirs))
    high = statistics.ratio_of_totals([here[0], there[1]], [here[1], there[0]]).ci_high if both else None
    return high is not None and high < (SAME_ENGINE if twin.cell.engine == data.cell.engine else OTHER_ENGINE)


def _changed(cell: Cell, other: Cell) -> list[ServerOption]:
    """Return the options of a cell's server that may change tokens, and that another cell does not have."""
    return [option for option in cell.other_tokens if option not in other.engine_options]


def _cause(cell: Cell, better: CellData | None, dtype: str | None) -> tuple[Cause, str]:
    """Return the likely cause by the first evidence, and the evidence in words."""
    changed = [] if better is None else _changed(cell, better.cell)
    for kind, word in OPTIONS.items():
        if options := [option for option in changed if word in option.name]:
            return kind, listed(options)
    drafts = {source: _config(source) for role, source in cell.checkpoints.items() if role != cell.on}
    for stored in (draft.get("dtype", draft.get("torch_dtype")) for draft in drafts.values()):
        if dtype in HALF and stored not in (None, dtype):
            return "dtype", f"the draft is stored in {stored}, and decodes in {dtype}"
    if RAW_PROMPTS in cell.flags:
        return "template", RAW_PROMPTS
    for source, draft in drafts.items():
        with suppress(AttributeError, TypeError, ValueError, OSError, UserError):  # config.json may hold anything
            if found := _contradiction(source, draft, cell.checkpoints[cell.on]):
                return found
    return "unknown", advice(cell.engine, compared=better is not None and is_ours(better.cell.engine))


def advice(engine: str | None, *, compared: bool = False) -> str:
    """Return how to find an unknown cause. compared: mtbench's own loop has the same drafts."""
    if not is_served(engine):
        return "check that the draft was trained for this target"
    return (
        f"see `mtbench ls engines {engine}`"
        if compared
        else f"compare with `mtbench run --engine graph --engine {engine}`"
    )


def _config(source: str) -> dict[str, Any]:
    """Return a checkpoint's config.json; {} if it is not a folder here."""
    with suppress(OSError, ValueError, UserError):
        return {} if gguf.is_gguf(source) else dict(json.loads(read_bytes(Path(locate(source)) / CONFIG)))
    return {}


def _contradiction(source: str, draft: Mapping[str, Any], target: str) -> tuple[Cause, str] | None:
    """Return how a draft's config.json contradicts its target, or the draft's own head.

    Other sizes are no evidence: an engine refuses them, but for rows of padding, which differ within a family.
    """
    verifier = draft.get("speculators_config", {}).get("verifier", {}).get("name_or_path")  # of speculators
    if verifier and Path(verifier).name.lower() != Path(target).name.lower():
        return "draft of another target", f"the draft's config.json names {verifier}"
    tied = draft.get("tie_word_embeddings")
    if tied is None or recognised(draft) is not None:  # the head of a feature draft may be the target's
        return None
    if (has_head := "lm_head.weight" in stored_shapes(Path(locate(source)))) != tied:
        return None
    words = f"its config.json has tie_word_embeddings={str(tied).lower()}"
    return "head not tied", f"{words}, and its files {'a' if has_head else 'no'} head"

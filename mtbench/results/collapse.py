"""Collapsed acceptance: drafts that are hardly accepted, or clearly less than elsewhere.

An engine that misreads a draft, or computes it in another type, still gives the target's tokens; it only gains less.
Known cases in vLLM: float16 (issue 55250), a length of exactly 1.0 (49133), a cache in fp8 (55557).
"""

from collections.abc import Iterable
from operator import attrgetter

from mtbench import statistics
from mtbench.decoding.arms import is_served
from mtbench.decoding.method import Method
from mtbench.decoding.registry import METHODS
from mtbench.lineup.lineup import is_untrained
from mtbench.results.samples import CellData

HARDLY = 1.02  # tokens per forward, up to which drafts do not help
TOKENS_NEEDED = 100  # to say so
# Upper bounds of the ratio of two arms' tokens per forward, below which one accepts less. Engines differ in where they
# draft and in how they count an answer's end.
SAME_ENGINE, OTHER_ENGINE = 0.98, 0.9
DRAFTS = attrgetter("method", "options", "checkpoints")  # cells alike in these have the same drafts
SERVER = attrgetter("engine", "engine_options")

Counts = dict[int, tuple[int, int]]  # tokens and forwards by unit of blocks


def find(data: CellData, group: Iterable[CellData]) -> str | None:
    """Return how the acceptance of a cell has collapsed; None: it has not, or it is not known.

    group: the cells on the same prompts. Drafts copied from the text are often rejected, and each engine copies others.
    """
    cell, counts = data.cell, _counts(data)
    if is_untrained(METHODS[cell.method]) or cell.simulated is not None or data.error or not counts:
        return None
    value = _per_forward(counts)
    twins = [d for d in group if DRAFTS(d.cell) == DRAFTS(cell) and SERVER(d.cell) != SERVER(cell)]
    twins.sort(key=lambda twin: twin.cell.engine != cell.engine)
    better = next((twin for twin in twins if _accepts_less(data, twin)), None)
    if better is None:
        return hardly(cell.built, value, data.tokens)
    numbers = f"{value:.2f} and {_per_forward(_counts(better)):.2f} tokens per forward"
    return f"its drafts are accepted less than those of {better.cell.arm} ({numbers})"


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

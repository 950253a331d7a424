"""Acceptance, from the tokens that each forward committed: by our definition and as vLLM counts.

Of the n tokens that a forward commits, the first is the target's own and n − 1 are accepted guesses. A forward that
commits nothing (a block that is not yet full, a row that waits) verifies nothing, so it is not a step of a
draft-and-verify engine. The stored answers are cut at the end token and at the budget. vLLM also counts the tokens
that the last forward accepted behind them (vllm issue 56101), so its figure is larger.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mtbench import statistics
from mtbench.decoding.arms import is_served
from mtbench.document.formatting import bounds
from mtbench.models.thinking import Thinking
from mtbench.plan.formats import TimingLine
from mtbench.results.figure_formats import AcceptanceFigures, AcceptancePart, Estimate
from mtbench.results.parts import context_part
from mtbench.results.samples import CellData, add
from mtbench.statistics import Ratio

Commits = Sequence[Sequence[int]]  # per answer, the tokens that each of its forwards committed

TOTALS = "the engine's totals, over all its clients"  # who counted, if the engine reports nothing per request


def of_cell(data: CellData) -> AcceptanceFigures | None:
    """Return a cell's `acceptance`; None if the engine exposes neither commits nor acceptance."""
    commits = [line.commits for line in data.lines.values() if line.commits is not None]
    if not commits or len(commits) < len(data.lines):
        told = ((t.block, add((t.accepted, _drafts(t))), _drafts(t)) for t in data.timings if t.round == 1)
        found = reported(data.timings)
        return found and found.changed(length_ci=bounds(_length(data, told)))
    offered, lines = data.counted("drafted"), data.lines.values()
    counts = ((line.block, sum(of), len(_steps([of]))) for line, of in zip(lines, commits, strict=True))
    return AcceptanceFigures(
        length=length(commits),
        length_ci=bounds(_length(data, counts)),
        rate=rate(commits, offered),
        per_position=per_position(commits),
        offered=offered,
        vllm=None if offered == 0 else length(_uncut(commits, [line.surplus or 0 for line in lines])),
    )


def reported(timings: Sequence[TimingLine]) -> AcceptanceFigures | None:
    """Return the acceptance by an engine's own count in round 1: `accepted` of `drafted` tokens in `drafts`."""
    first = [t for t in timings if t.round == 1]
    accepted, drafted, drafts = (add(map(of, first)) for of in (lambda t: t.accepted, lambda t: t.drafted, _drafts))
    if not first or accepted is None or drafts is None:
        return None
    per_draft = 1 + accepted / drafts if drafts else None
    return AcceptanceFigures(
        length=per_draft,
        rate=accepted / drafted if drafted else None,
        per_position=_at_least([t.histogram for t in first]),
        offered=drafted,
        reported_by=first[0].reported_by or TOTALS,
        vllm=per_draft,
    )


def _drafts(block: TimingLine) -> int | None:
    """Return how often an engine drafted in a block; if it does not say, its forwards after the prefills, as ours."""
    if block.drafts is not None or block.row_forwards is None or block.drafted is None:
        return block.drafts
    return block.row_forwards - block.items if block.drafted else 0


def accepted_and_offered(data: CellData) -> tuple[list[int], list[int]] | None:
    """Return a cell's accepted guesses and the offered ones per unit of blocks; None if they are not known."""
    lines = data.lines.values()
    counts = [(t.block, t.accepted, t.drafted) for t in data.timings if t.round == 1]
    if all(line.commits is not None for line in lines):
        counts = [(line.block, sum(step - 1 for step in _steps([line.commits or ()])), line.drafted) for line in lines]
    return data.sums(counts)


def _length(data: CellData, counts: Iterable[tuple[int, int | None, int | None]]) -> Ratio:
    """Return tokens over forwards that committed any, over the units that have some. counts: block, and these two."""
    tokens, forwards = data.sums(count for count in counts if count[2] != 0) or ((), ())
    return statistics.ratio_of_totals([tokens], [forwards])


def divided(data: CellData, thinking: Thinking | None) -> dict[str, list[AcceptancePart]]:
    """Return the acceptance by context, category and thinking of a cell that drafts, where it has several parts.

    The context of a forward is the prompt and the answer before it. Where an engine counts the forwards of a request
    only, it is the prompt, and each forward has their mean; its prefill, which gives a token, does not count.
    """
    cell, prefill = data.cell, int(is_served(data.cell.engine))
    if cell.is_reference or cell.alternative or data.counted("drafted") == 0 or data.counted("forwards") is None:
        return {}
    sizes = defaultdict[tuple[str, int, str], dict[str, list[float]]](dict)  # of each forward, by part and item
    for line in data.lines.values():
        count = (line.forwards or prefill) - prefill
        commits: Sequence[float] = line.commits or [(len(line.token_ids) - prefill) / (count or 1)] * count
        thought = thinking.places(line.token_ids) if thinking and line.commits else set()
        for at, size in zip(itertools.accumulate(commits, initial=0), commits, strict=False):
            context = context_part(line.prompt_tokens + (int(at) if line.commits else 0))
            thinks, task = (0, "thinking") if at in thought else (1, "answer"), line.item.partition("/")[0]
            parts = ("context", len(context), context), ("category", 0, task), ("thinking", *thinks)
            for part in parts if size else ():
                sizes[part].setdefault(line.item, []).append(size)
    found = defaultdict[str, list[AcceptancePart]](list)
    for (division, _, name), of in sorted(sizes.items()):  # a longer context has a longer name, or a later one
        counts = [(data.lines[item].block, round(sum(own)), len(own)) for item, own in of.items()]
        length_, forwards = Estimate.of(_length(data, counts)), sum(count for *_, count in counts)
        found[division].append(AcceptancePart(**dict(length_), part=name, answers=len(of), forwards=forwards))
    return {division: parts for division, parts in found.items() if len(parts) > 1}


def _at_least(histograms: Sequence[Sequence[int] | None]) -> list[float] | None:
    """Return, for n = 1, 2, …, the share of drafts of which at least n tokens were accepted; None if one is missing.

    Entry n of a histogram counts the drafts of which exactly n tokens were accepted.
    """
    known = [histogram for histogram in histograms if histogram is not None]
    steps = [sum(column) for column in itertools.zip_longest(*known, fillvalue=0)]
    if len(known) < len(histograms) or not sum(steps):
        return None
    most = max(n for n, count in enumerate(steps) if count)
    return [sum(steps[n:]) / sum(steps) for n in range(1, most + 1)]


def length(commits: Commits) -> float | None:
    """Return the acceptance length: tokens per forward that committed any. Tokens per forward counts all forwards."""
    steps = _steps(commits)
    return sum(steps) / len(steps) if steps else None


def rate(commits: Commits, offered: int | None) -> float | None:
    """Return accepted guesses over offered guesses; None if none were offered, or if the number is not stored."""
    return sum(step - 1 for step in _steps(commits)) / offered if offered else None


def per_position(commits: Commits) -> list[float]:
    """Return, for n = 1, 2, …, the share of committing forwards that accepted at least n guesses.

    1 plus the sum of the shares is `length`. vLLM's per-position acceptance rate (vllm/v1/spec_decode/metrics.py) is
    the same: it is not conditional on the previous guess.
    """
    steps = _steps(commits)
    return [sum(step > n for step in steps) / len(steps) for n in range(1, max(steps, default=0))]


def histogram(commits: Commits) -> dict[str, int]:
    """Return the number of forwards for each number of committed tokens, zeros included."""
    forwards = Counter(itertools.chain.from_iterable(commits))
    return {str(size): forwards[size] for size in sorted(forwards)}


def _uncut(commits: Commits, surplus: Sequence[int]) -> list[list[int]]:
    """Return the commits with the tokens that each answer's last forward accepted beyond those kept."""
    return [[*of[:-1], *(last + more for last in of[-1:])] for of, more in zip(commits, surplus, strict=True)]


def _steps(commits: Commits) -> list[int]:
    return [step for step in itertools.chain.from_iterable(commits) if step]

"""Acceptance, from the tokens that each forward committed: by our definition and by other projects' formulas.

Of the n tokens that a forward commits, the first is the target's own and n − 1 are accepted guesses. A forward that
commits nothing (a block that is not yet full, a row that waits) verifies nothing, so it is not a step of a
draft-and-verify engine. The stored answers are cut at the end token and at the budget. A project that also counts
the last forward's tokens behind them gets a larger figure (vllm issue 56101); its figures here count them, too. Our
prefill commits nothing. An engine's prefill emits a token; formulas that count this token add one per answer.

The formulas were read in their owners' code or documentation in November 2026. Compare a figure only with figures of
the same owner.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mtbench import statistics
from mtbench.decoding.arms import is_served
from mtbench.decoding.output import FinishReason
from mtbench.models.thinking import Thinking
from mtbench.plan.formats import TimingLine
from mtbench.results.comparisons import bounds
from mtbench.results.figure_formats import AcceptanceFigures, AcceptancePart, DerivedAcceptance, Estimate
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
    finish, surplus = [line.finish_reason for line in lines], [line.surplus or 0 for line in lines]
    counts = ((line.block, sum(of), len(_steps([of]))) for line, of in zip(lines, commits, strict=True))
    first = {t.block: t.batch_forwards for t in data.timings if t.round == 1}
    batch_forwards = add(first.get(block) for block in {line.block for line in lines})  # None if one is missing
    return AcceptanceFigures(
        length=length(commits),
        length_ci=bounds(_length(data, counts)),
        rate=rate(commits, offered),
        per_position=per_position(commits),
        offered=offered,
        derived=derived(commits, offered, batch_forwards, finish, surplus),
    )


def reported(timings: Sequence[TimingLine]) -> AcceptanceFigures | None:
    """Return the acceptance by an engine's own count in round 1: `accepted` of `drafted` tokens in `drafts`.

    Of the owners' figures, only those defined by these three counts are known.
    """
    first = [t for t in timings if t.round == 1]
    accepted, drafted, drafts = (add(map(of, first)) for of in (lambda t: t.accepted, lambda t: t.drafted, _drafts))
    if not first or accepted is None or drafts is None:
        return None
    per_draft = 1 + accepted / drafts if drafts else None
    hidden: dict[str, float | None] = dict.fromkeys(DerivedAcceptance.model_fields)
    return AcceptanceFigures(
        length=per_draft,
        rate=accepted / drafted if drafted else None,
        per_position=_at_least([t.histogram for t in first]),
        offered=drafted,
        reported_by=first[0].reported_by or TOTALS,
        derived=DerivedAcceptance(**{**hidden, "vllm": per_draft}),
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
    return _mean(_steps(commits))


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


def derived(
    commits: Commits,
    offered: int | None,
    batch_forwards: int | None,
    finish: Sequence[FinishReason],
    surplus: Sequence[int],
) -> DerivedAcceptance:
    """Return the figure of every owner.

    offered: guesses, or None if the number is not stored; batch_forwards: forwards of the batches with the answers;
    finish, surplus: per answer, why it ended, and the tokens that its last forward accepted after its end.

    vLLM (v1/core/sched/scheduler.py, v1/spec_decode/metrics.py): 1 + accepted tokens / drafts, over all requests,
    before it cuts an answer. aiperf's token-weighted figure is the same. A draft is a proposal that was verified: here
    a forward that committed. vLLM leaves out steps without a proposal. Which steps those were is not stored, so they
    count as drafts without an accepted token, and the figure is at most vLLM's.
    DeepSpec (deepspec/eval/base_evaluator.py, arXiv 2607.05147): the same, but an accepted end token ends the count.
    """
    drafts = offered != 0  # without drafts the owners that count drafts have no figure
    uncut = _uncut(commits, surplus)
    past_budget = [n if why == "length" else 0 for n, why in zip(surplus, finish, strict=True)]
    return DerivedAcceptance(
        vllm=length(uncut) if drafts else None,
        deepspec=length(_uncut(commits, past_budget)) if drafts else None,
        sglang=sglang(commits),
        specdec_bench=specdec_bench(commits, [why == "end" for why in finish]),
        spec_bench=all_steps(commits),
        aiperf=aiperf(uncut) if drafts else None,
        mars=all_steps(commits),
        mars_cached=mars_cached(commits, batch_forwards),
    )


def sglang(commits: Commits) -> float | None:
    """SGLang, SpecForge (benchmarks/benchmarker/utils.py): sum of completion_tokens / sum of spec_verify_ct.

    A verification is a forward of ours. The token that a request's prefill emits is a completion token without a
    verification, so one is added per answer.
    """
    forwards = sum(map(len, commits))
    return (sum(map(sum, commits)) + len(commits)) / forwards if forwards else None


def specdec_bench(commits: Commits, ended: Sequence[bool]) -> float | None:
    """specdec_bench (Model-Optimizer, metrics/acceptance_rate.py, `Average_AL`): mean over turns of mean chunk length.

    A turn is an answer. A chunk is what a step streams: the tokens that a forward committed, if any. Prefill emits one
    token first, so one chunk of 1 is added per answer. The owner's adapter takes the end token off the last chunk, and
    drops a chunk that becomes empty.
    """
    turns = []
    for answer, has_end in zip(commits, ended, strict=True):
        chunks = [1, *_steps([answer])]
        if has_end:
            chunks[-1] -= 1
        turns.append(_mean([chunk for chunk in chunks if chunk]))
    return _mean(turns)


def aiperf(commits: Commits) -> float | None:
    """aiperf (docs/metrics-reference.md, Acceptance Length): 1 + accepted / steps of each request, mean over requests.

    A request is an answer (of each turn), a step a forward that committed.
    """
    return _mean([length([answer]) for answer in commits])


def all_steps(commits: Commits) -> float | None:
    """Return all tokens / all forwards, zeros included: two owners' figure.

    Spec-Bench (evaluation/eval.py and speed.py, `#Mean accepted tokens`): mean of all steps of all questions. Most
    methods there, such as EAGLE, store the tokens that a step added to the answer. The token sampled by prefill belongs
    to the first step.
    MARS (arXiv 2604.07023, mars/samplers/mars_sampler.py), Fast-dLLM: with one answer a batch. Their first forward
    contains the prompt and commits. Our first counted forward follows the prefill and commits too. MARS also counts
    tokens accepted after the end token. Fast-dLLM prints tokens and NFE, but not their ratio.
    """
    return _mean(list(itertools.chain.from_iterable(commits)))


def mars_cached(commits: Commits, batch_forwards: int | None) -> float | None:
    """MARS, cached samplers (mars/samplers/mars_cached_sampler.py): a whole batch's tokens / the batch's forwards.

    At batch size R this is up to R times the tokens that a forward of a row commits.
    """
    return sum(map(sum, commits)) / batch_forwards if batch_forwards else None


def _uncut(commits: Commits, surplus: Sequence[int]) -> list[list[int]]:
    """Return the commits with the tokens that each answer's last forward accepted beyond those kept."""
    return [[*of[:-1], *(last + more for last in of[-1:])] for of, more in zip(commits, surplus, strict=True)]


def _steps(commits: Commits) -> list[int]:
    """Return the tokens of each forward that committed any."""
    return [step for step in itertools.chain.from_iterable(commits) if step]


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

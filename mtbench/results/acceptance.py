"""How much was accepted, in the field's words, from what each forward committed: ours, and others' under their names.

Of the n tokens that a forward commits, the first is the model's own and n − 1 are accepted guesses. A forward that
commits nothing (a block not yet full, a row that waits) judges nothing, so it is no step of a draft-and-verify engine.
Every figure is of answers as they are kept, cut at the end token; who counts what was accepted behind it comes out
higher (vllm issue 56101). Our prefill commits nothing; an engine's emits a token, which the formulas of those who
count it add, one an answer.

The owners' formulas were read in their code, or documentation, in November 2026. None is ours: compare a figure with
those of its owner only.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from mtbench.results.samples import Measured, add
from mtbench.runs.directory import Record

Commits = Sequence[Sequence[int]]  # of each answer, the tokens that each of its forwards committed

OWNERS = {  # key in results.json -> whose figure it is, and what it is
    "vllm": ("vLLM", "1 + accepted / drafts"),
    "sglang": ("SGLang, SpecForge", "(tokens + 1 for each answer's prefill) / verifications"),
    "specdec_bench": ("specdec_bench", "mean over answers of their mean chunk, prefill's chunk of 1 included"),
    "spec_bench": ("Spec-Bench", "mean of all steps of all answers"),
    "aiperf": ("aiperf", "1 + accepted / steps of each answer, mean over answers"),
    "aiperf_token_weighted": ("aiperf, token-weighted", "1 + all accepted / all steps"),
    "mars": ("MARS, Fast-dLLM", "all tokens / all forwards of rows"),
    "mars_cached": ("MARS, cached samplers", "a batch's tokens / the batch's forwards"),
}


def of_cell(one: Measured) -> Record | None:
    """A cell's `acceptance`; None where an engine hides its commits and reports no acceptance either."""
    lines = list(one.lines.values())
    if not lines or any(line["commits"] is None for line in lines):
        return reported(one.timings)
    commits = [line["commits"] for line in lines]
    offered = one.counted("drafted")
    return {
        "length": length(commits),
        "rate": rate(commits, offered),
        "per_position": per_position(commits),
        "offered": offered,
        "derived": derived(commits, offered, _batch_forwards(one)),
    }


def reported(timings: Sequence[Mapping[str, Any]]) -> Record | None:
    """What an engine that hides its commits says of its acceptance, in round 1: `accepted` of `drafted` in `drafts`.

    Of the owners' figures, those made of these very terms are its own; the others are null.
    """
    first = [t for t in timings if t["round"] == 1]
    accepted, drafted, drafts = (add(t.get(name) for t in first) for name in ("accepted", "drafted", "drafts"))
    if not first or accepted is None or drafted is None or drafts is None:
        return None
    mean = 1 + accepted / drafts if drafts else None
    return {
        "length": mean,
        "rate": accepted / drafted if drafted else None,
        "per_position": None,
        "offered": drafted,
        "derived": dict.fromkeys(OWNERS) | {"vllm": mean, "aiperf_token_weighted": mean},
    }


def length(commits: Commits) -> float | None:
    """Acceptance length: tokens per forward that committed any. (Tokens per forward counts the others too.)"""
    return _mean(_steps(commits))


def rate(commits: Commits, offered: int | None) -> float | None:
    """Acceptance rate: accepted guesses over those offered. None where nothing was, or where that is not stored."""
    return sum(step - 1 for step in _steps(commits)) / offered if offered else None


def per_position(commits: Commits) -> list[float]:
    """Share of the forwards that accepted a first guess, a first and a second, …; with 1 they add up to `length`.

    It is vLLM's per-position acceptance rate (vllm/v1/spec_decode/metrics.py) too: not conditional on the guess before.
    """
    steps = _steps(commits)
    return [sum(step > d for step in steps) / len(steps) for d in range(1, max(steps, default=0))]


def histogram(commits: Commits) -> dict[str, int]:
    """Tokens committed by a forward -> how many forwards; zeros included."""
    counted = Counter(itertools.chain.from_iterable(commits))
    return {str(size): counted[size] for size in sorted(counted)}


def derived(commits: Commits, offered: int | None, batch_forwards: int | None) -> dict[str, float | None]:
    """Everyone's figure, by owner.

    offered: guesses, or None where that is not stored; batch_forwards: forwards of the batches that held the answers.
    """
    return {
        "vllm": vllm(commits) if offered != 0 else None,
        "sglang": sglang(commits),
        "specdec_bench": specdec_bench(commits),
        "spec_bench": spec_bench(commits),
        "aiperf": aiperf(commits) if offered != 0 else None,
        "aiperf_token_weighted": aiperf_token_weighted(commits) if offered != 0 else None,
        "mars": mars(commits),
        "mars_cached": mars_cached(commits, batch_forwards),
    }


def vllm(commits: Commits) -> float | None:
    """vLLM (v1/spec_decode/metrics.py, `vllm bench serve`): 1 + accepted tokens / drafts, over all requests.

    A draft is a proposal that was verified: here a forward that committed. vLLM leaves out steps with nothing proposed
    (an n-gram without a match); we do not know which those were, so they count as drafts of which nothing was accepted,
    and the figure is at most vLLM's. It has none where nothing is ever offered.
    """
    steps = _steps(commits)
    return 1 + sum(step - 1 for step in steps) / len(steps) if steps else None


def sglang(commits: Commits) -> float | None:
    """SGLang, SpecForge (benchmarks/benchmarker/utils.py): sum of completion_tokens / sum of spec_verify_ct.

    A verification is a forward of ours. The token that a request's prefill emits is a completion token without a
    verification, so one is added for each answer.
    """
    forwards = sum(map(len, commits))
    return (sum(map(sum, commits)) + len(commits)) / forwards if forwards else None


def specdec_bench(commits: Commits) -> float | None:
    """specdec_bench (Model-Optimizer, metrics/acceptance_rate.py, `Average_AL`): mean over turns of mean chunk length.

    A turn is an answer, a chunk what a step streams: what a forward committed, if anything, and in front of them the
    one token that prefill emits, so one chunk of 1 is added for each answer. (It takes the end token off the last.)
    """
    return _mean([_mean([1, *_steps([answer])]) for answer in commits])


def spec_bench(commits: Commits) -> float | None:
    """Spec-Bench (evaluation/eval.py and speed.py, `#Mean accepted tokens`): mean of all steps of all questions.

    Each of its methods fills the list as it likes; most, as EAGLE, with what a step added to the answer, which is what
    a forward of ours committed, zeros included. What prefill samples is part of the first step's.
    """
    return _mean(list(itertools.chain.from_iterable(commits)))


def aiperf(commits: Commits) -> float | None:
    """aiperf (docs/metrics-reference.md, Acceptance Length): 1 + accepted / steps of each request, mean over requests.

    A request is an answer (of each turn), a step a forward that committed.
    """
    return _mean([length([answer]) for answer in commits])


def aiperf_token_weighted(commits: Commits) -> float | None:
    """aiperf (the same, Token-Weighted Acceptance Length): 1 + all accepted / all steps, so every step weighs alike."""
    return vllm(commits)


def mars(commits: Commits) -> float | None:
    """MARS (arXiv 2604.07023, mars/samplers/mars_sampler.py), Fast-dLLM: all tokens / all forwards, one answer a batch.

    Its first forward holds the prompt and commits, as our first one does behind a prefill that is not counted. MARS
    keeps what was accepted behind the end token; Fast-dLLM prints tokens and NFE and never divides them.
    """
    forwards = sum(map(len, commits))
    return sum(map(sum, commits)) / forwards if forwards else None


def mars_cached(commits: Commits, batch_forwards: int | None) -> float | None:
    """MARS, its cached samplers (mars/samplers/mars_cached_sampler.py): a whole batch's tokens / the batch's forwards.

    At batch size R up to R times the tokens that a row's forward commits.
    """
    return sum(map(sum, commits)) / batch_forwards if batch_forwards else None


def _steps(commits: Commits) -> list[int]:
    """What each forward that committed anything committed."""
    return [step for step in itertools.chain.from_iterable(commits) if step]


def _mean(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _batch_forwards(one: Measured) -> int | None:
    """Forwards of round 1's batches, which decoded every answer; None if one of them is missing."""
    first = {t["block"]: t["batch_forwards"] for t in one.timings if t["round"] == 1}
    return add(first.get(block) for block in {line["block"] for line in one.lines.values()})

"""From points and scores to load.json: figures with intervals, and comparisons of arms.

The unit of times and rates is the round: t intervals over rounds (`statistics.ratio_of_totals`). A percentile is the
mean over rounds of the round's percentile. The unit of accuracy is the item; an item that was answered again counts
with its first answer.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import compress

import numpy as np

from mtbench import statistics
from mtbench.decoding.arms import parse_arms
from mtbench.decoding.registry import METHODS
from mtbench.document.formatting import counted
from mtbench.experiments.load.aiperf import FACTS
from mtbench.experiments.load.format import Comparison, Latency, Load, LoadCell, LoadPlan, PointLine, RequestLine
from mtbench.experiments.load.request import Limits
from mtbench.experiments.load.runner import Scores, read_points, read_scores, read_servers
from mtbench.hardware import machine
from mtbench.plan.directory import RunDirectory
from mtbench.plan.formats import Environment
from mtbench.results import collapse, verdicts
from mtbench.results.figure_formats import Estimate, Reason
from mtbench.results.parts import turn_part

CORRECT = 0.5  # least score of an answer that counts as correct
REJECTED_SHARE = 0.01  # more rejected or failed requests than this share are flagged
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Sent:
    """The points of an arm at a level, in the order of the rounds, with their scores."""

    arm: str
    level: float
    points: Sequence[PointLine]
    scores: Scores
    slo: Limits
    method: str | None = None  # with its options, as the plan has it; None: a given server

    @cached_property
    def requests(self) -> list[RequestLine]:
        """All requests."""
        return [line for point in self.points for line in point.requests]

    def of(self, turn: str) -> "Sent":
        """Return the requests of some turns. The energy is that of all turns."""
        kept = {p.point: [turn_part(line.turn) == turn for line in p.requests] for p in self.points}
        points = [p.changed(requests=[*compress(p.requests, kept[p.point])], energy_j=None) for p in self.points]
        scores = {p: [*compress(self.scores[p], kept[p])] for p in kept.keys() & self.scores.keys()}
        return replace(self, points=points, scores=scores)

    def good(self, point: PointLine) -> list[bool]:
        """Return for each request of a round whether it was answered within all limits."""
        return [is_good(line, self.slo) for line in point.requests]

    def good_and_correct(self, point: PointLine) -> int:
        """Return how many requests of a round were answered within all limits and correctly."""
        scores = self.scores[point.point]
        return sum(
            good and score is not None and score >= CORRECT
            for good, score in zip(self.good(point), scores, strict=True)
        )

    @cached_property
    def first_scores(self) -> dict[str, float]:
        """The score of the first answer to each item."""
        scores: dict[str, float] = {}
        for point in self.points:
            for line, score in zip(point.requests, self.scores.get(point.point, ()), strict=False):
                if score is not None:
                    scores.setdefault(line.item, score)
        return scores


def summarise(run: RunDirectory, planned: LoadPlan) -> Load:
    """Return the results of the points that have ended. Raises UserError for a malformed file."""
    points, scores = read_points(run, planned), read_scores(run)
    environment = run.read("environment.json", Environment)
    cells: dict[float, list[Sent]] = {}
    for level in sorted(planned.request.levels):
        for arm in planned.arms:
            of_cell = sorted((p for p in points if (p.arm, p.level) == (arm.name, level)), key=lambda p: p.round)
            if of_cell:
                sent = Sent(arm.name, level, of_cell, scores, planned.request.slo, arm.method)
                cells.setdefault(level, []).append(sent)
    servers = read_servers(run)
    return Load(
        schema_version=3,
        started=environment.started or "",
        complete=len(points) == len(planned.points),
        environment=environment,
        request=planned.request,
        metric=planned.metric,
        unit=planned.unit,
        max_new_tokens=planned.max_new_tokens,
        client=FACTS,
        arms=[servers[arm.name] for arm in planned.arms if arm.name in servers],
        cells=[cell(sent, planned.flags) for at_level in cells.values() for sent in at_level],
        comparisons=[
            comparison
            for at_level in cells.values()
            for place, baseline in enumerate(at_level)
            for comparison in compare(baseline, at_level[place + 1 :], planned.request.max_loss)
        ],
    )


def is_good(line: RequestLine, slo: Limits) -> bool:
    """Return whether a request was answered within all limits, by times that were measured.

    An answer of one token has no time per later token, so it keeps that limit.
    """
    measured = {"ttft": line.ttft_s, "tpot": 0.0 if line.tpot_s is None else line.tpot_s, "e2e": line.e2e_s}
    kept = ((time_s := measured[name]) is not None and time_s <= limit for name, limit in slo.items())
    return line.outcome == "ok" and all(kept)


def cell(sent: Sent, flags: Sequence[str] = (), turn: str | None = None) -> LoadCell:
    """Return the figures of an arm at a level. `flags`: remarks that hold for every arm; `turn`: name of its turns."""
    turns = list(dict.fromkeys(map(turn_part, sorted(line.turn for line in sent.requests))))
    outcomes = Counter(line.outcome for line in sent.requests)
    sizes = {"ok": outcomes["ok"], "rejected": outcomes["rejected"], "failed": outcomes["failed"]}
    scored, answers = bool(sent.points) and all(p.point in sent.scores for p in sent.points), sent.first_scores.values()
    correct = sum(sent.good_and_correct(point) for point in sent.points) if scored else None
    items = {line.item for line in sent.requests if line.outcome == "ok"}
    return LoadCell(
        arm=sent.arm,
        level=sent.level,
        rounds=len(sent.points),
        sent=len(sent.requests),
        **sizes,
        good=sum(sum(sent.good(point)) for point in sent.points),
        good_and_correct=correct,
        achieved_rate=_rate(sent, lambda point: sum(line.outcome == "ok" for line in point.requests)),
        goodput=_rate(sent, lambda point: sum(sent.good(point))),
        correct_goodput=_rate(sent, sent.good_and_correct) if scored else None,
        tokens_per_s=_rate(sent, _tokens),
        ttft=_latency(sent, lambda line: line.ttft_s),
        tpot=_latency(sent, lambda line: line.tpot_s),
        e2e=_latency(sent, lambda line: line.e2e_s),
        accuracy=Estimate.of(statistics.wilson(round(sum(answers)), len(answers))) if scored else None,
        items=len(items),
        tokens_per_forward=_share(sent, lambda line: line.tokens, lambda line: line.forwards),
        j_per_token=_energy(sent),
        flags=[*flags, *_flags(sent, sizes)],
        cached_share=_share(sent, lambda line: line.cached_tokens, lambda line: line.prompt_tokens),
        turn=turn,
        turns=[cell(sent.of(name), turn=name) for name in turns] if len(turns) > 1 else [],
    )


def compare(baseline: Sent, others: Sequence[Sent], max_loss: float) -> list[Comparison]:
    """Return how arms compare with an earlier one at the same level. Verdicts are adjusted for their number."""
    speedups, goodputs, differences, doubts = [], [], [], []
    by_round = {point.round: point for point in baseline.points}
    for arm in others:
        common = [(by_round[point.round], point) for point in arm.points if point.round in by_round]
        shared = [pair for pair in common if not any(map(_throttled, pair))]
        speedups.append(_speedup(shared))
        goodputs.append(_goodput_ratio(baseline, arm, shared))
        changes = statistics.gains_and_losses(arm.first_scores, baseline.first_scores)
        differences.append(statistics.paired_difference(*changes))
        why = machine.THROTTLED if common else "no common round"
        doubts.append(None if shared else Reason(kind="nothing measured", text=why))
    by_speed, by_goodput = (verdicts.speed_verdicts(ratios, doubts) for ratios in (speedups, goodputs))
    by_accuracy = verdicts.accuracy_verdicts(differences, statistics.as_share(max_loss))
    compared = zip(others, speedups, by_speed, goodputs, by_goodput, differences, by_accuracy, strict=True)
    return [
        Comparison(
            level=arm.level,
            baseline=baseline.arm,
            arm=arm.arm,
            speedup=Estimate.of(speedup),
            speed_verdict=faster,
            goodput_ratio=Estimate.of(goodput),
            goodput_verdict=more,
            accuracy_difference=None
            if not difference.n
            else Estimate(value=difference.difference, ci_low=difference.ci_low, ci_high=difference.ci_high),
            accuracy_verdict=better if difference.n else None,
            items=difference.n,
        )
        for arm, speedup, faster, goodput, more, difference, better in compared
    ]


Counted = Callable[[RequestLine], int | None]
SharedRound = tuple[PointLine, PointLine]


def _speedup(shared: Sequence[SharedRound]) -> statistics.Ratio:
    """Return the baseline's time over the arm's, on the requests that both answered."""
    requests = [zip(*(point.requests for point in pair), strict=True) for pair in shared]
    above, below = _sums([(a.e2e_s, b.e2e_s) for a, b in of_round] for of_round in requests)
    return statistics.ratio_of_totals([above], [below], unit="round")


def _sums(rounds: Iterable[Sequence[tuple[float | None, float | None]]]) -> tuple[list[float], list[float]]:
    """Return both sums of each round, over the pairs that are known; a round without any is left out."""
    known = ([(a, b) for a, b in pairs if a is not None and b is not None] for pairs in rounds)
    sums = [(sum(a for a, _ in pairs), sum(b for _, b in pairs)) for pairs in known if pairs]
    return [a for a, _ in sums], [b for _, b in sums]


def _goodput_ratio(baseline: Sent, arm: Sent, shared: Sequence[SharedRound]) -> statistics.Ratio:
    good = [[sum(sent.good(pair[side])) for pair in shared] for side, sent in enumerate((baseline, arm))]
    windows = [[pair[side].window_s for pair in shared] for side in (0, 1)]
    return statistics.ratio_of_totals([good[1], windows[0]], [good[0], windows[1]], unit="round")


def _rate(sent: Sent, amount: Callable[[PointLine], float]) -> Estimate:
    return _ratio([amount(point) for point in sent.points], [point.window_s for point in sent.points])


def _ratio(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return a ratio of totals over rounds. Of nothing it is 0, without an interval."""
    if sum(below) > 0 and sum(above) == 0:
        return Estimate(value=0.0, ci_low=None, ci_high=None)
    return Estimate.of(statistics.ratio_of_totals([above], [below], unit="round"))


def _latency(sent: Sent, value: Callable[[RequestLine], float | None]) -> Latency:
    """Return percentiles of a time: of each round, then their mean."""
    of_rounds = ([v for v in map(value, point.requests) if v is not None] for point in sent.points)
    measured = [values for values in of_rounds if values]
    each = {p: [float(np.percentile(values, p)) for values in measured] for p in PERCENTILES}
    return Latency(**{f"p{p}": _ratio(values, [1.0] * len(values)) for p, values in each.items()})


def _share(sent: Sent, above: Counted, below: Counted) -> Estimate | None:
    """Return a ratio of two counts of answered requests; None if the server does not tell one of them."""
    answered = [[line for line in point.requests if line.outcome == "ok"] for point in sent.points]
    counts = [[(above(line), below(line)) for line in lines] for lines in answered]
    if any(None in pair for pairs in counts for pair in pairs):
        return None
    sums = _sums(counts)
    return _ratio(*sums) if sums[0] else None


def _energy(sent: Sent) -> Estimate | None:
    joules = [point.energy_j for point in sent.points if point.energy_j is not None]
    if len(joules) < len(sent.points):
        return None
    return _ratio(joules, [float(_tokens(point)) for point in sent.points])


def _tokens(point: PointLine) -> int:
    return sum(line.tokens or 0 for line in point.requests)


def _flags(sent: Sent, sizes: Mapping[str, int]) -> list[str]:
    flags = []
    for name in ("rejected", "failed"):
        if sizes[name] > REJECTED_SHARE * len(sent.requests):
            flags.append(f"{sizes[name] / len(sent.requests):.0%} {name}: times are those of the others")
    errors = [line.error for line in sent.requests if line.outcome == "failed" and line.error]
    if errors:
        flags.append(f"first failure: {errors[0]}")
    if warm := sum(bool(line.cached_tokens) and line.turn == 1 for line in sent.requests):
        flags.append(f"the server had cached tokens of {counted(warm, 'first turn')}, by other prompts or sent before")
    if stopped := sum(map(_throttled, sent.points)):
        rounds = counted(len(sent.points), "round")
        flags.append(f"{machine.THROTTLED} in {stopped} of {rounds}; {machine.MORE_QUOTA}")
    if reason := verdicts.too_few(len(sent.points), "round"):
        flags.append(f"no intervals of times: {reason.text}")
    return [*flags, *_collapse(sent)]


def _throttled(point: PointLine) -> bool:
    return (point.throttled_s or 0.0) > machine.THROTTLED_SHARE * point.window_s


def _collapse(sent: Sent) -> list[str]:
    share = _share(sent, lambda line: line.tokens, lambda line: line.forwards)
    if sent.method is None or share is None or not share.value:
        return []
    [arm] = parse_arms([sent.method])
    how = collapse.hardly(METHODS[arm.method](**arm.options), share.value, sum(map(_tokens, sent.points)))
    return [how] if how else []

"""Races of arms whose truth is known, and what the decision makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from made_records import result_cell, speedup

from mtbench import statistics
from mtbench.experiments.choose.race import Block, Outcome, RacedArm, looks, replay
from mtbench.results import verdicts
from mtbench.results.decision import Bounds, Intervals, recommend
from mtbench.results.decision_format import Choice, Recommendation
from mtbench.results.figure_formats import AccuracyComparison, Agreement, Verdict
from mtbench.results.format import ResultCell
from mtbench.statistics import Difference

PLAIN = "plain"
CHECKPOINTS = {"ar": "model"}


@dataclass(frozen=True)
class Truth:
    """What an arm is really like. speed: over plain decoding. loss: of accuracy, in points; None: the same tokens."""

    name: str
    speed: float
    loss: float | None = None


def draw(
    truths: Sequence[Truth],
    blocks: int,
    rows: int,
    rng: np.random.Generator,
    *,
    spread: float = 0.08,
    sizes: float = 0.3,
) -> list[RacedArm]:
    """Return entrants with drawn blocks. Log standard deviations: sizes of blocks, spread of the times of an arm."""
    length = np.exp(rng.normal(0, sizes, blocks))
    right = rng.random((blocks, rows)) < 0.8
    found = []
    for truth in [Truth(PLAIN, 1.0), *truths]:
        wall_s = length / truth.speed * np.exp(rng.normal(0, spread, blocks))
        scores = right
        if truth.loss is not None:
            lost, gained = 0.01 + statistics.as_share(truth.loss), 0.01  # shares of all items
            chance = rng.random((blocks, rows))
            scores = np.where(right, chance >= lost / 0.8, chance < gained / 0.2)
        found.append(
            RacedArm(
                truth.name,
                [
                    Block(
                        float(wall_s[b]),
                        {f"{b}/{row}": float(scores[b, row]) for row in range(rows)},
                        truth.loss is None,
                    )
                    for b in range(blocks)
                ],
                reference=truth.name == PLAIN,
                claims_lossless=truth.loss is None,
            )
        )
    return found


@dataclass
class _Often(Intervals):
    """Bounds that hold however often the race has looked."""

    highest: Mapping[str, float | None]  # speed of each arm over plain decoding

    def bounds(self, cell: ResultCell, other: ResultCell, *, tested: bool = False) -> Bounds:
        return Bounds(None, self.highest[cell.arm])


def decide(entrants: Sequence[RacedArm], max_loss: float) -> tuple[Recommendation, Outcome, int]:
    """Return the recommendation after a race, its outcome, and the blocks that all arms together have decoded."""
    plain = next(e for e in entrants if e.reference)
    at = looks(len(plain.blocks))
    outcome = replay(entrants, at, max_loss)
    left = {gone.cell: gone for gone in outcome.left}
    upto = {e.name: left[e.name].block if e.name in left else at[-1] for e in entrants}
    arms = [e for e in entrants if not e.reference]
    ratios, differences, highest = [], [], dict[str, float | None]()
    number = len(at) + 1
    for arm in arms:
        shared = range(min(upto[arm.name], upto[plain.name]))
        walls = [[e.blocks[b].wall_s or 0.0 for b in shared] for e in (plain, arm)]
        ratios.append(statistics.shared_ratio(*walls, looks=number, among=len(arms)))
        highest[arm.name] = statistics.shared_ratio(*walls, looks=number).ci_high
        pairs = [(arm.blocks[b].scores[i], score) for b in shared for i, score in plain.blocks[b].scores.items()]
        gained, lost = sum(a > p for a, p in pairs), sum(a < p for a, p in pairs)
        differences.append(
            Difference((gained - lost) / len(pairs) if pairs else None, None, None, gained, lost, len(pairs))
        )
    speeds = verdicts.speed_verdicts(ratios, [None] * len(arms), looks=number)
    lossy = [place for place, arm in enumerate(arms) if not arm.claims_lossless]
    words = verdicts.accuracy_words(
        [differences[place] for place in lossy], statistics.as_share(max_loss), looks=number
    )
    word_of = dict(zip(lossy, words, strict=True))
    cells = [result_cell(arm=PLAIN, cell=PLAIN, reference=True, checkpoints=CHECKPOINTS)]
    for place, (arm, ratio, speed) in enumerate(zip(arms, ratios, speeds, strict=True)):
        times = {"value": ratio.value, "ci_low": ratio.ci_low, "ci_high": ratio.ci_high, "verdict": speed}
        difference = differences[place]
        accuracy = AccuracyComparison(
            baseline=PLAIN,
            **difference._asdict(),
            p_mcnemar=None,
            verdict=Verdict(word=word_of.get(place, "not worse")),
        )
        gone, blocks = left.get(arm.name), upto[arm.name]
        cells.append(
            result_cell(
                arm=arm.name,
                cell=arm.name,
                checkpoints=CHECKPOINTS,
                claims="lossless" if arm.claims_lossless else "lossy",
                speedup=[speedup(baseline=PLAIN, **times)],
                accuracy_vs=[accuracy],
                agreement=[Agreement(baseline=PLAIN, items=blocks, identical=blocks if arm.claims_lossless else 0)],
                blocks=blocks,
                left=gone,
            )
        )
    [found] = recommend(cells, max_loss=max_loss, pairs=_Often(highest))
    return found, outcome, sum(upto.values())


def missed_same(found: Recommendation, truths: Sequence[Truth]) -> bool:
    """Return whether an arm with the same tokens is over 2 % faster than the one to use, and the decision hides it."""
    speeds = {truth.name: truth.speed for truth in truths if truth.loss is None}
    return _missed(speeds, found.same_tokens, found)


def missed_any(found: Recommendation, truths: Sequence[Truth], max_loss: float) -> bool:
    """Return the same for all arms that may be used."""
    speeds = {t.name: t.speed for t in truths if t.loss is None or t.loss < max_loss}
    return _missed(speeds, found.within_loss or found.same_tokens, found)


def chosen_is_behind(found: Recommendation, truths: Sequence[Truth], max_loss: float) -> bool:
    """Return whether an arm that may be used is over 2 % faster than the one to use, whatever else is named."""
    speeds = {t.name: t.speed for t in truths if t.loss is None or t.loss < max_loss}
    return max([1.0, *speeds.values()]) > 1.02 * _reached(speeds, found.within_loss or found.same_tokens)


def wrongly_kept(found: Recommendation, truths: Sequence[Truth], max_loss: float) -> bool:
    """Return whether an arm is said to lose no more than accepted, and loses more."""
    losses = {truth.name: truth.loss or 0.0 for truth in truths}
    return found.within_loss is not None and losses[found.within_loss.arm] >= max_loss


def _missed(speeds: Mapping[str, float], chosen: Choice | None, found: Recommendation) -> bool:
    reached = _reached(speeds, chosen)
    named = {*found.as_good, *found.also_open, found.undecided.arm if found.undecided else ""}
    faster = [arm for arm, speed in speeds.items() if speed > 1.02 * reached]
    return bool(faster) and max(faster, key=lambda arm: speeds[arm]) not in named


def _reached(speeds: Mapping[str, float], chosen: Choice | None) -> float:
    """Return the speed of what is used: plain decoding, where nothing is chosen."""
    return 1.0 if chosen is None else speeds.get(chosen.arm, 1.0)

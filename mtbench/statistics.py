"""The numbers behind every claim: ratios of totals, accuracies, their intervals, and the words they allow.

A rate or a ratio is a ratio of totals. Its interval is a t interval on the log scale over K units (linearised,
as for ratio estimators in survey sampling: Cochran 1977, chapter 6): a percentile bootstrap over few blocks covers
far less than it says. Where blocks are very uneven (log standard deviation 0.7, noise 0.2) a 95 % interval covers
91 % at K = 6. `inconclusive` is a result: nothing is called faster, same or not worse without its interval.

Each word is a one-sided test, the one its interval inverts: a 95 % bound tests at 2.5 %, a 90 % bound at 5 %, and
`same` is two tests at 5 % (Schuirmann 1987). Among many arms each word's p-values, one per arm, are adjusted by Holm
1979 and compared with that same level, so the chance that any arm wrongly gets a word is that of one arm alone, and
one arm alone gets exactly the word its intervals give. The intervals stay pointwise. Arms without a test do not
count.

What cannot be had is None, never NaN. scipy is imported where a distribution is asked for: definitions need none.
"""

import math
from collections.abc import Mapping, Sequence
from hashlib import sha256
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Unit = Literal["block", "item", "round", "session"]

UNITS_NEEDED: dict[Unit, int] = {"block": 6, "item": 6, "round": 5, "session": 5}
BLOCKS_TO_PUBLISH = 16
WINDOW_NEEDED_S = 1.0
WINDOW_NEEDED_SYNCHRONISATIONS = 10
SAMPLES_NEEDED_SHARE = 0.8
SEEDS_NEEDED, SEEDS_TO_PUBLISH = 3, 5

SPEED_MARGIN = 0.02
ACCURACY_MARGIN = 0.02
LENGTH_RATIO_SHOWN_BEYOND = 0.01
LENGTH_RATIO_RANGE = (0.9, 1.1)
BUDGET_CUT_SHARE = 0.05

EXACT_EPSILON = {"float64": 1e-9, "float32": 1e-4}
EPSILON_POSITIONS_NEEDED = 2000
EPSILON_CAP = 0.5

NORMAL = NormalDist()
INCONCLUSIVE = "inconclusive"
OVERRULED = "alone, not among"  # by Holm: the word of one arm alone, withheld in company
WORD_LEVELS = {  # the stronger of two words that both hold comes first
    "faster": 0.025,
    "slower": 0.025,
    "same": 0.05,
    "worse than margin": 0.025,
    "worse": 0.025,
    "not worse": 0.05,
}


class Ratio(NamedTuple):
    value: float | None
    ci_low: float | None
    ci_high: float | None
    log_se: float | None  # standard error of log(value)
    units: int
    unit: Unit


class Proportion(NamedTuple):
    value: float | None
    stderr: float | None
    ci_low: float | None
    ci_high: float | None
    n: int


class Difference(NamedTuple):
    difference: float | None
    ci_low: float | None
    ci_high: float | None
    gained: int
    lost: int
    n: int


class Totals(NamedTuple):
    """What an arm did on the blocks compared: sums over blocks of the mean over their valid rounds."""

    tokens: float
    row_forwards: float  # forwards of rows still live
    batch_forwards: float
    row_slots: float  # rows that a forward of the block carries, live or not, × the block's batch_forwards
    device_s: float
    decode_s: float
    wall_s: float


class Parts(NamedTuple):
    """tokens per second = tokens_per_forward · rows · utilisation · host · decode_share / forward_s, exactly."""

    tokens_per_forward: float
    rows: float  # R, mean of the batch forwards: the slots, or a little less where the last static block is short
    utilisation: float  # u, live share of the rows carried: a short block's missing rows are not idle rows
    forward_s: float  # t, device time of a batch forward as it was, whatever rows it carried
    host: float  # g, device time in decode wall: 1 − host gap
    decode_share: float  # d, decode wall in wall


class Factors(NamedTuple):
    """Where a rate_ratio comes from: it is the product of these, and speedup is that over length_ratio."""

    tokens_per_forward: float
    forward_time: float  # the baseline's forward_s / the arm's
    utilisation: float  # of rows · utilisation, live rows per forward: arms may differ in the short block's share
    host: float
    decode_share: float


def mean_by(keys: npt.ArrayLike, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Mean of the values of each key, in the order of the sorted keys: a block's mean over its valid rounds."""
    _, group = np.unique(keys, return_inverse=True)
    return np.bincount(group, np.asarray(values, float)) / np.bincount(group)


def ratio_of_totals(
    above: Sequence[npt.ArrayLike], below: Sequence[npt.ArrayLike], *, level: float = 0.95, unit: Unit = "block"
) -> Ratio:
    """Product of the totals above over product of the totals below; every array holds one number per unit.

    speedup             [baseline wall] / [arm wall], by block; by round it is the interval `ci_repeat`
    rate_ratio          [arm tokens, baseline wall] / [arm wall, baseline tokens], by block
    tokens per second   [tokens] / [wall], by block
    tokens per forward  [tokens] / [row_forwards], by item
    """
    assert len(above) == len(below), f"{len(above)} totals above, {len(below)} below"
    x = np.array([*above, *below], float)  # (totals, K)
    totals, units = x.sum(axis=1), x.shape[1]
    if not (np.isfinite(totals) & (totals > 0)).all():
        return Ratio(None, None, None, None, units, unit)
    value = float(totals[: len(above)].prod() / totals[len(above) :].prod())
    if units < UNITS_NEEDED[unit]:
        return Ratio(value, None, None, None, units, unit)
    shares = x / totals[:, None]
    e = shares[: len(above)].sum(axis=0) - shares[len(above) :].sum(axis=0)  # (K,)
    log_se = math.sqrt(units / (units - 1) * float(e @ e))
    reach = math.exp(_t_quantile(level, units - 1) * log_se)
    return Ratio(value, value / reach, value * reach, log_se, units, unit)


def parts(totals: Totals) -> Parts | None:
    """Where an arm's tokens per second come from. None if a counter is 0."""
    if min(totals) <= 0:
        return None
    return Parts(
        tokens_per_forward=totals.tokens / totals.row_forwards,
        rows=totals.row_slots / totals.batch_forwards,
        utilisation=totals.row_forwards / totals.row_slots,
        forward_s=totals.device_s / totals.batch_forwards,
        host=totals.device_s / totals.decode_s,
        decode_share=totals.decode_s / totals.wall_s,
    )


def factors(arm: Totals, baseline: Totals) -> Factors | None:
    """Why the arm's tokens per second differ from the baseline's. None if a counter is 0."""
    x, x0 = parts(arm), parts(baseline)
    if x is None or x0 is None:
        return None
    return Factors(
        tokens_per_forward=x.tokens_per_forward / x0.tokens_per_forward,
        forward_time=x0.forward_s / x.forward_s,
        utilisation=x.rows * x.utilisation / (x0.rows * x0.utilisation),
        host=x.host / x0.host,
        decode_share=x.decode_share / x0.decode_share,
    )


def wilson(correct: int, n: int, *, level: float = 0.95) -> Proportion:
    """An arm's accuracy with its score interval (Wilson 1927); stderr is that of the mean, over n − 1."""
    assert 0 <= correct <= n, f"{correct} correct of {n}"
    if n == 0:
        return Proportion(None, None, None, None, 0)
    p, z = correct / n, NORMAL.inv_cdf((1 + level) / 2)
    a = z * z / (2 * n)
    reach = math.sqrt(a * (a + 2 * p * (1 - p)))
    stderr = math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None
    return Proportion(p, stderr, max(0.0, (p + a - reach) / (1 + 2 * a)), min(1.0, (p + a + reach) / (1 + 2 * a)), n)


def mean_of_proportions(parts: Sequence[tuple[int, int]], *, level: float = 0.95) -> Proportion:
    """The unweighted mean of several accuracies, (correct, n) each: every part counts alike, however many its items.

    Parts are sampled apart, so their variances add up; each is taken about (correct + 1)/(n + 2), lest a part that is
    all right or all wrong seem certain.
    """
    if not parts:
        return Proportion(None, None, None, None, 0)
    mean = sum(correct / n for correct, n in parts) / len(parts)
    smoothed = [((correct + 1) / (n + 2), n) for correct, n in parts]
    stderr = math.sqrt(sum(p * (1 - p) / n for p, n in smoothed)) / len(parts)
    half = NORMAL.inv_cdf((1 + level) / 2) * stderr
    return Proportion(mean, stderr, max(0.0, mean - half), min(1.0, mean + half), sum(n for _, n in parts))


def paired_difference(gained: int, lost: int, n: int, *, level: float = 0.95) -> Difference:
    """Accuracy of the arm less the baseline's on the same n items: `gained` only it has right, `lost` only the other.

    The difference is (gained − lost)/n; the interval (Bonett & Price 2012) lies about the same with one more of each.
    """
    assert gained + lost <= n, f"{gained} gained and {lost} lost of {n}"
    if n == 0:
        return Difference(None, None, None, 0, 0, 0)
    centre, se = _bonett_price(gained, lost, n)
    half = NORMAL.inv_cdf((1 + level) / 2) * se
    return Difference((gained - lost) / n, max(-1.0, centre - half), min(1.0, centre + half), gained, lost, n)


def mcnemar_p(gained: int, lost: int) -> float:
    """Exact two-sided p that gains and losses are equally likely (McNemar 1947). Reported; decides nothing."""
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


def n_needed(gained: int, lost: int, n: int, margin: float = ACCURACY_MARGIN) -> int | None:
    """Items at which an arm as good as the baseline is found `not worse` four times in five: 6.18·ψ/M²."""
    return math.ceil(6.18 * (gained + lost) / n / margin**2) if n else None


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values adjusted for their number (Holm 1979), in the order given."""
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return [float(p) for p in adjusted]


def swap_rejections(
    wall_s: npt.ArrayLike, other_wall_s: npt.ArrayLike, *, swaps: int = 1000, seed: int = 0
) -> float | None:
    """Share of random per-block swaps of two arms' labels after which 95 % intervals exclude 1: 5 % if they hold."""
    walls = np.array([wall_s, other_wall_s], float)  # (2, K)
    rejected = 0
    for swapped in np.random.default_rng(seed).random((swaps, walls.shape[1])) < 0.5:
        first, second = np.where(swapped, walls[::-1], walls)
        ratio = ratio_of_totals([first], [second])
        if ratio.ci_low is None or ratio.ci_high is None:
            return None
        rejected += not ratio.ci_low <= 1 <= ratio.ci_high
    return rejected / swaps


def near_tie_epsilon(logit_differences: npt.ArrayLike, dtype: str) -> float | None:
    """How far below the best a logit may be and still tie with it: what engine and window together does to logits.

    logit_differences: between `ar` at its own width and at the arm's, on the same prefixes. In float32 and float64
    the answer is fixed; else it is None for too few positions.
    """
    if dtype in EXACT_EPSILON:
        return EXACT_EPSILON[dtype]
    differences = np.abs(np.asarray(logit_differences, float))
    if differences.size < EPSILON_POSITIONS_NEEDED:
        return None
    return min(EPSILON_CAP, float(np.quantile(differences, 0.999)))


def chooses(item: str) -> bool:
    """Whether a recommendation may choose on this item; it reports on the others."""
    return sha256(item.encode()).digest()[0] % 2 == 0


def _t_quantile(level: float, df: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(df, (1 + level) / 2))


def _t_tail(distance: float, se: float, df: int) -> float:
    """P(T ≥ distance/se); where nothing varies, any distance above 0 is beyond doubt."""
    from scipy.special import stdtr

    return float(stdtr(df, -distance / se)) if se else float(distance <= 0)


def _bonett_price(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Centre and standard error of the difference, with one more item gained and one more lost."""
    p_gained, p_lost = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    centre = p_gained - p_lost
    return centre, math.sqrt((p_gained + p_lost - centre**2) / (n + 2))


class Verdict(NamedTuple):
    """A word from a closed list, and what may follow it, punctuation included: `str` joins the two."""

    word: str
    detail: str = ""

    def __str__(self) -> str:
        return self.word + self.detail


def too_few(units: int, unit: Unit = "block") -> str | None:
    """Why there will be no interval, for instance `4 blocks, 6 needed`."""
    return _short_of(UNITS_NEEDED[unit], units, unit)


def too_short(windows_s: Sequence[float], synchronisation_s: float) -> str | None:
    """Why one arm's timed windows are too short to compare: in all, or the shortest beside a synchronisation."""
    total, shortest = sum(windows_s), min(windows_s, default=0.0)
    if total < WINDOW_NEEDED_S:
        return f"{total:.3g} s timed, {WINDOW_NEEDED_S:g} s needed"
    needed = WINDOW_NEEDED_SYNCHRONISATIONS * synchronisation_s
    return f"window of {shortest:.3g} s, {needed:.3g} s needed" if shortest < needed else None


def too_many_dropped(*, used: int, dropped: int) -> str | None:
    """Why a cell is void for want of samples."""
    if used and used / (used + dropped) >= SAMPLES_NEEDED_SHARE:
        return None
    return f"{used} of {used + dropped} samples left, {SAMPLES_NEEDED_SHARE:.0%} needed"


def length_flags(*, length_ratio: float | None, cut_by_budget: int, items: int) -> list[str]:
    """What to mind about how long an arm's answers are."""
    low, high = LENGTH_RATIO_RANGE
    flags = []
    if length_ratio is not None and not low <= length_ratio <= high:
        flags.append(f"length_ratio {length_ratio:.3f}, outside {low:g}–{high:g}")
    if items and cut_by_budget / items > BUDGET_CUT_SHARE:
        flags.append(f"{cut_by_budget / items:.0%} cut by the budget")
    return flags


def speed_verdicts(
    speedups: Sequence[Ratio], doubts: Sequence[str | None], margin: float = SPEED_MARGIN
) -> list[Verdict]:
    """`faster`, `slower`, `same` or `inconclusive` for all arms of one (suite, batch, baseline).

    doubts: why an arm's times prove nothing (`too_short`), or None.
    """
    reasons = [
        doubt or too_few(speedup.units, speedup.unit) or (None if speedup.value else "nothing measured")
        for speedup, doubt in zip(speedups, doubts, strict=True)
    ]
    tested = (speedup for speedup, reason in zip(speedups, reasons, strict=True) if not reason)
    judged = iter(_judge([_speed_p(speedup, margin) for speedup in tested]))
    return [Verdict(INCONCLUSIVE, f": {reason}") if reason else next(judged) for reason in reasons]


def withheld(verdict: str) -> bool:
    """Whether a verdict on speed is inconclusive for want of measurements, not for what they say."""
    return verdict.startswith(f"{INCONCLUSIVE}: ") and OVERRULED not in verdict


def accuracy_verdicts(differences: Sequence[Difference], margin: float = ACCURACY_MARGIN) -> list[Verdict]:
    """`not worse`, `worse by less than the margin`, `worse`, `worse than margin` or `inconclusive`, as for speed.

    An inconclusive arm is told the items it needs, unless it has as many already.
    """
    judged = iter(_judge([_accuracy_p(arm, margin) for arm in differences if arm.n]))
    verdicts = []
    for arm in differences:
        verdict = next(judged) if arm.n else Verdict(INCONCLUSIVE, ": no items")
        needed = n_needed(arm.gained, arm.lost, arm.n, margin)
        if verdict == (INCONCLUSIVE, "") and needed and needed > arm.n:
            verdict = Verdict(INCONCLUSIVE, f", needs n ≈ {needed}")
        verdicts.append(verdict)
    return verdicts


def stops_paying(verdicts: Mapping[int, str]) -> int | None:
    """The smallest batch size from which on no verdict is `faster`: there an arm stops paying.

    verdicts: batch size -> verdict on speed, of one arm over one baseline. Inconclusive is not faster. None: it is
    faster at the largest size, so it stops at none of these. One that is faster nowhere stops at the smallest.
    """
    stops = None
    for size in sorted(verdicts, reverse=True):
        if verdicts[size].startswith("faster"):
            break
        stops = size
    return stops


def seeds_verdict(differences: Sequence[float], needed: int = SEEDS_NEEDED) -> Verdict:
    """`higher` or `lower` if all training seeds agree in sign and their 95 % t interval excludes 0."""
    seeds = len(differences)
    if reason := _short_of(needed, seeds, "seed"):
        return Verdict("cannot tell", f": {reason}")
    mean, sd = float(np.mean(differences)), float(np.std(differences, ddof=1))
    agree = all(d * mean > 0 for d in differences)
    if not agree or abs(mean) <= _t_quantile(0.95, seeds - 1) * sd / math.sqrt(seeds):
        return Verdict("cannot tell")
    return Verdict("higher" if mean > 0 else "lower")


def _short_of(needed: int, count: int, noun: str) -> str | None:
    return f"{count} {noun}{'' if count == 1 else 's'}, {needed} needed" if count < needed else None


def _speed_p(speedup: Ratio, margin: float) -> dict[str, float]:
    assert speedup.value is not None
    assert speedup.log_se is not None
    log, se, df = math.log(speedup.value), speedup.log_se, speedup.units - 1
    low, high = math.log(1 - margin), math.log(1 + margin)
    return {
        "faster": _t_tail(log - high, se, df),
        "slower": _t_tail(low - log, se, df),
        "same": max(_t_tail(log - low, se, df), _t_tail(high - log, se, df)),
    }


def _accuracy_p(arm: Difference, margin: float) -> dict[str, float]:
    centre, se = _bonett_price(arm.gained, arm.lost, arm.n)
    return {
        "worse than margin": NORMAL.cdf((centre + margin) / se),
        "worse": NORMAL.cdf(centre / se),
        "not worse": NORMAL.cdf(-(centre + margin) / se),
    }


def _judge(arms: Sequence[Mapping[str, float]]) -> list[Verdict]:
    """Each arm's word, given its p-value for every word."""
    adjusted = {word: holm([p[word] for p in arms]) for word in (arms[0] if arms else ())}
    verdicts = []
    for i, p in enumerate(arms):
        word, alone = _word({word: adjusted[word][i] for word in p}), _word(p)
        overruled = word == INCONCLUSIVE != alone
        verdicts.append(Verdict(word, f": {alone} {OVERRULED} {len(arms)} arms" if overruled else ""))
    return verdicts


def _word(p: Mapping[str, float]) -> str:
    holds = [word for word, level in WORD_LEVELS.items() if p.get(word, 1.0) < level]
    if {"worse", "not worse"} <= set(holds):
        return "worse by less than the margin"
    return holds[0] if holds else INCONCLUSIVE

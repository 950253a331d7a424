"""Statistics of every claim: ratios of totals, accuracies, their confidence intervals and verdicts.

Ratios. Every rate and ratio is a ratio of totals. Its interval is a t interval on the log scale over K units,
linearised as for ratio estimators in survey sampling (Cochran 1977, chapter 6). A percentile bootstrap over few blocks
covers much less than its nominal level. With very uneven blocks (log standard deviation of sizes 0.7, of noise 0.2) a
95 % interval covers 91 % at K = 6.

Accuracy. Differences on the same items have score intervals (Tango 1998). The simpler interval of Bonett and Price
(2012) gives `not worse` wrongly in up to 10 % of runs where 5 % are allowed, if few items differ and all of these are
losses (n = 192, 2 % differ); the score test stays below 7 % from n = 100 on.

Verdicts. A verdict is a word. Each word is a one-sided test, equivalent to a bound of an interval: the bound of a 95 %
interval tests at 2.5 %, that of a 90 % interval at 5 %; `same` is two tests at 5 % (Schuirmann 1987). With several
arms, the p-values of a word (one per arm) are adjusted by Holm (1979) and compared with the same level. So the chance
that any arm wrongly gets the word is at most that level. With a single arm, the intervals alone determine the word.
Intervals are not adjusted; a word that only the adjustment withholds is named with its adjusted interval. Arms without
a test do not count: void arms, arms of a void baseline, arms without an interval. Their verdict is `inconclusive`.

A missing value is None, never NaN. scipy is imported inside the functions that need a distribution, because it is slow
to import and a run needs only the definitions. Wilson and McNemar are computed here: scipy's `binomtest` agrees up to
rounding (the tests compare them), but results are stored with all digits, and the last digit would change.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Values = Sequence[float] | npt.NDArray[np.float64]
Unit = Literal["block", "conversation", "second", "round", "session"]  # second: blocks in a row that last a second
SpeedWord = Literal["faster", "slower", "same", "inconclusive"]
AccuracyWord = Literal["not worse", "worse by less than the margin", "worse", "worse than margin", "inconclusive"]
Word = Literal[SpeedWord, AccuracyWord]

UNITS_NEEDED: dict[Unit, int] = {"block": 6, "conversation": 6, "second": 6, "round": 5, "session": 5}
WINDOW_NEEDED_S = 1.0
WINDOW_NEEDED_SYNCHRONISATIONS = 10
SAMPLES_NEEDED_SHARE = 0.8

POWER_NEEDED = 0.8
MOST_ITEMS = 10_000_000

SPEED_MARGIN = 0.02
ACCURACY_MARGIN = 0.02
LENGTH_RATIO_SHOWN_BEYOND = 0.01
LENGTH_RATIO_RANGE = (0.9, 1.1)
BUDGET_CUT_SHARE = 0.05

EXACT_EPSILON = {"float64": 1e-9, "float32": 1e-4}
EPSILON_POSITIONS_NEEDED = 2000
EPSILON_CAP = 0.5

NORMAL = NormalDist()
LONGEST = 300.0  # reach of an interval on the log scale, so that its bounds are numbers
INCONCLUSIVE: Final = "inconclusive"
DISTURBED = "the machine was disturbed"
WORD_LEVELS: dict[Word, float] = {  # word -> level of its test; if several words hold, the first one is reported
    "faster": 0.025,
    "slower": 0.025,
    "same": 0.05,
    "worse than margin": 0.025,
    "worse": 0.025,
    "not worse": 0.05,
}


def decimals(value: float) -> int:
    """Return the decimals that a figure is written with; an interval has those of its upper bound.

    >>> [decimals(value) for value in (1.234, 15.74, 157.4)]
    [2, 1, 0]
    """
    if abs(value) < 9.995:
        return 2
    return 1 if abs(value) < 99.95 else 0


class Ratio(NamedTuple):
    """A ratio of totals over `units` units, with its confidence interval."""

    value: float | None
    ci_low: float | None
    ci_high: float | None
    log_se: float | None  # standard error of log(value)
    units: int
    unit: Unit


class Proportion(NamedTuple):
    """An accuracy over `n` items, with its confidence interval."""

    value: float | None
    stderr: float | None
    ci_low: float | None
    ci_high: float | None
    n: int


class Difference(NamedTuple):
    """An arm's accuracy minus the baseline's on the same `n` items, with its confidence interval."""

    difference: float | None
    ci_low: float | None
    ci_high: float | None
    gained: int  # items that only the arm has right
    lost: int  # items that only the baseline has right
    n: int


def median_by(keys: npt.ArrayLike, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return the median value of each key, in the order of sorted keys; for example each block's median over rounds.

    With three rounds and 2 % of samples three times too long, the median finds a slowdown of 5 % in over 90 % of runs,
    the mean in 20 %.
    """
    order = np.argsort(keys, kind="stable")
    starts = np.unique(np.asarray(keys)[order], return_index=True)[1]
    by_key = np.split(np.asarray(values, float)[order], starts)[1:]  # before the first start there is nothing
    return np.array([np.median(part) for part in by_key])


def units_of(walls_s: Iterable[float], least_s: float) -> list[int]:
    """Return the number of each block's unit: blocks in a row that last `least_s` in total. The rest joins the last.

    Times of short blocks of two servers are not independent: at 0.1 s a block, what one server gains on the other lasts
    for some blocks (correlation 0.1 to 0.3), and 80 to 85 % of 95 % intervals over 8 blocks hold 1 for equal arms. From
    a second on, all do (benchmarks/engine_servers.py). Batch means: Law and Kelton, Simulation Modeling and Analysis.

    >>> units_of([0.4, 0.7, 1.2, 0.5, 0.6, 0.3], 1.0)
    [0, 0, 1, 2, 2, 2]
    """
    units, unit, lasts_s = list[int](), 0, 0.0
    for wall_s in walls_s:
        units.append(unit)
        lasts_s += wall_s
        if lasts_s >= least_s:
            unit, lasts_s = unit + 1, 0.0
    return [min(number, max(unit - 1, 0)) for number in units]


def ratio_of_totals(
    above: Sequence[npt.ArrayLike], below: Sequence[npt.ArrayLike], *, level: float = 0.95, unit: Unit = "block"
) -> Ratio:
    """Return (product of the sums of `above`) / (product of the sums of `below`). Each array has one value per unit.

    speedup             [baseline wall] / [arm wall], by block; by round for `ci_repeat`
    rate_ratio          [arm tokens, baseline wall] / [arm wall, baseline tokens], by block
    tokens per second   [tokens] / [wall], by block
    tokens per forward  [tokens] / [row_forwards], by block

    With S the ratio, K units and e_k = Σ over `above` of x_k/Σx − the same over `below`: the standard error of log S is
    √(K/(K−1) · Σ e_k²), and the interval is S · exp(± t(K−1) · standard error). Under UNITS_NEEDED units there is none.
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
    reach = math.exp(t_quantile(level, units - 1) * log_se)
    return Ratio(value, value / reach, value * reach, log_se, units, unit)


def shared_ratio(above: Values, below: Values, *, looks: int, among: int = 1) -> Ratio:
    """Return Σ above / Σ below over blocks. Each bound of its interval fails with probability 2.5 % / (looks · among).

    At such levels a t interval fails more often if blocks are uneven. So this is the wider of that of
    `ratio_of_totals` and of `log_normal_interval`. `log_se` is that of a t interval with the reach of its longer side.
    """
    level = 1 - 2 * WORD_LEVELS["faster"] / (looks * max(1, among))
    found = ratio_of_totals([above], [below], level=level)
    if found.value is None or found.ci_low is None or found.ci_high is None or min(*above, *below) <= 0:
        return found
    log_low, log_high = np.clip(log_normal_interval(above, below, level=level), -LONGEST, LONGEST)
    low, high = min(found.ci_low, math.exp(log_low)), max(found.ci_high, math.exp(log_high))
    reach = math.log(max(high / found.value, found.value / low))
    return found._replace(ci_low=low, ci_high=high, log_se=reach / t_quantile(level, found.units - 1))


def log_normal_interval(above: npt.ArrayLike, below: npt.ArrayLike, *, level: float) -> npt.NDArray[np.float64]:
    """Return the bounds (2, …) of log(E above / E below) for values (…, K) that are jointly log-normal, K ≥ 6.

    With r the log of a unit's ratio and u the mean of its two logs, this is E r + β·var r, where β is the slope of u
    on r. In place of var r stands (K−1)·var r / χ² (generalised pivot, Krishnamoorthy and Mathew 2003), in place of the
    variance of u beside the slope the mean of its pivot. A bound is the extreme over all pairs of normal scores at the
    level's distance, one for mean and slope, one for χ² (first-order reliability method).
    """
    from scipy.special import chdtri, ndtr

    x, y = np.log(np.asarray([above, below], float))
    df = x.shape[-1] - 1
    r, u = ((logs - logs.mean(axis=-1, keepdims=True)) for logs in (x - y, (x + y) / 2))
    r_var, both, u_var = ((a * b).sum(axis=-1, keepdims=True) / df for a, b in ((r, r), (r, u), (u, u)))
    beside = np.maximum(0.0, u_var - both**2 / np.where(r_var > 0, r_var, np.inf))
    z, angles = NORMAL.inv_cdf((1 + level) / 2), np.linspace(-1, 1, 21) * math.pi / 2
    factor = df / chdtri(df, ndtr(z * np.sin(angles)))
    reach = z * np.cos(angles) * np.sqrt(r_var * (factor / (df + 1) + factor**2 * beside / (df - 3)))
    shift, centre = both * (factor - 1), (x - y).mean(axis=-1) + both[..., 0]
    return np.array([centre - (reach - shift).max(axis=-1), centre + (reach + shift).max(axis=-1)])


def wilson(correct: int, n: int, *, level: float = 0.95) -> Proportion:
    """Return the accuracy p = correct / n with its score interval (Wilson 1927).

    With z the normal quantile: (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n). `stderr` = √(p(1−p)/(n−1)).
    """
    assert 0 <= correct <= n, f"{correct} correct of {n}"
    if n == 0:
        return Proportion(None, None, None, None, 0)
    p, z = correct / n, NORMAL.inv_cdf((1 + level) / 2)
    a = z * z / (2 * n)
    reach = math.sqrt(a * (a + 2 * p * (1 - p)))
    stderr = math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None
    return Proportion(p, stderr, max(0.0, (p + a - reach) / (1 + 2 * a)), min(1.0, (p + a + reach) / (1 + 2 * a)), n)


def mean_of_proportions(parts: Sequence[tuple[int, int]], *, level: float = 0.95) -> Proportion:
    """Return the unweighted mean of the accuracies of several parts, (correct, n) each.

    Parts are independent, so their variances add. Each variance is p(1 − p)/n at p = (correct + 1)/(n + 2), so that a
    part with all or no items correct does not have variance 0. The interval is normal, cut to [0, 1].
    """
    if not parts:
        return Proportion(None, None, None, None, 0)
    mean = sum(correct / n for correct, n in parts) / len(parts)
    smoothed = [((correct + 1) / (n + 2), n) for correct, n in parts]
    stderr = math.sqrt(sum(p * (1 - p) / n for p, n in smoothed)) / len(parts)
    half = NORMAL.inv_cdf((1 + level) / 2) * stderr
    return Proportion(mean, stderr, max(0.0, mean - half), min(1.0, mean + half), sum(n for _, n in parts))


def gains_and_losses(ours: Mapping[str, float], theirs: Mapping[str, float]) -> tuple[int, int, int]:
    """Return the items on which our score is higher, those on which theirs is, and the common items.

    >>> gains_and_losses({"a": 1.0, "b": 0.0, "c": 1.0}, {"a": 0.0, "b": 0.0, "d": 1.0})
    (1, 0, 2)
    """
    common = ours.keys() & theirs.keys()
    gained = sum(ours[item] > theirs[item] for item in common)
    lost = sum(ours[item] < theirs[item] for item in common)
    return gained, lost, len(common)


def paired_difference(gained: int, lost: int, n: int, *, level: float = 0.95) -> Difference:
    """Return the arm's accuracy minus the baseline's on the same n items.

    `gained`: items that only the arm has right; `lost`: items that only the baseline has right. The difference is
    (gained − lost)/n. The interval holds every difference that the score test (Tango 1998, `_score`) does not reject.
    """
    assert gained + lost <= n, f"{gained} gained and {lost} lost of {n}"
    if n == 0:
        return Difference(None, None, None, 0, 0, 0)
    difference, z = (gained - lost) / n, NORMAL.inv_cdf((1 + level) / 2)
    low = _crossing(lambda delta: score_test(gained, lost, n, delta) - z, -1.0, difference)
    high = _crossing(lambda delta: score_test(gained, lost, n, delta) + z, difference, 1.0)
    return Difference(difference, low, high, gained, lost, n)


def mcnemar_p(gained: int, lost: int) -> float:
    """Return McNemar's exact two-sided p: min(1, 2·P(X ≤ min(gained, lost))), X ~ Binomial(gained + lost, ½).

    It is reported only; no verdict depends on it. (McNemar 1947.)
    """
    from scipy.special import bdtr

    return min(1.0, 2 * float(bdtr(min(gained, lost), gained + lost, 0.5)))


def as_share(points: float) -> float:
    """Return a loss of accuracy in points, as people write it (`--max-loss`), as a share, as the tests take it."""
    return points / 100


class Needed(NamedTuple):
    """The number of items that a verdict of `not worse` takes, and the true difference that this assumes."""

    n: int
    difference: float


def n_needed(gained: int, lost: int, n: int, margin: float = ACCURACY_MARGIN, *, arms: int = 1) -> Needed | None:
    """Return the items with which `not worse` has 80 % power; None without items, or if it takes over MOST_ITEMS.

    Normal approximation for the score test (Nam 1997). The share of items that differ is the observed one. The true
    difference is the observed one if it lies inside the margin, else 0: an arm that is worse by the margin never gets
    the word. The level is the one that Holm leaves to the hardest of `arms`.
    """
    if n == 0:
        return None
    differing = (gained + lost) / n
    difference = (gained - lost) / n if abs(gained - lost) / n < margin else 0.0
    gaining, losing = (differing + difference) / 2, (differing - difference) / 2
    # Of one item, in standard deviations: those if the arm is worse by the margin, and the true ones over those.
    distance = float(score_test(gaining, losing, 1, -margin))
    spread = math.sqrt(differing - difference**2) * distance / (difference + margin)
    quantiles = -NORMAL.inv_cdf(WORD_LEVELS["not worse"] / arms) + NORMAL.inv_cdf(POWER_NEEDED) * spread
    needed = math.ceil((quantiles / distance) ** 2)
    return Needed(needed, difference) if needed <= MOST_ITEMS else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values adjusted for their number (Holm 1979), in the given order.

    The i-th smallest of m is multiplied by m − i + 1, raised to at least its predecessor, and limited to 1.
    """
    order = np.argsort(p_values, kind="stable")
    steps = np.asarray(p_values, float)[order] * np.arange(len(order), 0, -1)
    adjusted = np.empty(len(order))
    adjusted[order] = np.minimum(np.maximum.accumulate(steps), 1.0)
    return [float(p) for p in adjusted]


def near_tie_epsilon(logit_differences: npt.ArrayLike, dtype: str) -> float | None:
    """Return ε: a token ties with the best one if its logit is at most ε lower. None for too few positions.

    `logit_differences`: logits of the tokens of `ar` by the judge minus those by the arm's engine at the arm's width.
    ε is the 99.9th percentile of their absolute values, at most 0.5; in float32 and float64 it is fixed.
    """
    if dtype in EXACT_EPSILON:
        return EXACT_EPSILON[dtype]
    differences = np.abs(np.asarray(logit_differences, float))
    if differences.size < EPSILON_POSITIONS_NEEDED:
        return None
    return min(EPSILON_CAP, float(np.quantile(differences, 0.999)))


def t_quantile(level: float, df: int) -> float:
    """Return the t quantile of a two-sided interval."""
    from scipy.special import stdtrit

    return float(stdtrit(df, (1 + level) / 2))


def t_tail(distance: float, se: float, df: int) -> float:
    """Return P(T ≥ distance/se). For se = 0 it is 0 if the distance is positive, else 1."""
    from scipy.special import stdtr

    if se == 0:
        return float(distance <= 0)
    return float(stdtr(df, -distance / se))


def score_test(gained: Any, lost: Any, n: int, delta: float) -> Any:
    """Return the score statistic of a paired difference δ (Tango 1998); falls as δ grows. Takes arrays, too.

    (gained − lost − nδ) / √(n(2q + δ(1 − δ))), where q is the most likely probability of a loss given δ:
    (√(B² − 4AC) − B)/2A with A = 2n, B = (2n − gained + lost)δ − gained − lost, C = −lost·δ(1 − δ).
    """
    b = (2 * n - gained + lost) * delta - gained - lost
    q = (np.sqrt(np.maximum(b * b + 8 * n * lost * delta * (1 - delta), 0.0)) - b) / (4 * n)
    variance = n * np.maximum(2 * q + delta * (1 - delta), 0.0)
    distance = gained - lost - n * delta
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(distance == 0, 0.0, distance / np.sqrt(variance))


def _crossing(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return where a falling function is 0 between `low` and `high`; the end towards which it points if nowhere."""
    from scipy.optimize import brentq

    if falling(low) <= 0:
        return low
    if falling(high) >= 0:
        return high
    return float(brentq(falling, low, high, xtol=1e-14))

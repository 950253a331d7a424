"""The test of the gate: after given numbers of pairs, is head slower than base, as fast, or neither shown?

Each pair of processes gives one number per cell: d = log(head's time / base's time). Pairs are independent, so d is
tested by a t test with n − 1 degrees of freedom. The tests are made at a few numbers of pairs, the **looks**:

    FAIL  a cell, or the mean of all cells, has a lower bound above 0 (one-sided, 1 %, Holm 1979) and an estimate of at
          least the margin; then as many fresh pairs must show the same cell slower (one-sided, 5 %, Holm)
    PASS  every cell has an upper bound below the margin (one-sided, 2.5 %). All must have it, so no adjustment is
          needed (intersection-union test, Berger 1982). A cell that has passed needs no further pairs
    else  more pairs; after the last look INCONCLUSIVE, and before it where the noise leaves no hope

Each look has an equal share of the error levels (union bound), which holds whatever the dependence between looks. To
end early without a verdict costs no error level. No hope is left when, by one-sided 80 % bounds of noise and
estimates, the last look could neither pass an unchanged cell nor fail any.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.special import chdtri, ndtri, stdtr, stdtrit

from mtbench.experiments.gate.format import TimeTest, Verdict
from mtbench.experiments.gate.request import MOST_PAIRS as MOST_NEEDED  # a cell that needs more has no known number
from mtbench.statistics import holm

FAIL_LEVEL, PASS_LEVEL, CONFIRMATION_LEVEL = 0.01, 0.025, 0.05
FIRST_LOOK, MOST_LOOKS, MOST_PAIRS = 6, 5, 40
HOPE_LEVEL = 0.8  # of the bounds that show at a look that the last one cannot decide
REACH = 5.5  # standard deviations of a mean, at the last look, between no change and the margin
FARTHEST = 1000.0  # such distances; more would be over a million pairs

Floats = npt.NDArray[np.float64]
Values = Sequence[float] | Floats
Flags = npt.NDArray[np.bool_]
Differences = Mapping[str, Values]  # by cell, log(head's time / base's time) of each pair in which it ran


def looks(pair_sd: float | None, margin: float, last: int | None = None) -> tuple[int, ...]:
    """Return the numbers of pairs at which the times are tested: at most five, geometric, from 6 pairs to `last`.

    By default the last is ⌈(5.5 · pair_sd / margin)²⌉ + 6; without a measured `pair_sd` it is 40.
    """
    if last is None and pair_sd is not None:
        distance = min(REACH * pair_sd / math.log1p(margin), FARTHEST)
        last = math.ceil(distance**2) + FIRST_LOOK
    last = max(2, MOST_PAIRS if last is None else last)
    first = min(FIRST_LOOK, last)
    count = min(MOST_LOOKS, max(2, last // 4))
    steps = (round(first * (last / first) ** (i / (count - 1))) for i in range(count))
    return tuple(sorted(set(steps)))


def smallest_detectable(pair_sd: float) -> float:
    """Return the smallest margin whose last look is within 40 pairs, as a share, rounded up to 0.1 %."""
    return math.ceil(1000 * math.expm1(REACH * pair_sd / math.sqrt(MOST_PAIRS - FIRST_LOOK))) / 1000


def noise(differences: Differences) -> float:
    """Return the standard deviation of the pairs in the cell where it is largest; nan where no cell has two pairs."""
    return float(max((np.std(d, ddof=1) for d in differences.values() if len(d) > 1), default=math.nan))


class Decision(NamedTuple):
    """The decision of the pairs so far."""

    word: Verdict  # INCONCLUSIVE while pairs are missing, too
    cells: dict[str, Verdict]
    all_cells: Verdict  # of the mean over all cells; never decides PASS
    tested: int  # pairs of the last look that was made; 0: none
    next_look: int | None  # pairs that the next look needs; None: decided, no look is left, or no hope
    noisy: Sequence[str] = ()  # open cells whose noise would keep them from passing at the last look, unchanged

    @property
    def open(self) -> list[str]:
        """Cells that need more pairs."""
        return [cell for cell, word in self.cells.items() if word == "INCONCLUSIVE"]


def decide(differences: Differences, at: Sequence[int], margin: float, means: Values | None = None) -> Decision:
    """Make every look of `at` for which there are enough pairs; stop where one decides, or where no hope is left.

    A cell that has passed at a look may have fewer values than the others. The mean over all cells is tested while no
    cell has passed. `means`: that of each pair in which every cell has a value; None: of all pairs.
    """
    cells: dict[str, Verdict] = dict.fromkeys(differences, "INCONCLUSIVE")
    all_cells: Verdict = "INCONCLUSIVE"
    least, tested, noisy = math.log1p(margin), 0, list[str]()
    of_pairs = np.array(mean_of_cells(differences) if means is None else means, float)
    if not differences:
        return Decision("PASS", {}, "PASS", 0, None)
    for look in at:
        running = [cell for cell, word in cells.items() if word == "INCONCLUSIVE"]
        if any(len(differences[cell]) < look for cell in running):
            return Decision("INCONCLUSIVE", cells, all_cells, tested, look, noisy)
        tested = look
        d = np.array([differences[cell][:look] for cell in running], float)  # (cells, pairs)
        together = len(running) == len(cells) > 1 and len(of_pairs) >= look
        rows = np.vstack((d, of_pairs[:look])) if together else d
        mean, se = rows.mean(axis=1), rows.std(axis=1, ddof=1) / math.sqrt(look)
        absent = [1.0] * (hypotheses(len(cells)) - len(rows))  # cells not tested at this look
        slower = holm([*_tail(mean, se, look), *absent])[: len(rows)]
        failing = (np.array(slower) < FAIL_LEVEL / len(at)) & (mean >= least)
        passing = (_tail(least - mean, se, look) < PASS_LEVEL / len(at)) & ~failing
        words = [_word(*outcome) for outcome in zip(failing, passing, strict=True)]
        cells |= dict(zip(running, words, strict=False))
        all_cells = words[-1] if together and words[-1] != "INCONCLUSIVE" else all_cells
        if failing.any():
            return Decision("FAIL", cells, all_cells, tested, None)
        if passing[: len(running)].all():
            return Decision("PASS", cells, all_cells, tested, None)
        could_pass, could_fail = _hope(mean, se, look, at, least, len(cells))
        hopeless = ~could_pass & ~passing
        noisy = [cell for cell, hides in zip(running, hopeless, strict=False) if hides]
        if noisy and not could_fail[~passing].any():
            break
    return Decision("INCONCLUSIVE", cells, all_cells, tested, None, noisy)


def _word(fails: bool, passes: bool) -> Verdict:
    return "FAIL" if fails else "PASS" if passes else "INCONCLUSIVE"


def _hope(mean: Floats, se: Floats, pairs: int, at: Sequence[int], least: float, cells: int) -> tuple[Flags, Flags]:
    """Return which rows the last look could pass and fail, by bounds of noise and estimate.

    `mean`, `se`: of each row after these `pairs`, shape (rows,). A row could pass if it did with an estimate of 0, or
    with its own if that is below.
    """
    last, lowest = at[-1], math.sqrt((pairs - 1) / chdtri(pairs - 1, 1 - HOPE_LEVEL))
    least_se = se * lowest * math.sqrt(pairs / last)

    def reach(level: float) -> Floats:
        return np.asarray(stdtrit(last - 1, 1 - level / len(at)) * least_se, float)

    highest = mean + stdtrit(pairs - 1, HOPE_LEVEL) * se
    could_pass = least - np.minimum(mean, 0) > reach(PASS_LEVEL)
    return could_pass, highest > np.maximum(least, reach(FAIL_LEVEL / hypotheses(cells)))


def hypotheses(cells: int) -> int:
    """Return how many tests of FAIL a look makes: one per cell, and one of their mean if there are several."""
    return cells + (cells > 1)


def confirmation_pairs(decision: Decision, at: Sequence[int]) -> int:
    """Return the number of fresh pairs that confirm a FAIL: as many as found it, at least those of the second look."""
    return max(decision.tested, at[min(1, len(at) - 1)])


def confirmed(decision: Decision, fresh: Differences, means: Values | None = None) -> list[str | None]:
    """Return the cells that failed and that fresh pairs show slower, too; [None] for the mean if only that failed.

    `means`: see `decide`.
    """
    failed: list[str | None] = [cell for cell, word in decision.cells.items() if word == "FAIL"]
    of_pairs = mean_of_cells(fresh) if means is None else means
    rows = np.array([fresh[cell] for cell in failed if cell is not None] or [of_pairs], float)
    pairs = rows.shape[1]
    if pairs < 2:
        return []
    p = holm(list(_tail(rows.mean(axis=1), rows.std(axis=1, ddof=1) / math.sqrt(pairs), pairs)))
    return [cell for cell, p_of_cell in zip(failed or [None], p, strict=True) if p_of_cell < CONFIRMATION_LEVEL]


def mean_of_cells(differences: Differences) -> list[float]:
    """Return the mean over cells of each pair, up to the last that has all cells. Every cell has all earlier pairs."""
    return [float(np.mean(values)) for values in zip(*differences.values(), strict=False)]


def time_test(d: Values, at: Sequence[int], margin: float, word: Verdict, cells: int) -> TimeTest:
    """Return head's time over base's in one cell with its intervals. `cells`: how many are tested together."""
    pairs = len(d)
    if pairs < 2:
        ratio = math.exp(d[0]) if pairs else None
        return TimeTest(
            ratio=ratio, ci_low=None, ci_high=None, fail_low=None, pass_high=None, word=word, pairs_needed=None
        )
    mean, se = float(np.mean(d)), float(np.std(d, ddof=1)) / math.sqrt(pairs)
    share = 1 / max(1, len(at))

    def reach(level: float) -> float:
        """Return how far a one-sided bound at this level lies from the estimate."""
        return float(stdtrit(pairs - 1, 1 - level)) * se

    sd = se * math.sqrt(pairs)
    return TimeTest(
        ratio=math.exp(mean),
        ci_low=math.exp(mean - reach(0.025)),
        ci_high=math.exp(mean + reach(0.025)),
        fail_low=math.exp(mean - reach(FAIL_LEVEL * share / hypotheses(cells))),
        pass_high=math.exp(mean + reach(PASS_LEVEL * share)),
        word=word,
        pairs_needed=_pairs_needed(mean, sd, share, margin, cells, pairs + 1)
        if word == "INCONCLUSIVE" and pairs >= FIRST_LOOK
        else None,
    )


def _pairs_needed(mean: float, sd: float, share: float, margin: float, cells: int, least_pairs: int) -> int | None:
    """Return about how many pairs, at least `least_pairs`, decide a cell with this mean and standard deviation."""
    least = math.log1p(margin)
    level, distance = FAIL_LEVEL * share / hypotheses(cells), mean
    if mean < least:
        level, distance = PASS_LEVEL * share, least - mean
    z = -float(ndtri(level))
    if distance <= z * sd / math.sqrt(MOST_NEEDED):
        return None
    return max(least_pairs, math.ceil((z * sd / distance) ** 2 + z**2 / 2))  # the second term: t in place of z


def _tail(distance: Floats, se: Floats, pairs: int) -> Floats:
    """Return P(T ≥ distance/se) with pairs − 1 degrees of freedom. For se = 0 it is 0 if the distance is positive."""
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(se > 0, distance / se, np.where(distance > 0, np.inf, -np.inf))
    return np.asarray(stdtr(pairs - 1, -t), float)

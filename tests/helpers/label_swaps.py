"""The A/A check: swap the labels of two arms at random and count significant speedups."""

import numpy as np
import numpy.typing as npt

from mtbench.statistics import ratio_of_totals


def swap_rejections(
    wall_s: npt.ArrayLike, other_wall_s: npt.ArrayLike, *, swaps: int = 1000, seed: int = 0
) -> float | None:
    """Return the share of random label swaps, block by block, after which the 95 % interval excludes 1.

    It is 5 % if the intervals are right. None for too few blocks.
    """
    walls = np.array([wall_s, other_wall_s], float)  # (2, K)
    rejected = 0
    for swapped in np.random.default_rng(seed).random((swaps, walls.shape[1])) < 0.5:
        first, second = np.where(swapped, walls[::-1], walls)
        ratio = ratio_of_totals([first], [second])
        if ratio.ci_low is None or ratio.ci_high is None:
            return None
        rejected += not ratio.ci_low <= 1 <= ratio.ci_high
    return rejected / swaps

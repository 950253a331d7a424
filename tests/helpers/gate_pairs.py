"""Made-up pairs of processes for the gate's tests: log ratios with an effect of the process."""

import math

import numpy as np
import numpy.typing as npt

SHARED = 0.5  # of a process's variance: the part that all its cells have in common
WITHIN = 0.0005  # standard deviation of what differs between two times inside a process


def draw(
    rng: np.random.Generator, pairs: int, cells: int, process_sd: float, slowdown: float = 0.0, slow_cells: int = 1
) -> dict[str, npt.NDArray[np.float64]]:
    """Return by cell log(head's time / base's time) of each pair; the first `slow_cells` are slower by `slowdown`."""
    shape = (pairs, 2)
    common = rng.standard_normal((*shape, 1))
    own = rng.standard_normal((*shape, cells))
    log_times = process_sd * (math.sqrt(SHARED) * common + math.sqrt(1 - SHARED) * own)
    log_times += WITHIN * rng.standard_normal((*shape, cells))
    d = log_times[:, 1] - log_times[:, 0]
    d[:, :slow_cells] += math.log1p(slowdown)
    return {f"cell{i}": d[:, i] for i in range(cells)}

"""Calibrate a machine: pairs of processes of one build show how much its times differ by chance."""

import math
import time
from collections.abc import Sequence
from statistics import stdev

from scipy.special import chdtri

from mtbench.errors import UserError
from mtbench.experiments.gate import decision, floor
from mtbench.experiments.gate.format import CellFloor, NoiseFloor
from mtbench.experiments.gate.pairs import PairRunner, differences, read_pairs
from mtbench.experiments.gate.processes import BuildFailed
from mtbench.experiments.gate.stages import GateRun

BOUND_LEVEL = 0.8  # of the upper bound of a standard deviation


def calibrate(run: GateRun, pairs: int) -> NoiseFloor:
    """Run the pairs that are missing of a gate of one build with itself, and return the floor.

    Raises UserError if the build cannot decode, and if the deadline ends the calibration: `--resume` goes on.
    """
    compared = run.comparable()
    cells = [cell.cell for cell in compared.cells]
    runner = PairRunner(run.request, (run.base, run.head), compared.planned, {}, run.note)
    folder = run.directory / "pairs"
    while len(done := read_pairs(folder)) < pairs:
        if time.monotonic() > run.deadline:
            raise UserError(
                f"the time budget ended the calibration after {len(done)} of {pairs} pairs; go on with "
                f"`mtbench gate calibrate -o {run.directory} --resume`."
            )
        run.note(f"pair {len(done) + 1} of {pairs}")
        try:
            runner.run(folder, len(done) + 1, cells)
        except BuildFailed as failure:
            raise UserError(f"the build cannot decode: {failure}.") from None
    noise = [noise_of(cell, d) for cell, d in differences(done, cells).items() if len(d) > 2]
    if not noise:
        raise UserError("no cell has valid times in 3 pairs or more; see the failures in the folder of a pair.")
    return NoiseFloor(
        key=compared.key,
        measured=time.strftime(floor.TIME, time.gmtime()),
        interleave=run.request.interleave,
        pairs=len(done),
        smallest_detectable=decision.smallest_detectable(max(cell.pair_sd for cell in noise)),
        cells=noise,
    )


def noise_of(cell: str, d: Sequence[float]) -> CellFloor:
    """Return the noise of a cell from log(time / time) of pairs of processes of one build."""
    n, sd = len(d), stdev(d)
    high = sd * math.sqrt((n - 1) / chdtri(n - 1, BOUND_LEVEL))
    return CellFloor(cell=cell, pair_sd=sd, pair_sd_high=high)

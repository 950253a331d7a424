"""Calibrate a machine: pairs of processes of one build show how much its times differ by chance."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from mtbench.errors import UserError
from mtbench.experiments.gate import decision, floor, timing
from mtbench.experiments.gate.format import CellFloor, NoiseFloor
from mtbench.experiments.gate.pairs import PairRunner, PairTimes, differences, read_pairs
from mtbench.experiments.gate.processes import BuildFailed
from mtbench.experiments.gate.stages import GateRun


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration in its directory: a gate of one build with itself whose pairs are not judged."""

    run: GateRun
    pairs: int

    def measure(self, note: Callable[[str], None]) -> NoiseFloor:
        """Run the pairs that are missing and return the floor. Raises UserError if the build cannot decode.

        A calibration that the deadline ends has no floor: UserError, and `--resume` goes on.
        """
        compared, request = self.run.comparable(), self.run.request
        cells = [cell.cell for cell in compared.cells]
        builds, planned = (self.run.base, self.run.head), (compared.base, compared.head)
        runner = PairRunner(request, builds, planned, {}, note)
        folder = self.run.directory / "pairs"
        while len(done := read_pairs(folder)) < self.pairs:
            if time.monotonic() > self.run.deadline:
                raise UserError(
                    f"the time budget ended the calibration after {len(done)} of {self.pairs} pairs; go on with "
                    f"`mtbench gate calibrate -o {self.run.directory} --resume`."
                )
            note(f"pair {len(done) + 1} of {self.pairs}")
            try:
                runner.run(folder, len(done) + 1, cells)
            except BuildFailed as failure:
                raise UserError(f"the build cannot decode: {failure}.") from None
        noise = [_noise(cell, done) for cell in cells]
        known = [cell for cell in noise if cell is not None]
        if not known:
            raise UserError("no cell has valid times in 3 pairs or more; see the failures in the folder of a pair.")
        return NoiseFloor(
            key=compared.key,
            measured=time.strftime(floor.TIME, time.gmtime()),
            interleave=request.interleave,
            pairs=len(done),
            smallest_detectable=decision.smallest_detectable(max(cell.pair_sd for cell in known)),
            cells=known,
        )


def _noise(cell: str, pairs: list[PairTimes]) -> CellFloor | None:
    """Return the noise of a cell; None if fewer than three pairs have valid times of it."""
    d = differences(pairs, [cell])[cell]
    processes = [process for pair in pairs if cell in pair.processes for process in pair.processes[cell]]
    return timing.floor_of(cell, d, processes) if len(d) > 2 else None

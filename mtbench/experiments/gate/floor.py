"""floor.json: how much two processes of one build differ on a machine, kept beside the gates' directories.

A floor holds for one machine, one torch and one plan, for 30 days. It sets how many pairs the gate takes and which
slowdown it can find. It is never part of the test itself.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

from scipy.special import chdtri

from mtbench import files, records
from mtbench.experiments.gate.format import CellFloor, FloorFile, Key, NoiseFloor
from mtbench.records import dump

FILE = "floor.json"
HOLDS_S = 30 * 24 * 3600.0
BOUND_LEVEL = 0.8  # of the upper bound of a standard deviation
TIME = "%Y-%m-%dT%H:%M:%SZ"
ADVICE = "delete it; a gate of a build with itself, `mtbench gate --base ENV --head ENV`, measures it again."
PAIRS, FEWEST_PAIRS = 10, 3  # of one build: by default, and at least


def read(folder: Path) -> list[NoiseFloor]:
    """Return the floors in a folder; none without a floor.json. Raises UserError if it is malformed."""
    file = folder / FILE
    return records.read_json(file, FloorFile, ADVICE).floors if file.is_file() else []


def find(floors: list[NoiseFloor], key: Key, *, interleave: bool) -> tuple[NoiseFloor | None, str | None]:
    """Return the floor of this machine and plan, or why there is none."""
    of_kind, oldest = [f for f in floors if f.interleave == interleave], time.time() - HOLDS_S
    for floor in of_kind:
        if floor.key == key:
            recent = floor.measured >= time.strftime(TIME, time.gmtime(oldest))
            return (floor, None) if recent else (None, f"the floor of {floor.measured} is too old")
    if not of_kind:
        return None, "floor.json has no noise of this machine and plan"
    latest = max(of_kind, key=lambda floor: floor.measured)
    changes = [name for name in Key.model_fields if getattr(latest.key, name) != getattr(key, name)]
    return None, f"the floor of {latest.measured} does not hold: other {', '.join(changes)}"


def add(folder: Path, floor: NoiseFloor) -> None:
    """Write a floor beside the others of the folder; it replaces the one of its key."""
    others = [f for f in read(folder) if (f.key, f.interleave) != (floor.key, floor.interleave)]
    files.write_json(folder / FILE, dump(FloorFile(schema_version=1, floors=[*others, floor])))


def noise_of(cell: str, d: Sequence[float]) -> CellFloor:
    """Return the noise of a cell from log(time / time) of pairs of processes of one build."""
    n, sd = len(d), stdev(d)
    return CellFloor(cell=cell, pair_sd=sd, pair_sd_high=sd * math.sqrt((n - 1) / chdtri(n - 1, BOUND_LEVEL)))

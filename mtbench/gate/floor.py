"""floor.json: how much two processes of one build differ on a machine, kept beside the gates' directories.

A floor holds for one machine, one torch and one plan, for 30 days. It sets how many pairs the gate takes and which
slowdown it can find. It is never part of the test itself.
"""

import calendar
import time
from pathlib import Path

from mtbench import files, records
from mtbench.gate.format import SCHEMA_VERSION, Floor, FloorFile, Key
from mtbench.records import dump

FILE = "floor.json"
HOLDS_S = 30 * 24 * 3600.0
TIME = "%Y-%m-%dT%H:%M:%SZ"
ADVICE = "delete it and calibrate again with `mtbench gate calibrate`."


def read(folder: Path) -> list[Floor]:
    """Return the floors in a folder; none without a floor.json. Raises UserError if it is malformed."""
    file = folder / FILE
    return records.read_json(file, FloorFile, ADVICE).floors if file.is_file() else []


def find(floors: list[Floor], key: Key, *, live: bool) -> tuple[Floor | None, str | None]:
    """Return the floor of this machine and plan, and why the nearest one does not hold if there is none."""
    of_kind = [floor for floor in floors if floor.live == live]
    for floor in of_kind:
        if floor.key == key:
            return (floor, None) if is_recent(floor) else (None, f"the floor of {floor.measured} is too old")
    if not of_kind:
        return None, None
    nearest = min(of_kind, key=lambda floor: len(_changes(floor.key, key)))
    return None, f"the floor of {nearest.measured} does not hold: {', '.join(_changes(nearest.key, key))}"


def add(folder: Path, floor: Floor) -> Path:
    """Write a floor beside the others of the folder; it replaces the one of its key. Return the file's path."""
    others = [f for f in read(folder) if (f.key, f.live) != (floor.key, floor.live)]
    file = folder / FILE
    files.write_json(file, dump(FloorFile(schema_version=SCHEMA_VERSION, floors=[*others, floor])))
    return file


def is_recent(floor: Floor) -> bool:
    """Return whether a floor was measured within the last 30 days."""
    return time.time() - calendar.timegm(time.strptime(floor.measured, TIME)) <= HOLDS_S


def _changes(before: Key, now: Key) -> list[str]:
    a, b = dump(before), dump(now)
    return [
        "another plan" if name == "plan_sha256" else f"{name} {a[name]} → {b[name]}" for name in a if a[name] != b[name]
    ]

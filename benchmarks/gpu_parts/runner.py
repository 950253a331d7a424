"""Run parts in processes of their own: an error, a hang or a crash ends that part, and not the ones behind it.

A part writes what it finds to parts/NAME.json; gpu.json is all of them, merged. Nothing here imports torch: a second
process on the GPU would make every timed batch a shared one.
"""

import json
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtbench import files
from mtbench.errors import UserError
from mtbench.programs import processes

GRACE_S = 2.0  # between SIGTERM, at which a part prints where it is, and SIGKILL
CANNOT_RUN = 2  # exit code of a process that says that no part can run here

Found = dict[str, Any]


def file_of(out: Path, name: str) -> Path:
    """Return the file of what a part found."""
    return out / "parts" / f"{name}.json"


def read(file: Path) -> Found:
    """Return the contents of a file; empty without one."""
    return dict(json.loads(file.read_text())) if file.exists() else {}


def write(file: Path, value: Any) -> None:
    """Write a JSON file, whole or not at all."""
    files.write_text(file, json.dumps(value, indent=1, default=str) + "\n")


def run(
    out: Path, names: Sequence[str], command: Sequence[str], variables: Mapping[str, str], limit_s: float
) -> Iterable[tuple[str, Found]]:
    """Run a process that goes through parts; yield what those found that it ran: all, or up to the one that ended it.

    It prints into logs/NAME.txt, NAME being the first part. All its processes have ended then. Raises UserError if it
    says that no part can run here.
    """
    started_at, log = time.monotonic(), out / "logs" / f"{names[0]}.txt"
    for old in (log, *(file_of(out, name) for name in names)):
        old.parent.mkdir(parents=True, exist_ok=True)
        old.unlink(missing_ok=True)
    with processes.started(command, variables, log, Path.cwd(), grace_s=GRACE_S) as process:
        in_time = processes.has_ended(process, limit_s)
    code, said = process.returncode, processes.last_line(log)
    if in_time and code == CANNOT_RUN:
        raise UserError(said)
    for name in names:
        found: Found = {"bars": [], "errors": {}} | read(file_of(out, name))
        if ended := "seconds" not in found:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else said or f"exit code {code}"
            found["errors"][name] = how if in_time else f"no end within {limit_s:.0f} s"
            found["seconds"] = {name: time.monotonic() - started_at}
            write(file_of(out, name), found)
        yield name, found
        if ended:
            return


def is_done(out: Path, name: str) -> bool:
    """Return whether a part ran to its end, in this call or an earlier one."""
    found = read(file_of(out, name))
    return "seconds" in found and name not in found["errors"]


def merge(out: Path, names: Iterable[str]) -> Found:
    """Write gpu.json, what all parts found; return it."""
    merged: Found = {"bars": [], "errors": {}, "seconds": {}}
    for name in names:
        found = read(file_of(out, name))
        merged["bars"] += found.pop("bars", [])
        for key in ("errors", "seconds"):
            merged[key] |= found.pop(key, {})
        merged = found | merged
    write(out / "gpu.json", merged)
    return merged

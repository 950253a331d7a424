"""Which machines `mtbench doctor` has passed: a file for each in the cache folder, deleted when a later doctor fails.

A machine is its processor or GPU with the driver, torch and mtbench: each of them decides what runs.
"""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import torch

from mtbench import files
from mtbench.errors import UserError
from mtbench.hardware import machine
from mtbench.version import __version__


def fingerprint(device: str) -> dict[str, str | None]:
    """Return what identifies the machine."""
    driver = machine.gpu() if device == "cuda" else None
    name = torch.cuda.get_device_name(0) if device == "cuda" else machine.host()["processor"]
    driver_version = None if driver is None else driver.describe()["driver"]
    return {"device": name, "driver": driver_version, "torch": torch.__version__, "mtbench": __version__}


def remember(device: str, *, passed: bool) -> None:
    """Store whether doctor has passed on this machine. A cache folder that cannot be written forgets it."""
    identity = fingerprint(device)
    with suppress(UserError, OSError):
        if passed:
            files.write_json(_file(identity), identity)
        else:
            _file(identity).unlink(missing_ok=True)


def unproven(device: str) -> str | None:
    """Return the line that a run prints where doctor has not passed; None where it has, and on a CPU.

    A GPU runs kernels that were compiled on this machine for the first time, at clocks that others may hold down. A CPU
    runs PyTorch's operations, and a newcomer's first run there needs no step before it.
    """
    if device != "cuda" or _file(fingerprint(device)).is_file():
        return None
    return "mtbench has not been checked on this GPU: run `mtbench doctor` first (it takes less than a minute)."


def _file(identity: dict[str, str | None]) -> Path:
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    return files.cache_home() / "doctor" / f"{digest[:16]}.json"

"""Whether a process of a test lives, and waiting for it."""

import time
from collections.abc import Callable
from pathlib import Path


def is_alive(process: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool], within_s: float = 10.0) -> bool:
    """Wait until something holds; return whether it does."""
    deadline = time.monotonic() + within_s
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()

"""The cache directory. It holds only files that mtbench can download or make again, so it is safe to delete."""

import os
from pathlib import Path


def cache_home() -> Path:
    """Return `$XDG_CACHE_HOME/mtbench`, by default `~/.cache/mtbench`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mtbench"

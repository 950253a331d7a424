"""Where mtbench keeps what it can get or make again. It can be deleted at any time."""

import os
from pathlib import Path


def cache_home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "mtbench"

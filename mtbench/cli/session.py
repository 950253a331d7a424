"""What this process works on, for the line that an interruption prints."""

from pathlib import Path

begun: list[Path] = []  # the run that this process works on, once there is one

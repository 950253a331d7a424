"""What is made once for all parallel processes of the tests: pytest-xdist's recipe for session fixtures."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """Return a folder that the first process which needs it makes. Who changes it copies it."""
    root = factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"shared-{name}"
    made = folder.with_name(f"{folder.name}.made")
    with FileLock(f"{folder}.lock"):
        if not made.exists():
            folder.mkdir()
            make(folder)
            made.touch()
    return folder

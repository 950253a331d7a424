"""Importing this makes the checkout importable, installed or not: methods and suites lie beside the package."""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)

import mtbench  # noqa: E402

if find_spec("mtbench.methods") is None:
    mtbench.__path__.append(ROOT)

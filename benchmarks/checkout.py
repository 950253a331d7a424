"""Import this module to import mtbench from the checkout without installing it.

The folders methods/ and suites/ are outside the package folder; installing would move them into it.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)

import mtbench  # noqa: E402

if find_spec("mtbench.methods") is None:
    mtbench.__path__.append(ROOT)

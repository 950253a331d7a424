"""What the tests of the sandbox share: they are skipped without a sandbox, except where the variable CI is set."""

import os

import pytest

from mtbench.evaluation.sandbox import unavailable

confined = pytest.mark.skipif(
    bool(unavailable()) and not os.environ.get("CI"), reason=f"no sandbox on this machine: {unavailable()}"
)

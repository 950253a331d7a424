"""What the tests of the sandbox share: they are skipped without a sandbox, except where the variable CI is set."""

import os
import re
from pathlib import Path

import pytest

from mtbench.evaluation.sandbox import unavailable

confined = pytest.mark.skipif(
    bool(unavailable()) and not os.environ.get("CI"), reason=f"no sandbox on this machine: {unavailable()}"
)


def programs(file: str, **texts: str) -> dict[str, str]:
    """Return the programs of a file of tests/evaluation, in which each follows a line with its name.

    `texts`: what a line such as `%NAME` stands for.
    """
    content = (Path(__file__).parents[1] / "evaluation" / file).read_text(encoding="utf-8")
    for name, text in texts.items():
        content = content.replace(f"%{name}\n", text)
    parts = re.split(r"^# --- (.*)\n", content, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))

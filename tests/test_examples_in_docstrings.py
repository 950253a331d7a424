"""The examples in docstrings say what Python prints."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    ".".join((prefix, *file.relative_to(ROOT / folder).with_suffix("").parts))
    for folder, prefix in {"mtbench": "mtbench", "methods": "mtbench.methods", "suites": "mtbench.suites"}.items()
    for file in sorted((ROOT / folder).rglob("*.py"))
    if ">>>" in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted
    assert not found.failed

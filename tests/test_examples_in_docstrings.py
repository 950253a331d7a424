"""The examples in docstrings say what Python prints."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest

import mtbench

PACKAGE = Path(mtbench.__file__).parent
MODULES = [
    ".".join(("mtbench", *file.relative_to(PACKAGE).with_suffix("").parts))
    for file in sorted(PACKAGE.rglob("*.py"))
    if ">>>" in file.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    found = doctest.testmod(import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert found.attempted
    assert not found.failed

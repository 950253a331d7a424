"""The core knows no method and no suite by name: another one is another file, and nothing else."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import mtbench
from mtbench.registry import METHODS, SUITES

CORE = sorted(Path(mtbench.__file__).parent.glob("*.py"))
LONGEST_METHOD = 150  # lines


def asked_for(source: str) -> Iterator[str]:
    """Every text that code compares with, matches on, or looks up in a registry."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=right):
                parts = [left, *right]
            case ast.MatchValue(value=value):
                parts = [value]
            case ast.Subscript(value=ast.Name(id="METHODS" | "SUITES"), slice=key):
                parts = [key]
            case _:
                continue
        for constant in (c for part in parts for c in ast.walk(part) if isinstance(c, ast.Constant)):
            if isinstance(constant.value, str):
                yield constant.value


@pytest.mark.parametrize("file", CORE, ids=lambda file: file.name)
def test_the_core_asks_for_no_name(file: Path) -> None:
    assert set(asked_for(file.read_text())).isdisjoint([*METHODS, *SUITES])


@pytest.mark.parametrize(
    "line", ["if method.name == 'mars': ...", "x in ('ar', 'gsm8k')", "METHODS['mars']", "match x:\n case 'ar': ..."]
)
def test_a_name_in_the_core_would_be_found(line: str) -> None:
    assert set(asked_for(line)) & {*METHODS, *SUITES}


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_is_read_in_one_sitting(name: str) -> None:
    file = inspect.getsourcefile(METHODS[name])
    assert file is not None
    assert len(Path(file).read_text().splitlines()) <= LONGEST_METHOD

"""The core knows no method and no suite by name: another one is another file, and nothing else."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

import mtbench
from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES

ROOT = Path(mtbench.__file__).parent
CORE = sorted(ROOT.rglob("*.py"))
LONGEST_METHOD = 150  # lines
NAMED_ALIKE = {  # roles of checkpoints, objectives of training, the suite of the demonstration
    "runs/run_request.py": {"arithmetic"},
    "models/families.py models/loading.py": {"arithmetic", "ar", "mars"},
    "training/objectives.py training/recipes.py": {"arithmetic", "ar", "mars", "medusa", "block-diffusion"},
    "results/acceptance.py": {"mars"},  # whose figure
    "training/token_cache.py": {"prompts"},  # how many
}


def said(source: str) -> Iterator[str]:
    """Every text in the code that is no docstring."""
    tree = ast.parse(source)
    documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = [n.body[0].value for n in documented if ast.get_docstring(n, clean=False) and _is_text(n.body[0])]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def _is_text(node: ast.stmt) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr)


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_core_says_no_name(file: Path) -> None:
    allowed = set().union(
        *(names for files, names in NAMED_ALIKE.items() if str(file.relative_to(ROOT)) in files.split())
    )
    assert set(said(file.read_text())) & {*METHODS, *SUITES} <= allowed


@pytest.mark.parametrize("line", ["x.name == 'mars'", "METHODS.get('gsm8k')", "{'ar': 1}", "match x:\n case 'ar': ..."])
def test_a_name_in_the_core_would_be_found(line: str) -> None:
    assert set(said(line)) & {*METHODS, *SUITES}


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_is_read_in_one_sitting(name: str) -> None:
    file = inspect.getsourcefile(METHODS[name])
    assert file is not None
    assert len(Path(file).read_text().splitlines()) <= LONGEST_METHOD

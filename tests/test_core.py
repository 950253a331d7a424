"""Rules for the source of the core: it names no method and no suite, so that adding one needs a single new file."""

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
NAMED_ALIKE = {  # other things of the same name: checkpoint roles, training objectives; the demonstration's suite
    "runs/plan.py runs/records.py cli/request_options.py": {"arithmetic"},
    "models/families.py models/loading.py": {"arithmetic", "ar", "mars"},
    "training/objectives.py training/recipes.py": {"arithmetic", "ar", "mars", "medusa", "block-diffusion"},
    "results/acceptance.py": {"mars"},  # a figure of the MARS paper
    "training/token_cache.py": {"prompts"},  # a count
}


def strings_of(source: str) -> Iterator[str]:
    """Yield every string constant that is not a docstring."""
    tree = ast.parse(source)
    documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = [n.body[0].value for n in documented if ast.get_docstring(n, clean=False) and _is_text(n.body[0])]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def _is_text(node: ast.stmt) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr)


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT)))
def test_the_core_names_no_method_and_no_suite(file: Path) -> None:
    """Except other things of the same name."""
    allowed = set().union(
        *(names for files, names in NAMED_ALIKE.items() if str(file.relative_to(ROOT)) in files.split())
    )
    assert set(strings_of(file.read_text())) & {*METHODS, *SUITES} <= allowed


@pytest.mark.parametrize("line", ["x.name == 'mars'", "METHODS.get('gsm8k')", "{'ar': 1}", "match x:\n case 'ar': ..."])
def test_a_name_in_the_core_would_be_found(line: str) -> None:
    """In a comparison, a call, a key and a case."""
    assert set(strings_of(line)) & {*METHODS, *SUITES}


@pytest.mark.parametrize("name", list(METHODS))
def test_the_file_of_a_method_is_short(name: str) -> None:
    """At most 150 lines."""
    file = inspect.getsourcefile(METHODS[name])
    assert file is not None
    assert len(Path(file).read_text().splitlines()) <= LONGEST_METHOD

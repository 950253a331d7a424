"""Rules for the source of the core: it names no method and no suite, and its functions are short.

Because no name is used, a new method or suite needs a single new file.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest

import mtbench
from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES

ROOT = Path(mtbench.__file__).parent
CORE = sorted(ROOT.rglob("*.py"))
LONGEST_METHOD = 150  # lines of a method's file
LONGEST_FUNCTION = 60  # lines
LONG_FUNCTIONS = {  # file and function -> why it is longer
    "cli/serve.py serve": "its parameters are the options of a command, one a line",
    "kernels/triton_attention.py _attend": "a kernel; a function for its loads changes their order when compiled",
    "kernels/triton_attention.py attend": "the arguments of a kernel, one a line",
}
NAMED_ALIKE = {  # other things of the same name: checkpoint roles, training objectives; the demonstration's suite
    "plan/request.py": {"arithmetic"},
    "models/families.py models/loading.py": {"arithmetic", "ar", "mars", "eagle", "dflash"},
    "training/objectives.py training/recipes.py": {"arithmetic", "ar", "mars", "medusa", "block-diffusion", "eagle"},
    "training/recipes.py": {"gsm8k"},  # the data of a recipe
    "models/chat_template.py training/document.py training/evaluation.py training/trainer.py": {"conversations"},
    "training/draft_objectives.py": {"ar", "eagle", "dflash", "mtp"},
    "models/drafts/mtp.py": {"mtp"},  # a part of checkpoints, and what its tensors are called
    "serving/wire.py": {"suffix"},  # a field of OpenAI's requests
}

# A verdict is a record: code reads its fields, never its text.
TEXT_READ = re.compile(r"verdict[\w.()\[\]]*\.(startswith|endswith|partition|split)\(|\bre\.\w+\(.*verdict")


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


@pytest.mark.parametrize("name", list(METHODS))
def test_the_file_of_a_method_is_short(name: str) -> None:
    """At most 150 lines."""
    file = inspect.getsourcefile(METHODS[name])
    assert file is not None
    assert len(Path(file).read_text().splitlines()) <= LONGEST_METHOD


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT)))
def test_functions_are_short(file: Path) -> None:
    """At most 60 lines, without decorators; longer ones are listed with a reason."""
    functions = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)]
    name = file.relative_to(ROOT).as_posix()
    long = {f"{name} {f.name}" for f in functions if (f.end_lineno or 0) - f.lineno >= LONGEST_FUNCTION}
    assert long == {function for function in LONG_FUNCTIONS if function.split()[0] == name}


@pytest.mark.parametrize("file", CORE, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_code_reads_the_text_of_a_verdict(file: Path) -> None:
    assert TEXT_READ.search(file.read_text()) is None


@pytest.mark.parametrize(
    "line", ["s.verdict.startswith('faster')", "str(verdict).partition(':')", "re.split(':', verdict)"]
)
def test_code_that_reads_a_verdict_would_be_found(line: str) -> None:
    assert TEXT_READ.search(line)

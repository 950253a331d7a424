"""Rules for the source of the core: it names no method and no suite, and its functions are short.

Because no name is used, a new method or suite needs a single new file.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import mtbench
from mtbench.decoding.registry import METHODS
from mtbench.evaluation.registry import SUITES

ROOT = Path(mtbench.__file__).parent
CORE = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(ROOT.rglob("*.py"))}
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
    "models/chat_template.py training/evaluation.py training/trainer.py": {"conversations"},
    "training/draft_objectives.py training/block_objectives.py": {"ar", "eagle", "dflash", "mtp"},
    "models/drafts/mtp.py": {"mtp"},  # a part of checkpoints, and what its tensors are called
    "serving/wire.py": {"suffix"},  # a field of OpenAI's requests
}

# A verdict is a record: code reads its fields, never its text.
TEXT_READ = re.compile(r"verdict[\w.()\[\]]*\.(startswith|endswith|partition|split)\(|\bre\.\w+\(.*verdict")


def strings_of(source: str) -> Iterator[str]:
    """Yield every string constant that is not a docstring."""
    tree = ast.parse(source)
    documented = [n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef)]
    docstrings = {n.body[0].value for n in documented if ast.get_docstring(n, clean=False) and _is_text(n.body[0])}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            yield node.value


def _is_text(node: ast.stmt) -> TypeGuard[ast.Expr]:
    return isinstance(node, ast.Expr)


def test_the_core_names_no_method_and_no_suite() -> None:
    """Except other things of the same name."""
    registered = {*METHODS, *SUITES}
    for name, source in CORE.items():
        allowed = set().union(*(names for files, names in NAMED_ALIKE.items() if name in files.split()))
        assert set(strings_of(source)) & registered <= allowed, name


def test_the_file_of_a_method_is_short() -> None:
    """At most 150 lines."""
    files = {name: inspect.getsourcefile(METHODS[name]) or "" for name in METHODS}
    lines = {name: len(Path(file).read_text().splitlines()) for name, file in files.items()}
    assert max(lines.values()) <= LONGEST_METHOD, lines


def test_functions_are_short() -> None:
    """At most 60 lines, without decorators; longer ones are listed with a reason."""
    long = {
        f"{name} {node.name}"
        for name, source in CORE.items()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST_FUNCTION
    }
    assert long == {*LONG_FUNCTIONS}


def test_no_code_reads_the_text_of_a_verdict() -> None:
    assert [name for name, source in CORE.items() if TEXT_READ.search(source)] == []
    lines = ("s.verdict.startswith('faster')", "str(verdict).partition(':')", "re.split(':', verdict)")
    assert all(map(TEXT_READ.search, lines))

"""The error messages of the source, for the page on troubleshooting: every `UserError("…")`, a value as an ellipsis."""

import ast
import importlib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

from mtbench.cli.markdown import plain

PACKAGES = ("mtbench", "mtbench.methods", "mtbench.suites")
VALUE = "…"


@cache
def by_file() -> dict[str, list[ast.expr]]:
    """The files that raise a UserError, as the checkout names them -> the first argument of every `UserError(…)`."""
    found = {}
    for package in PACKAGES:
        folder = Path(next(iter(importlib.import_module(package).__path__)))
        for file in sorted(folder.rglob("*.py")):
            if raised := list(_messages(file)):
                found[f"{package.rpartition('.')[2]}/{file.relative_to(folder).as_posix()}"] = raised
    return found


def is_named(file: str, names: tuple[str, ...]) -> bool:
    """Return whether the file is one of `names`, or lies in a folder among them (`mtbench/gate/`)."""
    return any(file == name or (name.endswith("/") and file.startswith(name)) for name in names)


def listed(*names: str) -> str:
    """Return the messages of the named files and folders as a list, each once."""
    found: set[str] = set()
    for file, raised in by_file().items():
        if is_named(file, names):
            module = importlib.import_module(_module(file))
            found |= {_text(message, module) for message in raised}
    return "\n".join(f"- {plain(message)}" for message in sorted(found) if any(map(str.isalpha, message)))


def _module(name: str) -> str:
    module = name.removesuffix(".py").replace("/", ".")
    return module if module.startswith("mtbench.") else f"mtbench.{module}"


def _messages(file: Path) -> Iterator[ast.expr]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "UserError" and node.args:
            yield node.args[0]


def _text(message: ast.expr, module: ModuleType) -> str:
    """Return a message. A constant of the module is shown, any other value is an ellipsis."""
    match message:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return re.sub(f"{VALUE}+", VALUE, "".join(_text(part, module) for part in parts))
        case ast.FormattedValue(value=ast.Name(id=name)) if name.isupper():
            return _constant(getattr(module, name, None))
        case ast.FormattedValue(conversion=conversion):
            return f"'{VALUE}'" if conversion == ord("r") else VALUE
    return VALUE


def _constant(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else VALUE

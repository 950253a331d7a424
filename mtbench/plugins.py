"""A registry of classes by name, one file for each class.

The registries are METHODS and SERVING_ENGINES in mtbench/decoding/registry.py and SUITES in
mtbench/evaluation/registry.py.

The files of methods/, suites/ and engines/ register their classes when imported. Others add classes in two ways:

- An installed package uses the entry-point groups `mtbench.methods`, `mtbench.suites` and `mtbench.engines`; an entry
  names a module that registers on import (examples/ has one). If such a module fails, its entry is listed in `broken`
  with the reason, and everything else works.
- A command names a file: `--plugin FILE.py`. The file may import installed packages, but no other file beside it. A
  plan holds the SHA-256 of each file that it needs, and a command that reads the plan must name the same file: a plan
  is untrusted input, and a plugin is code.
"""

import hashlib
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from mtbench import files
from mtbench.errors import UserError, first_line, unknown

T = TypeVar("T", bound=type[Any])
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # arms on the command line use : , | @ and / as separators
LARGEST_PLUGIN = 1 << 22  # bytes


class Registry(Generic[T]):
    """Maps names to classes. The first look-up imports all modules of `package` and all entry points of that group."""

    def __init__(self, kind: str, package: str, check: Callable[[type[Any]], None]) -> None:
        self.kind = kind
        self.package = package
        self.broken: dict[str, str] = {}  # name of an installed but unusable entry -> the reason and its package
        self.checks = [check]  # each raises if a class of another package violates the interface
        self._classes: dict[str, T] = {}
        self._loaded = False
        _registries.append(self)

    def register(self, name: str) -> Callable[[T], T]:
        """Return a class decorator that registers the class as `name`. It raises ValueError if the name is taken."""

        def add(cls: T) -> T:
            if not cls.__module__.startswith(f"{self.package}."):
                self._load()  # a name of ours is taken, whichever is imported first
            if not NAME.fullmatch(name):
                raise ValueError(f"{self.kind} {name!r} cannot be written on a command line; use a-z, 0-9, '-' and '.'")
            if name in self._classes:
                taken = self._classes[name].__module__
                raise ValueError(
                    f"{self.kind} {name!r} is registered twice: {taken} and {cls.__module__}; "
                    "an installed package needs no `--plugin`"
                )
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def __getitem__(self, name: str) -> T:
        """Return the class called `name`. Raises UserError with the choices, or with the reason if it is broken."""
        self._load()
        if name in self._classes:
            return self._classes[name]
        if name in self.broken:
            raise UserError(
                f"{self.kind} {name!r} is installed but broken: {self.broken[name]}. Repair or uninstall that package, "
                f"or leave {name!r} out; `mtbench ls {self.kind}s` lists the others."
            )
        error = unknown(self.kind, name, self._classes, f"mtbench ls {self.kind}s")
        if self.broken:
            raise UserError(f"{error} Broken: {', '.join(sorted(self.broken))}.")
        raise error

    def __contains__(self, name: object) -> bool:
        self._load()
        return name in self._classes

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._classes))

    def of_module(self, module: str) -> dict[str, T]:
        """Return the classes that a module has registered, by name."""
        return {name: cls for name, cls in self._classes.items() if cls.__module__ == module}

    def forget(self, module: str) -> None:
        """Remove the classes of a module."""
        for name in self.of_module(module):
            del self._classes[name]

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        self._import_package()
        self._load_entry_points()
        self._drop_invalid()

    def _import_package(self) -> None:
        """Import every module of `package`, which registers its classes."""
        try:
            package = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            if error.name != self.package:
                raise
            raise UserError(f"{self.package} is not installed; run `pip install -e .` in the project") from None
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")

    def _load_entry_points(self) -> None:
        """Import the modules of other packages; an entry that fails registers nothing and is broken."""
        from importlib.metadata import entry_points  # not needed for `--help`

        for entry in entry_points(group=self.package):
            before = set(self._classes)
            try:
                entry.load()
            except (Exception, SystemExit) as error:
                for name in set(self._classes) - before:
                    del self._classes[name]
                self._mark_broken(entry.name, error, f"package {entry.dist.name}" if entry.dist else entry.value)

    def _drop_invalid(self) -> None:
        for name, cls in list(self._classes.items()):
            if not cls.__module__.startswith(f"{self.package}."):
                try:
                    for check in self.checks:
                        check(cls)
                except Exception as error:
                    del self._classes[name]
                    self._mark_broken(name, error, f"module {cls.__module__}")

    def _mark_broken(self, name: str, error: BaseException, source: str) -> None:
        self.broken[name] = f"{type(error).__name__}: {first_line(error)} ({source})"


_registries: list[Registry[Any]] = []  # METHODS and SUITES, as far as they are imported


# --- Files ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PluginFile:
    """A file that registers methods, suites or engines, with its content when it was read."""

    path: str  # absolute
    source: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.source).hexdigest()

    @property
    def module(self) -> str:
        """The name of the module that the file becomes."""
        return f"mtbench_plugin_{self.sha256[:16]}"


_imported: dict[str, PluginFile] = {}  # path -> the file of this process, as it was imported last


def load_file(path: str | Path) -> PluginFile:
    """Import a file that registers methods, suites or engines. A file that changed replaces what it registered before.

    Raises UserError in one line if it cannot be read, raises an error or registers nothing usable.
    """
    file = read_file(path)
    load([file])
    return file


def read_file(path: str | Path) -> PluginFile:
    """Return a file that would register methods, suites or engines. Raises UserError if it cannot be read."""
    absolute = Path(path).expanduser().resolve()
    try:
        return PluginFile(str(absolute), files.read_bytes(absolute, LARGEST_PLUGIN))
    except FileNotFoundError as error:
        raise UserError(f"--plugin {str(path)!r} cannot be read: {error.strerror}; give a Python file.") from None
    except UserError as error:
        raise UserError(f"--plugin {str(path)!r}: {error}") from None


def load(plugins: Iterable[PluginFile]) -> None:
    """Import files as they were read, unless this process has done so. Raises UserError as `load_file` does."""
    for file in plugins:
        if file.module in sys.modules:
            continue
        if file.path in _imported:
            _forget(_imported[file.path])
        _import(file)
        _imported[file.path] = file


def loaded() -> tuple[PluginFile, ...]:
    """Return the files that this process has imported."""
    return tuple(_imported.values())


def as_options() -> str:
    """Return the options that name these files to another command, each after a space; empty without files."""
    return "".join(f" --plugin {shlex.quote(file.path)}" for file in loaded())


def files_of(classes: Iterable[type[Any]]) -> dict[str, str]:
    """Return the files that registered some of the classes: path -> SHA-256."""
    modules = {cls.__module__ for cls in classes}
    return {file.path: file.sha256 for file in loaded() if file.module in modules}


def refuse_missing(needed: Mapping[str, str]) -> None:
    """Raise UserError unless this process has imported each file that a plan needs. `needed`: path -> SHA-256."""
    have = {file.sha256 for file in loaded()}
    for path, sha256 in needed.items():
        if sha256 in have:
            continue
        for file in loaded():
            if Path(file.path).name == Path(path).name:
                raise UserError(
                    f"the plugin {file.path!r} changed since the plan was made (SHA-256 {sha256[:12]}…, now "
                    f"{file.sha256[:12]}…); restore it, or start another run with `mtbench run -o DIR`."
                )
        raise UserError(
            f"the plan needs the plugin {path!r}, which is code and which this command does not name; if you trust it, "
            f"add `--plugin {shlex.quote(path)}`."
        )


@dataclass(frozen=True)
class InChild:
    """A function for a new process, which first imports the plugin files of this one, as they were read here."""

    function: Callable[..., Any]
    plugins: tuple[PluginFile, ...] = field(default_factory=loaded)

    def __call__(self, *arguments: Any) -> Any:
        load(self.plugins)
        return self.function(*arguments)


def _import(file: PluginFile) -> None:
    module = ModuleType(file.module)
    module.__file__ = file.path
    sys.modules[file.module] = module
    try:
        exec(compile(file.source, file.path, "exec"), module.__dict__)
        _check(file)
    except BaseException as error:
        _forget(file)
        if isinstance(error, UserError):
            raise
        if isinstance(error, Exception | SystemExit):
            raise _refusal(file, _line(error, file), error) from None
        raise


def _check(file: PluginFile) -> None:
    """Raise UserError unless the file has registered something, and all of it satisfies its interface."""
    registered = [(registry, cls) for registry in _registries for cls in registry.of_module(file.module).values()]
    if not registered:
        raise UserError(
            f"--plugin {file.path!r} registers no method, suite or engine; see `@METHODS.register`, "
            "`@SUITES.register` and `@SERVING_ENGINES.register` in examples/mtbench-example."
        )
    for registry, cls in registered:
        for check in registry.checks:
            try:
                check(cls)
            except Exception as error:
                raise _refusal(file, inspect.getsourcelines(cls)[1], error) from None


def _forget(file: PluginFile) -> None:
    for registry in _registries:
        registry.forget(file.module)
    sys.modules.pop(file.module, None)
    _imported.pop(file.path, None)


def _line(error: BaseException, file: PluginFile) -> int | None:
    """Return the line of the file at which an error was raised."""
    if isinstance(error, SyntaxError) and error.filename == file.path:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file.path]
    return lines[-1] if lines else None


def _refusal(file: PluginFile, line: int | None, error: BaseException) -> UserError:
    where = file.path if line is None else f"{file.path}, line {line}"
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return UserError(f"--plugin {where}: {kind}{first_line(error)}.")

"""A registry: a name, a class, one file each.

METHODS stands in mtbench/decoding/registry.py and SUITES in mtbench/evaluation/registry.py.

The files of methods/ and suites/ register themselves when imported; other packages join by the entry-point
groups `mtbench.methods` and `mtbench.suites`, each entry naming a module that registers on import (examples/ has one).
What breaks in such a module is that entry's own fault: it is kept in `broken`, and everything else works.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from mtbench.errors import UserError, first_line, unknown

T = TypeVar("T", bound=type[Any])
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # colons, commas, bars, @ and / mean something else on a command line


class Registry(Generic[T]):
    """Names to classes. Filled by importing every module of `package` and every entry point of that group."""

    def __init__(self, kind: str, package: str, check: Callable[[type[Any]], None]) -> None:
        self.kind = kind
        self.package = package
        self.broken: dict[str, str] = {}  # what is installed and cannot be used, by its name: why, and whose it is
        self.checks = [check]  # each raises if a stranger's class is not what the rest of the core counts on
        self._classes: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator: the class is known as `name` and stays importable. Raises if the name is taken."""

        def add(cls: T) -> T:
            if not NAME.fullmatch(name):
                raise ValueError(f"{self.kind} {name!r} cannot be written on a command line; use a-z, 0-9, '-' and '.'")
            if name in self._classes:
                taken = self._classes[name].__module__
                raise ValueError(f"{self.kind} {name!r} is registered twice: {taken} and {cls.__module__}")
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def __getitem__(self, name: str) -> T:
        """The class called `name`; raises UserError with the choices, or with what is wrong with it."""
        self._load()
        if name in self._classes:
            return self._classes[name]
        if name in self.broken:
            raise UserError(
                f"{self.kind} {name!r} is installed but broken: {self.broken[name]}. Mend or uninstall that package, "
                f"or leave {name!r} out; `mtbench ls {self.kind}s` lists the others."
            )
        error = unknown(self.kind, name, self._classes, f"mtbench ls {self.kind}s")
        raise UserError(f"{error} Broken: {', '.join(sorted(self.broken))}.") if self.broken else error

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._classes))

    def _load(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        try:
            package = importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            if error.name != self.package:
                raise
            raise UserError(f"{self.package} is not installed; run `pip install -e .` in the project") from None
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        for entry in entry_points(group=self.package):
            before = set(self._classes)
            try:
                entry.load()
            except (Exception, SystemExit) as error:
                for name in set(self._classes) - before:  # half a module is none
                    del self._classes[name]
                self._blame(entry.name, error, f"package {entry.dist.name}" if entry.dist else entry.value)
        for name, cls in list(self._classes.items()):
            if not cls.__module__.startswith(f"{self.package}."):
                try:
                    for check in self.checks:
                        check(cls)
                except Exception as error:
                    del self._classes[name]
                    self._blame(name, error, f"module {cls.__module__}")

    def _blame(self, name: str, error: BaseException, whose: str) -> None:
        self.broken[name] = f"{type(error).__name__}: {first_line(error)} ({whose})"

"""A registry of classes by name, one file for each class.

The registries are METHODS in mtbench/decoding/registry.py and SUITES in mtbench/evaluation/registry.py.

The files of methods/ and suites/ register their classes when imported. Other packages use the entry-point groups
`mtbench.methods` and `mtbench.suites`; an entry names a module that registers on import (examples/ has one). If such a
module fails, its entry is listed in `broken` with the reason, and everything else works.
"""

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from mtbench.errors import UserError, first_line, unknown

T = TypeVar("T", bound=type[Any])
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")  # arms on the command line use : , | @ and / as separators


class Registry(Generic[T]):
    """Maps names to classes. The first look-up imports all modules of `package` and all entry points of that group."""

    def __init__(self, kind: str, package: str, check: Callable[[type[Any]], None]) -> None:
        self.kind = kind
        self.package = package
        self.broken: dict[str, str] = {}  # name of an installed but unusable entry -> the reason and its package
        self.checks = [check]  # each raises if a class of another package violates the interface
        self._classes: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Return a class decorator that registers the class as `name`. It raises ValueError if the name is taken."""

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

    def __iter__(self) -> Iterator[str]:
        self._load()
        return iter(sorted(self._classes))

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
        for entry in entry_points(group=self.package):
            before = set(self._classes)
            try:
                entry.load()
            except (Exception, SystemExit) as error:
                for name in set(self._classes) - before:
                    del self._classes[name]
                self._mark_broken(entry.name, error, f"package {entry.dist.name}" if entry.dist else entry.value)

    def _drop_invalid(self) -> None:
        """Remove the classes of other packages that fail a check."""
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

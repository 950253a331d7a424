"""One registry for methods and one for suites: a name, a class, one file each.

The files of methods/ and suites/ register themselves when imported; other packages join by the entry-point
groups `mtbench.methods` and `mtbench.suites`, each entry naming a module that registers on import.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

from mtbench.errors import UserError, unknown

T = TypeVar("T", bound=type[Any])


class Registry(Generic[T]):
    """Names to classes. Filled by importing every module of `package` and every entry point of that group."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self.package = package
        self.broken: dict[str, str] = {}  # entry point -> why it could not be imported
        self._classes: dict[str, T] = {}
        self._loaded = False

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator: the class is known as `name` and stays importable. Raises if the name is taken."""

        def add(cls: T) -> T:
            if name in self._classes:
                taken = self._classes[name].__module__
                raise ValueError(f"{self.kind} {name!r} is registered twice: {taken} and {cls.__module__}")
            cls.name = name
            self._classes[name] = cls
            return cls

        return add

    def __getitem__(self, name: str) -> T:
        """The class called `name`; raises UserError with the choices."""
        self._load()
        if name not in self._classes:
            raise unknown(self.kind, name, self._classes, f"mtbench ls {self.kind}s")
        return self._classes[name]

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
            try:
                entry.load()
            except Exception as error:  # a stranger's module: its own cells fail, not the command
                self.broken[entry.name] = f"{type(error).__name__}: {error}"


METHODS: Registry[Any] = Registry("method", "mtbench.methods")
SUITES: Registry[Any] = Registry("suite", "mtbench.suites")

"""SUITES: every benchmark by its name. A suite is one file in suites/, or a plugin's module."""

from typing import Any

from mtbench.evaluation.suite import Suite
from mtbench.plugins import Registry


def _check_suite(cls: type[Any]) -> None:
    """Raise TypeError unless the class and its attributes have the types that mtbench relies on."""
    if not issubclass(cls, Suite):
        raise TypeError(f"{cls.__name__} is no mtbench.evaluation.suite.Suite")
    for name, kind in {"family": str, "max_new_tokens": int, "metric": str | None}.items():
        if not isinstance(getattr(cls, name), kind):
            raise TypeError(f"{cls.__name__}.{name} is {getattr(cls, name)!r}, not {kind}")


SUITES: Registry[Any] = Registry("suite", "mtbench.suites", _check_suite)
